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

from jaxllm.kernels.decode.common import MASK_VALUE, DecodeSpec

LANES = 128
_BLOCK_BYTES = 2**20  # keys per step; VMEM has four such buffers, two for keys and two for values
_SCORES_BYTES = 2**20


def slots_last(head_dim: int) -> bool:
    """Returns whether the slots, rather than the elements of a head, are in the lanes."""
    return head_dim % LANES != 0


def block_length(kv_heads: int, queries: int, head_dim: int, itemsize: int, slots: int) -> int:
    """Returns the number of slots per step: all slots, or a multiple of the 128 lanes."""
    slot_bytes = kv_heads * head_dim * itemsize
    most = min(_BLOCK_BYTES // slot_bytes, _SCORES_BYTES // (4 * kv_heads * max(queries, 8)), 1024)
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
    spec: DecodeSpec,
    interpret: bool,
) -> tuple[Float[Array, "B splits K R H"], Float[Array, "B splits K R"], Float[Array, "B splits K R"]]:
    """Computes the partial attention of each split; arguments and results are those of `decode.gpu.partials`.

    Raises:
      ValueError: The dtype is float16, which TPUs do not support.
    """
    if jnp.float16 in (q.dtype, k.dtype):
        raise ValueError("TPUs have no float16: take bfloat16 or float32")
    B, K, R, H = q.shape
    S = spec.slots
    block = block_length(K, R, H, max(k.dtype.itemsize, 2), S)
    transposed = slots_last(H)
    if transposed:
        k, v = k.swapaxes(3, 4), v.swapaxes(3, 4)
    splits = split_count(B, S, block)
    steps = pl.cdiv(pl.cdiv(S, block), splits)
    kernel = functools.partial(_kernel, spec=spec, block=block, transposed=transposed, splits=splits)

    def block_index(b: Any, split: Any, step: Any, lengths_ref: Any) -> Any:
        first, end = spec.block_range(lengths_ref[b], split, block, splits)
        return jnp.clip(first + step, 0, jnp.maximum(end - 1, 0))

    def kv_index(b: Any, split: Any, step: Any, lengths_ref: Any, layer_ref: Any) -> tuple[Any, ...]:
        at = block_index(b, split, step, lengths_ref)
        return (layer_ref[0], b, 0, 0, at) if transposed else (layer_ref[0], b, 0, at, 0)

    def scales_index(b: Any, split: Any, step: Any, lengths_ref: Any, layer_ref: Any) -> tuple[Any, ...]:
        return layer_ref[0], b, 0, block_index(b, split, step, lengths_ref)

    def split_index(b: Any, split: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return b, split, 0, 0, 0

    kv_block = pl.BlockSpec((None, None, K, *((H, block) if transposed else (block, H))), kv_index)
    acc, m, l = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, splits, steps),
            in_specs=[
                pl.BlockSpec((None, K, R, H), lambda b, split, step, *_: (b, 0, 0, 0)),
                kv_block,
                kv_block,
                *[pl.BlockSpec((None, None, K, block), scales_index)] * len(scales),
            ],
            out_specs=[
                pl.BlockSpec((None, None, K, R, H), split_index),
                pl.BlockSpec((None, None, K, R, 1), split_index),
                pl.BlockSpec((None, None, K, R, 1), split_index),
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
    return acc, m[..., 0], l[..., 0]


def _kernel(
    lengths_ref: Any,
    layer_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *refs: Any,
    spec: DecodeSpec,
    block: int,
    transposed: bool,
    splits: int,
) -> None:
    del layer_ref  # read by the index maps
    *scale_refs, acc_ref, m_ref, l_ref = refs
    R = q_ref.shape[1]
    split, step = pl.program_id(1), pl.program_id(2)
    length = lengths_ref[pl.program_id(0)]
    first, end = spec.block_range(length, split, block, splits)

    letters, slot_dim = ("khs", 2) if transposed else ("ksh", 1)

    @pl.when(step == 0)
    def begin() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        m_ref[...] = jnp.full_like(m_ref, MASK_VALUE)
        l_ref[...] = jnp.zeros_like(l_ref)

    @pl.when(first + step < end)
    def update() -> None:
        q = q_ref[...]
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
        s = einsum(f"kqh,{letters}->kqs", q, k_ref[...].astype(q.dtype)) * spec.scale
        if scale_refs:
            s *= scale_refs[0][...][:, None, :]
        if spec.softcap:
            s = spec.softcap * jnp.tanh(s / spec.softcap)
        start = (first + step) * block
        slot = start + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        row = jax.lax.broadcasted_iota(jnp.int32, (R, 1), 0)
        position = spec.query_positions(row, R, length)
        mask = spec.mask(slot, position, length)[None]
        s = jnp.where(mask, s, MASK_VALUE)
        m = jnp.maximum(m_ref[...], s.max(-1, keepdims=True))
        p = jnp.where(mask, jnp.exp(s - m), 0.0)
        alpha = jnp.exp(m_ref[...] - m)
        m_ref[...] = m
        l_ref[...] = l_ref[...] * alpha + p.sum(-1, keepdims=True)
        values = v_ref[...].astype(q.dtype)
        if spec.slots % block:
            # Values read past the end of the cache may be NaN, and 0 · NaN is NaN.
            in_cache = start + jax.lax.broadcasted_iota(jnp.int32, (1, *values.shape[1:]), slot_dim) < spec.slots
            values = jnp.where(in_cache, values, jnp.zeros_like(values))
        if scale_refs:
            p *= scale_refs[1][...][:, None, :]
            if spec.slots % block:
                p = jnp.where(mask, p, 0.0)
        acc_ref[...] = acc_ref[...] * alpha + einsum(f"kqs,{letters}->kqh", p.astype(q.dtype), values)
