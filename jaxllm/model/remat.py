"""Activation checkpointing (remat): selects the activations of a block to save, by their tags.

Activations that a policy of `jaxllm.config.remat` does not save are recomputed in the backward pass. No policy saves
values that are cheaper to recompute than to store: norm statistics, activation functions, dtype conversions and
all-gathered weights.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxllm.config.remat import RematPolicy

Block = Callable[..., Any]


def rematerialize(block: Block, policy: RematPolicy, prevent_cse: bool) -> Block:
    """Wraps a block in `jax.checkpoint` with the given policy.

    Under `sqrt`, this is applied to each block inside a group that is itself recomputed as a whole.

    Args:
      block: Function to wrap.
      policy: Remat policy.
      prevent_cse: Whether to prevent XLA from merging the recomputation with the forward pass, which would save all
        activations after all. Required outside a loop over layers, where both passes are in one computation.
    """
    saved: Any
    if policy.kind == "offload":
        saved = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(policy.tags),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        saved = jax.checkpoint_policies.save_only_these_names(*policy.kept)
    return jax.checkpoint(block, prevent_cse=prevent_cse, policy=saved)
