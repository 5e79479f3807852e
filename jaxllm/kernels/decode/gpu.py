"""Decode attention kernel for NVIDIA GPUs, in Pallas's Triton dialect.

Each program processes the queries of one key head over one split of the slots that its row uses, independent of the
cache size. It writes the partial m, l and acc, which `decode_attention` combines ("Flash-Decoding", Dao et al. 2023).
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

# Large, but the difference of two such values is finite.
MASK_VALUE = -1e30
M_INIT = DECODE_HEAD_MULTIPLE  # minimum size of each matmul dimension
_MAX_ROWS = 64  # queries per program
_PROGRAMS = 264  # two per multiprocessor of an H100
_TILE_BYTES = 16 * 2**10  # bytes of keys per step


def split_count(batch: int, kv_heads: int, queries: int, slots: int, block: int) -> int:
    """Returns the number of splits per row: enough programs to fill the device, with about two steps or more each."""
    alone = batch * kv_heads * pl.cdiv(queries, _MAX_ROWS)
    return max(1, min(pl.cdiv(_PROGRAMS, alone), pl.cdiv(slots, 2 * block)))


def reaches(shape: tuple[int, ...], itemsize: int) -> bool:
    """Returns whether Pallas can index the whole array.

    Pallas uses signed 32-bit element offsets for arrays up to 4 GiB and 64-bit offsets above. An array of 1-byte
    elements between 2 and 4 GiB therefore has elements that it cannot index.
    """
    size = math.prod(shape)
    return size <= 2**31 or size * itemsize > 2**32


def block_length(head_dim: int, itemsize: int) -> int:
    """Returns the number of slots processed per step."""
    width = pl.next_power_of_2(head_dim)
    return max(16, min(128, _TILE_BYTES // (width * itemsize)))


def parts_of(head_dim: int) -> list[tuple[int, int]]:
    """Decomposes a head into power-of-two parts, as Triton blocks require; 80 becomes 64 and 16.

    Returns:
      The (offset, size) of each part.

    Raises:
      ValueError: head_dim is not a multiple of 16, the minimum for a tensor core.
    """
    if head_dim % M_INIT:
        raise ValueError(f"head_dim is {head_dim}; on GPUs decode attention takes multiples of {M_INIT}")
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
    """Computes the partial attention of each split of a row's slots, for `combine` in `decode.api`.

    Args:
      q: R queries per key head, ordered by token.
      k, v: Stacked caches.
      lengths: Tokens of each row in the cache, including the new ones.
      layer: Layer to read.
      scales: Scales of keys and values of an int8 cache; empty for other caches.
      tokens: New tokens per row.
      window: Number of visible positions, including the query's own; 0 means all.
      scale: Factor of q·k.
      softcap: Applies c·tanh(score / c) before the mask; 0 disables it.
      interpret: Runs the kernel in Pallas's interpreter.

    Returns:
      The weighted sum of values acc, the maximum m and the sum of weights l of each split, in float32.

    Raises:
      ValueError: `parts_of` does not support the head_dim, or the cache is too large for Pallas's 32-bit offsets.
    """
    B, K, R, H = q.shape
    S = k.shape[3]
    if not reaches(k.shape, k.dtype.itemsize):
        raise ValueError(f"an int8 cache of {k.size} elements cannot be indexed: take fewer than 2**31 or over 2**32")
    block = block_length(H, max(q.dtype.itemsize, k.dtype.itemsize))
    splits = split_count(B, K, R, S, block)
    rows = min(max(pl.next_power_of_2(R), M_INIT), _MAX_ROWS)
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
        """Loads the parts of each vector, with zeros for absent vectors."""
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
    # The splits divide the slots in use, not the whole cache.
    first_step = jax.lax.div(first, block)
    share = pl.cdiv(pl.cdiv(end, block) - first_step, splits)
    low = first_step + split * share
    high = jnp.minimum(low + share, pl.cdiv(end, block))

    def step(i: Array, carry: tuple[Array, Array, list[Array]]) -> tuple[Array, Array, list[Array]]:
        m, total, acc = carry
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
        scores = jnp.where(seen, scores, MASK_VALUE)
        new_biggest = jnp.maximum(m, scores.max(1))
        weights = jnp.where(seen, jnp.exp(scores - new_biggest[:, None]), 0.0)
        alpha = jnp.exp(m - new_biggest)
        total = total * alpha + weights.sum(1)
        if scale_refs:
            weights *= plgpu.load(scale_refs[1].at[*at], mask=slot < S, other=0.0)[None, :]
        values = load(v_ref, at, there)
        added = [dot(weights.astype(dtype), x.astype(dtype), (((1,), (0,)), ((), ()))) for x in values]
        return new_biggest, total, [x * alpha[:, None] + y for x, y in zip(acc, added, strict=True)]

    nothing = (
        jnp.full((rows,), MASK_VALUE, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        [jnp.zeros((rows, size), jnp.float32) for _, size in parts],
    )
    m, total, acc = jax.lax.fori_loop(low, high, step, nothing)
    at = (b, split, head, pl.ds(start, rows))
    inside = start + jnp.arange(rows) < R
    for (offset, size), x in zip(parts, acc, strict=True):
        plgpu.store(acc_ref.at[*at, pl.ds(offset, size)], x, mask=jnp.broadcast_to(row < R, x.shape))
    plgpu.store(max_ref.at[*at], m, mask=inside)
    plgpu.store(sum_ref.at[*at], total, mask=inside)
