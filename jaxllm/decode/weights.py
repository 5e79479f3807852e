"""How weights lie in memory while a TPU decodes.

The projections to queries, keys and values are declared [D, N, H]. A TPU's registers hold 8 × 128 numbers of the last
two dimensions, so that a product over D can read them only in another order: XLA makes such a copy of all layers' in
every call of the token loop, 57 % more bytes of a decoded token of a 1B model with heads of 128. Stored as [N, H, D]
they are read where they lie.
"""

from typing import Any

import jax
import jax.numpy as jnp

_TURNED = ("q", "k", "v")


def turn(params: Any) -> Any:
    """The parameter tree with the projections' dimension of width last."""
    return _moved(params, -3, -1)


def straighten(params: Any) -> Any:
    """The tree that `turn` was given: for products inside a program, where it costs nothing."""
    return _moved(params, -1, -3)


def _moved(params: Any, source: int, destination: int) -> Any:
    def move(path: Any, x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, source, destination) if path[-1].key in _TURNED else x

    return jax.tree_util.tree_map_with_path(move, params)
