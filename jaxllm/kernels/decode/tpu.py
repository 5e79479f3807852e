"""Decode attention kernel for TPUs, in Pallas's Mosaic dialect.

The grid iterates over a row's slots block by block, with all key heads at once. The index maps compute the next block
from the row's length. Past the last block in use the index stays constant, so Pallas does not load a block again.

A register has 128 lanes. If head_dim is not a multiple of 128, the kernel reads the cache with the slots in the lanes,
the layout that XLA chooses for such a cache. With head_dim in the lanes, half of a cache of head_dim 64 would be
padding, and XLA would copy the cache to that layout.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxllm.kernels.decode import slots as decode_slots

# Large, but the difference of two such values is finite.
MASK_VALUE = -1e30
LANES = 128
_BLOCK_BYTES = 2**20  # keys per step; VMEM has four such buffers, two for keys and two for values
_SCORES_BYTES = 2**20


def slots_last(head_dim: int) -> bool:
    """Returns whether the slots, rather than the elements of a head, are in the lanes."""
    return head_dim % LANES != 0


def block_length(kv_heads: int, queries: int, head_dim: int, itemsize: int, slots: int) -> int:
    """Returns the number of slots per step: all slots, or a multiple of the 128 lanes."""
    a_slot = kv_heads * head_dim * itemsize
    most = min(_BLOCK_BYTES // a_slot, _SCORES_BYTES // (4 * kv_heads * max(queries, 8)), 1024)
    block = max(most // LANES * LANES, LANES)
    return min(block, slots)


def split_count(batch: int, slots: int, block: int) -> int:
    """Returns the splits per row: two for a single row, which would leave the second core of a v4 or v5p idle."""
    return 1 if batch > 1 or slots <= block else 2


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
      ValueError: The dtype is float16, which TPUs do not support.
    """
    if jnp.float16 in (q.dtype, k.dtype):
        raise ValueError("TPUs have no float16: take bfloat16 or float32")
    B, K, R, H = q.shape
    S = k.shape[3]
    block = block_length(K, R, H, max(k.dtype.itemsize, 2), S)
    transposed = slots_last(H)
    if transposed:
        k, v = k.swapaxes(3, 4), v.swapaxes(3, 4)
    splits = split_count(B, S, block)
    steps = pl.cdiv(pl.cdiv(S, block), splits)
    kernel = functools.partial(
        _kernel,
        block=block,
        slots=S,
        transposed=transposed,
        tokens=tokens,
        window=window,
        scale=scale,
        softcap=softcap,
        splits=splits,
    )

    def place(b: Any, split: Any, step: Any, lengths_ref: Any) -> Any:
        low, high = _share(lengths_ref[b], split, tokens=tokens, slots=S, window=window, block=block, splits=splits)
        return jnp.clip(low + step, 0, jnp.maximum(high - 1, 0))

    def cached(b: Any, split: Any, step: Any, lengths_ref: Any, layer_ref: Any) -> tuple[Any, ...]:
        at = place(b, split, step, lengths_ref)
        return (layer_ref[0], b, 0, 0, at) if transposed else (layer_ref[0], b, 0, at, 0)

    def cached_scales(b: Any, split: Any, step: Any, lengths_ref: Any, layer_ref: Any) -> tuple[Any, ...]:
        return layer_ref[0], b, 0, place(b, split, step, lengths_ref)

    def of_split(b: Any, split: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return b, split, 0, 0, 0

    kv_block = pl.BlockSpec((None, None, K, *((H, block) if transposed else (block, H))), cached)
    acc, m, total = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, splits, steps),
            in_specs=[
                pl.BlockSpec((None, K, R, H), lambda b, split, step, *_: (b, 0, 0, 0)),
                kv_block,
                kv_block,
                *[pl.BlockSpec((None, None, K, block), cached_scales)] * len(scales),
            ],
            out_specs=[
                pl.BlockSpec((None, None, K, R, H), of_split),
                pl.BlockSpec((None, None, K, R, 1), of_split),
                pl.BlockSpec((None, None, K, R, 1), of_split),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B, splits, K, R, H), jnp.float32),
            jax.ShapeDtypeStruct((B, splits, K, R, 1), jnp.float32),
            jax.ShapeDtypeStruct((B, splits, K, R, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        # The cost of the layer that is read; XLA would count the whole stack.
        cost_estimate=pl.CostEstimate(
            flops=4 * B * K * R * S * H,
            transcendentals=B * K * R * S,
            bytes_accessed=2 * B * K * S * H * k.dtype.itemsize + sum(x.size // x.shape[0] * 4 for x in scales),
        ),
        interpret=interpret,
        name="decode_attention",
    )(lengths, layer[None], q, k, v, *scales)
    return acc, m[..., 0], total[..., 0]


def _share(
    length: Any, split: Any, *, tokens: int, slots: int, window: int, block: int, splits: int
) -> tuple[Any, Any]:
    """Returns the block range [first, end) of one split, among the blocks that the row uses."""
    first, end = decode_slots.span(length, tokens, slots, window)
    first_block, end_block = jax.lax.div(first, block), jax.lax.div(end + (block - 1), block)
    share = jax.lax.div(end_block - first_block + (splits - 1), splits)
    low = first_block + split * share
    return low, jnp.minimum(low + share, end_block)


def _kernel(
    lengths_ref: Any,
    layer_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *refs: Any,
    block: int,
    slots: int,
    transposed: bool,
    tokens: int,
    window: int,
    scale: float,
    softcap: float,
    splits: int,
) -> None:
    del layer_ref  # read by the index maps
    *scale_refs, acc_ref, max_ref, sum_ref = refs
    R = q_ref.shape[1]
    split, step = pl.program_id(1), pl.program_id(2)
    length = lengths_ref[pl.program_id(0)]
    low, high = _share(length, split, tokens=tokens, slots=slots, window=window, block=block, splits=splits)

    letters, slot_dim = ("khs", 2) if transposed else ("ksh", 1)

    @pl.when(step == 0)
    def _begin() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        max_ref[...] = jnp.full_like(max_ref, MASK_VALUE)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(low + step < high)
    def _add() -> None:
        q = q_ref[...]
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
        scores = product(f"kqh,{letters}->kqs", q, k_ref[...].astype(q.dtype)) * scale
        if scale_refs:
            scores *= scale_refs[0][...][:, None, :]
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        begin = (low + step) * block
        slot = begin + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        row = jax.lax.broadcasted_iota(jnp.int32, (R, 1), 0)
        position = length - tokens + decode_slots.query_tokens(row, tokens, R // tokens)
        seen = decode_slots.visible(slot, position, length, slots, window)[None]
        scores = jnp.where(seen, scores, MASK_VALUE)
        m = jnp.maximum(max_ref[...], scores.max(-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - m), 0.0)
        alpha = jnp.exp(max_ref[...] - m)
        max_ref[...] = m
        sum_ref[...] = sum_ref[...] * alpha + weights.sum(-1, keepdims=True)
        values = v_ref[...].astype(q.dtype)
        if slots % block:
            # Values read past the end of the cache may be NaN, and 0 · NaN is NaN.
            there = begin + jax.lax.broadcasted_iota(jnp.int32, (1, *values.shape[1:]), slot_dim) < slots
            values = jnp.where(there, values, jnp.zeros_like(values))
        if scale_refs:
            weights *= scale_refs[1][...][:, None, :]
            if slots % block:
                weights = jnp.where(seen, weights, 0.0)
        acc_ref[...] = acc_ref[...] * alpha + product(f"kqs,{letters}->kqh", weights.astype(q.dtype), values)
