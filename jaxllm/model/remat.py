"""What the backward pass keeps of each block, by the tags the block gives its activations."""

from collections.abc import Callable
from typing import Any

import jax

# The tags of jax.ad_checkpoint.checkpoint_name, in the order a block computes them.
TAGS = ("attn_qkv", "attn_context", "attn_out", "resid_mid", "mlp_up", "mlp_gate", "mlp_down", "mlp_out")


def rematerialize(block: Callable[..., Any], policy: str, in_loop: bool) -> Callable[..., Any]:
    """The block under a policy: `none` keeps what it computes, `full` its inputs only.

    Args:
      in_loop: whether the block runs in a loop over layers, where forward and backward are loops of their own.
        Outside one, XLA would merge the recomputation with the forward pass, and so keep everything.
    """
    if policy == "none":
        return block
    assert policy == "full", policy
    return jax.checkpoint(block, prevent_cse=not in_loop, policy=jax.checkpoint_policies.nothing_saveable)
