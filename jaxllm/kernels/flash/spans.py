"""Ranges of tiles that a block of queries or keys iterates over on a GPU, and which of them need a mask."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxllm.kernels.flash.tile import AttentionSpec, Index, blocks_of
from jaxllm.kernels.flash.tile_sizes import Tile

# Tile range [first, end), and whether its scores need a mask.
Span = tuple[Index, Index, bool]


def key_spans(spec: AttentionSpec, start: Index, tile: Tile, segmented: bool) -> Sequence[Span]:
    """Returns the spans of key tiles for the block of queries that starts at `start`; the spans are contiguous."""
    low, high = blocks_of(spec.keys_of(start, jnp.minimum(start + tile.queries, spec.queries)), tile.keys)
    if segmented or spec.window:
        return [(low, high, True)]
    # Tiles that end at or before the first query's position, and before the last key, are fully visible.
    seen = jnp.minimum(jnp.maximum(start + spec.offset + 1, 0), spec.keys) if spec.causal else spec.keys
    whole = lax.div(seen, tile.keys) if spec.causal else spec.keys // tile.keys
    return [(0, whole, False), (whole, high, True)]


def query_spans(spec: AttentionSpec, start: Index, tile: Tile, segmented: bool) -> Sequence[Span]:
    """Returns the spans of query tiles for the block of keys that starts at `start`.

    Queries past the end need no mask because their output gradient is 0.
    """
    end = jnp.minimum(start + tile.keys, spec.keys)
    low, high = blocks_of(spec.queries_of(start, end), tile.queries)
    if segmented or spec.window:
        return [(low, high, True)]
    if not spec.causal:
        return [(low, high, False)]
    whole = lax.div(jnp.maximum(end - 1 - spec.offset, 0) + tile.queries - 1, tile.queries)
    return [(low, jnp.minimum(whole, high), True), (jnp.minimum(whole, high), high, False)]


def loop(spans: Sequence[Span], step: Callable[..., Any], carry: Any) -> Any:
    """Applies carry = step(tile, carry, masked=…) to each tile of the spans in order and returns the final carry."""
    for first, end, masked in spans:
        carry = lax.fori_loop(first, end, functools.partial(step, masked=masked), carry)
    return carry
