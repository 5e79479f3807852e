"""Decode attention on NVIDIA GPUs, through Pallas' Triton path.

A program takes the queries of one key head and a share of the slots that its row uses, whatever the cache's size, and
leaves maximum, sum and weighted values for `decode_attention` to combine (Dao et al. 2023, "Flash-Decoding").
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jaxllm.config.attention import DECODE_HEAD_MULTIPLE
from jaxllm.kernels.decode import slots as decode_slots

# Large, finite: a difference of two of them is still finite.
MASKED = -1e30
LEAST = DECODE_HEAD_MULTIPLE  # of each dimension of a product
_MOST_ROWS = 64  # of queries in one program
_PROGRAMS = 264  # two for each multiprocessor of an H100
_TILE_BYTES = 16 * 2**10  # of keys in one step


def split_count(batch: int, kv_heads: int, queries: int, slots: int, block: int) -> int:
    """Programs that share a row's slots: so many that the device is busy, and each has two steps or more."""
    alone = batch * kv_heads * pl.cdiv(queries, _MOST_ROWS)
    return max(1, min(pl.cdiv(_PROGRAMS, alone), pl.cdiv(slots, 2 * block)))


def reaches(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether Pallas' offsets reach all of an array: signed 32 bits up to 4 GiB, too few for bytes; then 64."""
    size = math.prod(shape)
    return size <= 2**31 or size * itemsize > 2**32


def block_length(head_dim: int, itemsize: int) -> int:
    """Slots of one step."""
    width = pl.next_power_of_2(head_dim)
    return max(16, min(128, _TILE_BYTES // (width * itemsize)))


def parts_of(head_dim: int) -> list[tuple[int, int]]:
    """(offset, size) of the powers of two that make up a head: what a Triton block can be. 80 is 64 and 16.

    Raises:
      ValueError: not a multiple of 16, the least that a tensor core takes.
    """
    if head_dim % LEAST:
        raise ValueError(f"head_dim is {head_dim}; on GPUs decode attention takes multiples of {LEAST}")
    sizes = [2**bit for bit in range(head_dim.bit_length() - 1, -1, -1) if head_dim & 2**bit]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def partials(
    q: Float[Array, "B K R H"],
    k: Float[Array, "L B K S H"],
    v: Float[Array, "L B K S H"],
    lengths: Int[Array, " B"],
    layer: Int[Array, ""],
    scales: tuple[Float[Array, "L B K S"], ...],
    *,
    tokens: int,
    window: int,
    scale: float,
    softcap: float,
    interpret: bool,
) -> tuple[Float[Array, "B splits K R H"], Float[Array, "B splits K R"], Float[Array, "B splits K R"]]:
    """(weighted values, maximum, sum) of each split, float32.

    Args:
      q: R queries of each key head, token by token.
      scales: of keys and values in int8; empty where they are not.
      tokens: new ones of each row.
    Raises:
      ValueError: a head_dim that `parts_of` refuses, or a cache that Pallas' 32-bit offsets do not reach.
    """
    B, K, R, H = q.shape
    S = k.shape[3]
    if not reaches(k.shape, k.dtype.itemsize):
        raise ValueError(f"an int8 cache of {k.size} elements cannot be indexed: take fewer than 2**31 or over 2**32")
    block = block_length(H, max(q.dtype.itemsize, k.dtype.itemsize))
    splits = split_count(B, K, R, S, block)
    rows = min(max(pl.next_power_of_2(R), LEAST), _MOST_ROWS)
    kernel = functools.partial(
        _kernel,
        block=block,
        rows=rows,
        tokens=tokens,
        window=window,
        scale=scale,
        softcap=softcap,
        splits=splits,
    )
    whole = pl.no_block_spec
    out_shape = [
        jax.ShapeDtypeStruct((B, splits, K, R, H), jnp.float32),
        jax.ShapeDtypeStruct((B, splits, K, R), jnp.float32),
        jax.ShapeDtypeStruct((B, splits, K, R), jnp.float32),
    ]
    arguments = (lengths, layer[None], q, k, v, *scales)
    return pl.pallas_call(
        kernel,
        grid=(splits, K * pl.cdiv(R, rows), B),
        in_specs=[whole] * len(arguments),
        out_specs=[whole] * len(out_shape),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(*arguments)


def _kernel(
    lengths_ref: Any,
    layer_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *refs: Any,
    block: int,
    rows: int,
    tokens: int,
    window: int,
    scale: float,
    softcap: float,
    splits: int,
) -> None:
    *scale_refs, acc_ref, max_ref, sum_ref = refs
    K, R, H = q_ref.shape[1:]
    S = k_ref.shape[3]
    split, head, b = pl.program_id(0), jax.lax.rem(pl.program_id(1), K), pl.program_id(2)
    start = jax.lax.div(pl.program_id(1), K) * rows
    length, layer = lengths_ref[b], layer_ref[0]

    row = start + jnp.arange(rows)[:, None]
    parts = parts_of(H)

    def load(ref: Any, at: tuple[Any, ...], there: Array) -> list[Array]:
        """Vectors' numbers, part by part; zeros where there are none."""
        found = []
        for offset, size in parts:
            mask = jnp.broadcast_to(there, (there.shape[0], size))
            found.append(plgpu.load(ref.at[*at, pl.ds(offset, size)], mask=mask, other=0))
        return found

    precision = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    q = load(q_ref, (b, head, pl.ds(start, rows)), row < R)
    dtype = q[0].dtype
    position = length - tokens + decode_slots.query_tokens(row, tokens, R // tokens)
    first, end = decode_slots.span(length, tokens, S, window)
    # The slots in use, and not the cache, are shared among the splits.
    first_step = jax.lax.div(first, block)
    share = pl.cdiv(pl.cdiv(end, block) - first_step, splits)
    low = first_step + split * share
    high = jnp.minimum(low + share, pl.cdiv(end, block))

    def step(i: Array, carry: tuple[Array, Array, list[Array]]) -> tuple[Array, Array, list[Array]]:
        biggest, total, acc = carry
        at = (layer, b, head, pl.ds(i * block, block))
        slot = i * block + jnp.arange(block)
        there = (slot < S)[:, None]
        keys = load(k_ref, at, there)
        products = [dot(x, y.astype(dtype), (((1,), (1,)), ((), ()))) for x, y in zip(q, keys, strict=True)]
        scores = sum(products[1:], products[0]) * scale
        if scale_refs:
            scores *= plgpu.load(scale_refs[0].at[*at], mask=slot < S, other=0.0)[None, :]
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        seen = decode_slots.visible(slot[None, :], position, length, S, window)
        scores = jnp.where(seen, scores, MASKED)
        new_biggest = jnp.maximum(biggest, scores.max(1))
        weights = jnp.where(seen, jnp.exp(scores - new_biggest[:, None]), 0.0)
        shrunk = jnp.exp(biggest - new_biggest)
        total = total * shrunk + weights.sum(1)
        if scale_refs:
            weights *= plgpu.load(scale_refs[1].at[*at], mask=slot < S, other=0.0)[None, :]
        values = load(v_ref, at, there)
        added = [dot(weights.astype(dtype), x.astype(dtype), (((1,), (0,)), ((), ()))) for x in values]
        return new_biggest, total, [x * shrunk[:, None] + y for x, y in zip(acc, added, strict=True)]

    nothing = (
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        [jnp.zeros((rows, size), jnp.float32) for _, size in parts],
    )
    biggest, total, acc = jax.lax.fori_loop(low, high, step, nothing)
    at = (b, split, head, pl.ds(start, rows))
    inside = start + jnp.arange(rows) < R
    for (offset, size), x in zip(parts, acc, strict=True):
        plgpu.store(acc_ref.at[*at, pl.ds(offset, size)], x, mask=jnp.broadcast_to(row < R, x.shape))
    plgpu.store(max_ref.at[*at], biggest, mask=inside)
    plgpu.store(sum_ref.at[*at], total, mask=inside)
