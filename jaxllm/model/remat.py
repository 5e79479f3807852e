"""Remat: which of a block's activations wait for the backward pass, by the tags the block gives them.

What a policy of `jaxllm.config.remat` does not keep is computed again when it is needed. No policy keeps what is
cheaper to make than to store: norms' statistics, activation functions, dtype conversions, gathered weights.
"""

import math
from collections.abc import Callable
from typing import Any

import jax

from jaxllm.config.remat import RematPolicy

Block = Callable[..., Any]


def rematerialize(block: Block, policy: RematPolicy, prevent_cse: bool) -> Block:
    """The block under a policy; under `sqrt`, a block of the group that is computed again as a whole.

    Args:
      prevent_cse: whether XLA must be kept from merging the recomputation with the forward pass, which keeps
        everything after all: outside a loop over layers, where both passes are in one computation.
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


def group_size(repeats: int, policy: RematPolicy) -> int:
    """Repeats of the layer pattern that are one group of `sqrt`: the divisor of `repeats` that keeps the least.

    A group keeps its input between the passes and all of its blocks while it is in its backward pass, so the sum of
    both counts is least near √repeats (Chen et al. 2016). 1 under other policies.
    """
    if policy.kind != "sqrt" or not repeats:
        return 1
    divisors = [size for size in range(1, repeats + 1) if repeats % size == 0]
    return min(divisors, key=lambda size: abs(math.log(size / math.sqrt(repeats))))
