"""The tiles that a block of queries, or of keys, goes through on a GPU, and which of them need a mask."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxllm.kernels.flash.tile import Index, Rule, blocks_of
from jaxllm.kernels.flash.tile_sizes import Tile

# [first, end) of tiles, and whether their scores need a mask.
Span = tuple[Index, Index, bool]


def key_spans(rule: Rule, start: Index, tile: Tile, segmented: bool) -> Sequence[Span]:
    """Tiles of keys for the block of queries that begins at `start`; they follow each other without a gap."""
    low, high = blocks_of(rule.keys_of(start, jnp.minimum(start + tile.queries, rule.queries)), tile.keys)
    if segmented or rule.window:
        return [(low, high, True)]
    # Tiles that end before the first query's place, and before the end, are seen whole.
    seen = jnp.minimum(jnp.maximum(start + rule.offset + 1, 0), rule.keys) if rule.causal else rule.keys
    whole = lax.div(seen, tile.keys) if rule.causal else rule.keys // tile.keys
    return [(0, whole, False), (whole, high, True)]


def query_spans(rule: Rule, start: Index, tile: Tile, segmented: bool) -> Sequence[Span]:
    """Tiles of queries for the block of keys that begins at `start`. A query past the end has no change, so that it
    needs no mask."""
    end = jnp.minimum(start + tile.keys, rule.keys)
    low, high = blocks_of(rule.queries_of(start, end), tile.queries)
    if segmented or rule.window:
        return [(low, high, True)]
    if not rule.causal:
        return [(low, high, False)]
    whole = lax.div(jnp.maximum(end - 1 - rule.offset, 0) + tile.queries - 1, tile.queries)
    return [(low, jnp.minimum(whole, high), True), (jnp.minimum(whole, high), high, False)]


def loop(spans: Sequence[Span], step: Callable[..., Any], carry: Any) -> Any:
    """carry = step(tile, carry, masked=…) for each tile in turn."""
    for first, end, masked in spans:
        carry = lax.fori_loop(first, end, functools.partial(step, masked=masked), carry)
    return carry
