"""Weight layout for decoding on TPU: Q, K and V projections transposed to [N, H, D].

These projections are declared as [D, N, H]. TPU registers are tiles of 8 × 128 elements of the last two dimensions, so
a matmul over D needs the weights in another order. XLA therefore copies the projections of all layers in every call of
the token loop: 57 % more bytes per decoded token for a 1B model with head dimension 128. Weights stored as [N, H, D]
are read without a copy.
"""

from typing import Any

import jax
import jax.numpy as jnp

_TRANSPOSED = ("q", "k", "v")


def to_tpu_layout(params: Any) -> Any:
    """Transposes the Q, K and V projections to the TPU layout, in which the model width D is the last dimension."""
    return _move_axis(params, -3, -1)


def from_tpu_layout(params: Any) -> Any:
    """Inverts `to_tpu_layout`. For use inside a jitted program, where the transpose is free."""
    return _move_axis(params, -1, -3)


def _move_axis(params: Any, source: int, destination: int) -> Any:
    def move(path: Any, x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, source, destination) if path[-1].key in _TRANSPOSED else x

    return jax.tree_util.tree_map_with_path(move, params)
