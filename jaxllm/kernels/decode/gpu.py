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
from jaxllm.kernels.decode.common import MASK_VALUE, DecodeSpec

_MIN_DIM = DECODE_HEAD_MULTIPLE  # minimum size of each matmul dimension
_MAX_ROWS = 64  # queries per program
_PROGRAMS = 264  # two per multiprocessor of an H100
_TILE_BYTES = 16 * 2**10  # bytes of keys per step


def split_count(batch: int, kv_heads: int, queries: int, slots: int, block: int) -> int:
    """Returns the number of splits per row: enough programs to fill the device, with about two steps or more each."""
    per_split = batch * kv_heads * pl.cdiv(queries, _MAX_ROWS)
    return max(1, min(pl.cdiv(_PROGRAMS, per_split), pl.cdiv(slots, 2 * block)))


def can_index(shape: tuple[int, ...], itemsize: int) -> bool:
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


def head_parts(head_dim: int) -> list[tuple[int, int]]:
    """Decomposes a head into power-of-two parts, as Triton blocks require; 80 becomes 64 and 16.

    Returns:
      The (offset, size) of each part.

    Raises:
      ValueError: head_dim is not a multiple of 16, the minimum for a tensor core.
    """
    if head_dim % _MIN_DIM:
        raise ValueError(f"head_dim is {head_dim}; on GPUs decode attention takes multiples of {_MIN_DIM}")
    sizes = [2**bit for bit in range(head_dim.bit_length() - 1, -1, -1) if head_dim & 2**bit]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


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
    """Computes the partial attention of each split of a row's slots, for `combine` in `decode.api`.

    Args:
      q: R queries per key head, ordered by token.
      k, v: Stacked caches.
      lengths: Tokens of each row in the cache, including the new ones.
      layer: Layer to read.
      scales: Scales of keys and values of an int8 cache; empty for other caches.
      spec: Static parameters.
      interpret: Runs the kernel in Pallas's interpreter.

    Returns:
      The weighted sum of values acc, the maximum m and the sum of weights l of each split, in float32.

    Raises:
      ValueError: `head_parts` does not support the head_dim, or the cache is too large for Pallas's 32-bit offsets.
    """
    B, K, R, H = q.shape
    if not can_index(k.shape, k.dtype.itemsize):
        raise ValueError(
            f"an int8 cache of {k.size} elements cannot be indexed; use at most 2**31 or more than 2**32 elements"
        )
    block = block_length(H, max(q.dtype.itemsize, k.dtype.itemsize))
    splits = split_count(B, K, R, spec.slots, block)
    rows = min(max(pl.next_power_of_2(R), _MIN_DIM), _MAX_ROWS)
    kernel = functools.partial(_kernel, spec=spec, block=block, rows=rows, splits=splits)
    out_shape = [
        jax.ShapeDtypeStruct((B, splits, K, R, H), jnp.float32),
        jax.ShapeDtypeStruct((B, splits, K, R), jnp.float32),
        jax.ShapeDtypeStruct((B, splits, K, R), jnp.float32),
    ]
    arguments = (lengths, layer[None], q, k, v, *scales)
    return pl.pallas_call(
        kernel,
        grid=(splits, K * pl.cdiv(R, rows), B),
        in_specs=[pl.no_block_spec] * len(arguments),
        out_specs=[pl.no_block_spec] * len(out_shape),
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
    spec: DecodeSpec,
    block: int,
    rows: int,
    splits: int,
) -> None:
    *scale_refs, acc_ref, m_ref, l_ref = refs
    K, R, H = q_ref.shape[1:]
    split, head, b = pl.program_id(0), jax.lax.rem(pl.program_id(1), K), pl.program_id(2)
    start = jax.lax.div(pl.program_id(1), K) * rows
    length, layer = lengths_ref[b], layer_ref[0]

    row = start + jnp.arange(rows)[:, None]
    parts = head_parts(H)

    def load(ref: Any, at: tuple[Any, ...], valid: Array) -> list[Array]:
        """Loads the parts of each vector, with zeros for vectors that are not valid."""
        loaded = []
        for offset, size in parts:
            mask = jnp.broadcast_to(valid, (valid.shape[0], size))
            loaded.append(plgpu.load(ref.at[*at, pl.ds(offset, size)], mask=mask, other=0))
        return loaded

    precision = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    q = load(q_ref, (b, head, pl.ds(start, rows)), row < R)
    dtype = q[0].dtype
    position = spec.query_positions(row, R, length)
    first, end = spec.block_range(length, split, block, splits)

    def step(i: Array, carry: tuple[Array, Array, list[Array]]) -> tuple[Array, Array, list[Array]]:
        m, l, acc = carry
        at = (layer, b, head, pl.ds(i * block, block))
        slot = i * block + jnp.arange(block)
        in_cache = slot < spec.slots
        keys = load(k_ref, at, in_cache[:, None])
        partial_qk = [dot(x, y.astype(dtype), (((1,), (1,)), ((), ()))) for x, y in zip(q, keys, strict=True)]
        s = sum(partial_qk[1:], partial_qk[0]) * spec.scale
        if scale_refs:
            s *= plgpu.load(scale_refs[0].at[*at], mask=in_cache, other=0.0)[None, :]
        if spec.softcap:
            s = spec.softcap * jnp.tanh(s / spec.softcap)
        mask = spec.mask(slot[None, :], position, length)
        s = jnp.where(mask, s, MASK_VALUE)
        new_m = jnp.maximum(m, s.max(1))
        p = jnp.where(mask, jnp.exp(s - new_m[:, None]), 0.0)
        alpha = jnp.exp(m - new_m)
        l = l * alpha + p.sum(1)
        if scale_refs:
            p *= plgpu.load(scale_refs[1].at[*at], mask=in_cache, other=0.0)[None, :]
        values = load(v_ref, at, in_cache[:, None])
        pv = [dot(p.astype(dtype), x.astype(dtype), (((1,), (0,)), ((), ()))) for x in values]
        return new_m, l, [x * alpha[:, None] + y for x, y in zip(acc, pv, strict=True)]

    initial = (
        jnp.full((rows,), MASK_VALUE, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        [jnp.zeros((rows, size), jnp.float32) for _, size in parts],
    )
    m, l, acc = jax.lax.fori_loop(first, end, step, initial)
    at = (b, split, head, pl.ds(start, rows))
    valid = start + jnp.arange(rows) < R
    for (offset, size), x in zip(parts, acc, strict=True):
        plgpu.store(acc_ref.at[*at, pl.ds(offset, size)], x, mask=jnp.broadcast_to(row < R, x.shape))
    plgpu.store(m_ref.at[*at], m, mask=valid)
    plgpu.store(l_ref.at[*at], l, mask=valid)
