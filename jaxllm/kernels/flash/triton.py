"""Flash attention kernels for NVIDIA GPUs, in Pallas's Triton dialect.

FlashAttention-2 (Dao 2023): each program processes a block of queries (or, for the gradients of keys and values, a
block of keys with its group of query heads) and loops over the tiles that are not fully masked. There are no reductions
across programs, so results are bitwise deterministic. Triton tensor dimensions are powers of two; loads and stores are
masked for other head sizes and at the ends of sequences.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxllm.kernels.flash.common import (
    LN_2,
    LOG2_E,
    M_INIT,
    MASK_VALUE,
    MASKED_ROW_LSE,
    AttentionSpec,
    Index,
    Inputs,
    Tile,
    Tiles,
    compute_delta,
    key_head,
    key_ranges,
    loop,
    query_ranges,
)


def forward(
    inputs: Inputs,
    spec: AttentionSpec,
    tiles: Tiles,
    interpret: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Computes attention with the forward kernel.

    Returns:
      The attention output, and lse = log(sum(exp(scores))) of each row.
    """
    (B, T, N, H), dtype = inputs.q.shape, inputs.v.dtype
    tile, dot = tiles.forward, _make_dot(dtype, interpret)
    last, in_specs, queries, statistics = _query_block_specs(inputs, tile)
    return _call(
        functools.partial(_forward_kernel, spec=spec, tile=tile, dot=dot, last=last, head_dim=H),
        tile,
        interpret,
        name="flash_attention",
        grid=(last + 1, N, B),
        in_specs=in_specs,
        out_specs=[queries, statistics],
        out_shape=[jax.ShapeDtypeStruct(inputs.q.shape, dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
    )(*inputs)


def backward(
    inputs: Inputs,
    out: Float[Array, "B T N H"],
    lse: Float[Array, "B N T"],
    d_out: Float[Array, "B T N H"],
    spec: AttentionSpec,
    tiles: Tiles,
    interpret: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Computes the gradients of q, k and v from the output gradient `d_out` (dO)."""
    (B, _, N, H), (_, K, S, _), G = inputs.q.shape, inputs.k.shape, inputs.group
    dot = _make_dot(inputs.q.dtype, interpret)
    operands = (*inputs, d_out, lse, compute_delta(out, d_out))

    tile = tiles.dq
    last, in_specs, queries, statistics = _query_block_specs(inputs, tile)
    (dq,) = _call(
        functools.partial(_dq_kernel, spec=spec, tile=tile, dot=dot, last=last, head_dim=H),
        tile,
        interpret,
        name="flash_attention_dq",
        grid=(last + 1, N, B),
        in_specs=[*in_specs, queries, statistics, statistics],
        out_specs=[queries],
        out_shape=[jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype)],
    )(*operands)

    tile, padded = tiles.dkv, _PaddedSizes(inputs, tiles.dkv)
    group = pl.BlockSpec((None, padded.T, G, padded.H), lambda j, h, b: (b, 0, h, 0))
    keys = pl.BlockSpec((None, None, tile.keys, padded.H), lambda j, h, b: (b, h, j, 0))
    statistics = pl.BlockSpec((None, G, padded.T), lambda j, h, b: (b, h, 0))
    dk, dv = _call(
        functools.partial(_dkv_kernel, spec=spec, tile=tile, dot=dot, heads=G, head_dim=H),
        tile,
        interpret,
        name="flash_attention_dkv",
        grid=(pl.cdiv(S, tile.keys), K, B),
        in_specs=[
            *(group, keys, keys),
            _or_none(inputs.q_segments, pl.BlockSpec((None, padded.T), lambda j, h, b: (b, 0))),
            _or_none(inputs.k_segments, pl.BlockSpec((None, tile.keys), lambda j, h, b: (b, j))),
            *(group, statistics, statistics),
        ],
        out_specs=[keys, keys],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.k, inputs.v)],
    )(*operands)
    return dq, dk, dv


class _PaddedSizes:
    """Padded sizes: lengths rounded up to whole tiles, head_dim to a power of two."""

    def __init__(self, inputs: Inputs, tile: Tile) -> None:
        self.T = pl.cdiv(inputs.q.shape[1], tile.queries) * tile.queries
        self.S = pl.cdiv(inputs.k.shape[2], tile.keys) * tile.keys
        self.H = pl.next_power_of_2(inputs.q.shape[3])


def _query_block_specs(inputs: Inputs, tile: Tile) -> tuple[int, Sequence[Any], pl.BlockSpec, pl.BlockSpec]:
    """Builds the block specs of a grid with one block of queries per program.

    Blocks run in reverse order: under a causal mask the last queries have the most work, so they start first.

    Returns:
      The index of the last block, the input specs, and the specs of [B, T, N, H] and [B, N, T] arrays.
    """
    padded, group = _PaddedSizes(inputs, tile), inputs.group
    last = pl.cdiv(inputs.q.shape[1], tile.queries) - 1
    queries = pl.BlockSpec((None, tile.queries, None, padded.H), lambda i, n, b: (b, last - i, n, 0))
    keys = pl.BlockSpec((None, None, padded.S, padded.H), lambda i, n, b: (b, key_head(n, group), 0, 0))
    statistics = pl.BlockSpec((None, None, tile.queries), lambda i, n, b: (b, n, last - i))
    in_specs = [
        *(queries, keys, keys),
        _or_none(inputs.q_segments, pl.BlockSpec((None, tile.queries), lambda i, n, b: (b, last - i))),
        _or_none(inputs.k_segments, pl.BlockSpec((None, padded.S), lambda i, n, b: (b, 0))),
    ]
    return last, in_specs, queries, statistics


def _or_none(array: Array | None, block_spec: pl.BlockSpec) -> pl.BlockSpec | None:
    return None if array is None else block_spec


def _call(kernel: Callable[..., None], tile: Tile, interpret: bool, **arguments: Any) -> Callable[..., Any]:
    parameters = plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
    return pl.pallas_call(kernel, compiler_params=parameters, interpret=interpret, **arguments)


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_segments_ref: Any,
    k_segments_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    spec: AttentionSpec,
    tile: Tile,
    dot: Callable[..., Array],
    last: int,
    head_dim: int,
) -> None:
    start = (last - pl.program_id(0)) * tile.queries
    rows = start + jnp.arange(tile.queries)
    q = _Rows(q_ref, 0, tile.queries, spec.queries - start, head_dim, tile.depth)
    row_segments = _load_segments(q_segments_ref, 0, tile.queries, spec.queries - start)

    def step(j: Index, carry: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
        acc, m, l = carry
        first = j * tile.keys
        k = _Rows(k_ref, first, tile.keys, spec.keys - first, head_dim, tile.depth)
        v = _Rows(v_ref, first, tile.keys, spec.keys - first, head_dim, tile.depth).full()
        s = spec.base2_scores(_dot_transposed(dot, q, k))
        if masked:
            column_segments = _load_segments(k_segments_ref, first, tile.keys, spec.keys - first)
            columns = first + jnp.arange(tile.keys)
            mask = spec.mask(rows[:, None], columns[None, :], _as_column(row_segments), _as_row(column_segments))
            s = jnp.where(mask, s, MASK_VALUE)
        new_m = jnp.maximum(m, s.max(1))
        p = jnp.exp2(s - new_m[:, None])
        alpha = jnp.exp2(m - new_m)
        acc = acc * alpha[:, None] + dot(p.astype(v.dtype), v, (1, 0))
        return acc, new_m, l * alpha + p.sum(1)

    shape = (tile.queries, q_ref.shape[-1])
    carry = (jnp.zeros(shape, jnp.float32), jnp.full(shape[:1], M_INIT, jnp.float32), jnp.zeros(shape[:1], jnp.float32))
    acc, m, l = loop(key_ranges(spec, start, tile, row_segments is not None), step, carry)
    fully_masked = l == 0
    l = jnp.where(fully_masked, 1.0, l)
    out = acc / l[:, None]
    lse = jnp.where(fully_masked, MASKED_ROW_LSE, m * LN_2 + jnp.log(l))
    _store_rows(out_ref, out, spec.queries - start, head_dim)
    plgpu.store(lse_ref, lse, mask=rows < spec.queries)


def _dq_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_segments_ref: Any,
    k_segments_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    dq_ref: Any,
    *,
    spec: AttentionSpec,
    tile: Tile,
    dot: Callable[..., Array],
    last: int,
    head_dim: int,
) -> None:
    start = (last - pl.program_id(0)) * tile.queries
    rows = start + jnp.arange(tile.queries)
    q = _Rows(q_ref, 0, tile.queries, spec.queries - start, head_dim, tile.depth)
    d_out = _Rows(d_out_ref, 0, tile.queries, spec.queries - start, head_dim, tile.depth)
    row_segments = _load_segments(q_segments_ref, 0, tile.queries, spec.queries - start)
    lse = plgpu.load(lse_ref, mask=rows < spec.queries, other=MASKED_ROW_LSE) * LOG2_E
    delta = plgpu.load(delta_ref, mask=rows < spec.queries, other=0.0)

    def step(j: Index, dq: Array, masked: bool) -> Array:
        first = j * tile.keys
        k = _Rows(k_ref, first, tile.keys, spec.keys - first, head_dim, tile.depth)
        v = _Rows(v_ref, first, tile.keys, spec.keys - first, head_dim, tile.depth)
        s = masked_s = spec.base2_scores(_dot_transposed(dot, q, k))
        if masked:
            column_segments = _load_segments(k_segments_ref, first, tile.keys, spec.keys - first)
            columns = first + jnp.arange(tile.keys)
            mask = spec.mask(rows[:, None], columns[None, :], _as_column(row_segments), _as_row(column_segments))
            masked_s = jnp.where(mask, s, MASK_VALUE)
        p = jnp.exp2(masked_s - lse[:, None])
        ds = spec.softcap_backward(s, p * (_dot_transposed(dot, d_out, v) - delta[:, None]))
        return dq + dot(ds.astype(k_ref.dtype), k.full(), (1, 0))

    shape = (tile.queries, q_ref.shape[-1])
    dq = loop(key_ranges(spec, start, tile, row_segments is not None), step, jnp.zeros(shape, jnp.float32))
    _store_rows(dq_ref, dq * spec.scale, spec.queries - start, head_dim)


def _dkv_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_segments_ref: Any,
    k_segments_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    spec: AttentionSpec,
    tile: Tile,
    dot: Callable[..., Array],
    heads: int,
    head_dim: int,
) -> None:
    start = pl.program_id(0) * tile.keys
    k = _Rows(k_ref, 0, tile.keys, spec.keys - start, head_dim, tile.depth)
    v = _Rows(v_ref, 0, tile.keys, spec.keys - start, head_dim, tile.depth)
    column_segments = _load_segments(k_segments_ref, 0, tile.keys, spec.keys - start)
    columns = start + jnp.arange(tile.keys)
    ranges = query_ranges(spec, start, tile, column_segments is not None)

    def one_head(g: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def step(i: Index, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
            dk, dv = carry
            first = i * tile.queries
            rows = first + jnp.arange(tile.queries)
            block = pl.ds(first, tile.queries)
            q = _Rows(q_ref, first, tile.queries, spec.queries - first, head_dim, tile.depth, g)
            d_out = _Rows(d_out_ref, first, tile.queries, spec.queries - first, head_dim, tile.depth, g)
            lse = plgpu.load(lse_ref.at[g, block], mask=rows < spec.queries, other=MASKED_ROW_LSE) * LOG2_E
            delta = plgpu.load(delta_ref.at[g, block], mask=rows < spec.queries, other=0.0)
            # Scores are [keys, queries], so the matmuls with d_out and q below need no transpose.
            s = masked_s = spec.base2_scores(_dot_transposed(dot, k, q))
            if masked:
                row_segments = _load_segments(q_segments_ref, first, tile.queries, spec.queries - first)
                mask = spec.mask(rows[None, :], columns[:, None], _as_row(row_segments), _as_column(column_segments))
                masked_s = jnp.where(mask, s, MASK_VALUE)
            p = jnp.exp2(masked_s - lse[None, :])
            dv += dot(p.astype(d_out_ref.dtype), d_out.full(), (1, 0))
            ds = spec.softcap_backward(s, p * (_dot_transposed(dot, v, d_out) - delta[None, :]))
            return dk + dot(ds.astype(q_ref.dtype), q.full(), (1, 0)), dv

        return loop(ranges, step, carry)

    zero = jnp.zeros((tile.keys, k_ref.shape[-1]), jnp.float32)
    dk, dv = lax.fori_loop(0, heads, one_head, (zero, zero))
    _store_rows(dk_ref, dk * spec.scale, spec.keys - start, head_dim)
    _store_rows(dv_ref, dv, spec.keys - start, head_dim)


def _as_column(segments: Int[Array, " n"] | None) -> Int[Array, "n 1"] | None:
    return None if segments is None else segments[:, None]


def _as_row(segments: Int[Array, " n"] | None) -> Int[Array, "1 n"] | None:
    return None if segments is None else segments[None, :]


def _make_dot(dtype: DTypeLike, interpret: bool) -> Callable[..., Array]:
    """Returns a function (a, b, (contracted dimension of a, of b)) -> matmul in float32."""
    # Tensor cores round float32 to a 10-bit mantissa (TF32); three matmuls of partial values restore the precision. The
    # algorithm exists only on NVIDIA GPUs, so interpret mode uses another one.
    exact = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    precision = exact if dtype == jnp.float32 else None

    def dot(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
        dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
        return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

    return dot


class _Rows:
    """Rows [first, first + count) of a ref, of which `valid` are within the array; zeros elsewhere and past head_dim.

    If `depth` is set, every use loads the chunks from memory again, because rows kept across loop iterations would not
    fit into registers.
    """

    def __init__(
        self, ref: Any, first: Index, count: int, valid: Index, head_dim: int, depth: int, head: Index | None = None
    ) -> None:
        self._ref, self._first, self._valid, self._head = ref, first, valid, head
        self.count, self.head_dim, self.depth = count, head_dim, depth
        self._loaded = None if depth else self._load(0, ref.shape[-1])

    def full(self) -> Float[Array, "count H"]:
        """Returns all columns of the rows."""
        return self._load(0, self._ref.shape[-1]) if self._loaded is None else self._loaded

    def chunk(self, index: Index) -> Float[Array, "count depth"]:
        """Returns columns [index * depth, (index + 1) * depth) of the rows."""
        return self._load(index * self.depth, self.depth)

    def _load(self, begin: Index, width: int) -> Array:
        rows, columns = pl.ds(self._first, self.count), pl.ds(begin, width)
        part = self._ref.at[rows, columns] if self._head is None else self._ref.at[rows, self._head, columns]
        return plgpu.load(part, mask=_valid_mask(self.count, self._valid, width, self.head_dim - begin), other=0.0)


def _dot_transposed(dot: Callable[..., Array], a: _Rows, b: _Rows) -> Float[Array, "a b"]:
    """Computes the matmul of a with b transposed, in one step or summed over chunks of the head dimension."""
    if not a.depth:
        return dot(a.full(), b.full(), (1, 1))

    def add(index: Index, acc: Array) -> Array:
        return acc + dot(a.chunk(index), b.chunk(index), (1, 1))

    # Not unrolled: the compiler would prefetch all chunks and keep them in registers at once.
    return lax.fori_loop(0, pl.cdiv(a.head_dim, a.depth), add, jnp.zeros((a.count, b.count), jnp.float32))


def _store_rows(ref: Any, value: Array, valid: Index, head_dim: int) -> None:
    plgpu.store(ref, value.astype(ref.dtype), mask=_valid_mask(value.shape[0], valid, value.shape[1], head_dim))


def _valid_mask(count: int, valid: Index, width: int, head_dim: Index) -> Bool[Array, "count width"]:
    return (jnp.arange(count) < valid)[:, None] & (jnp.arange(width) < head_dim)[None, :]


def _load_segments(ref: Any, first: Index, count: int, valid: Index) -> Int[Array, " count"] | None:
    if ref is None:
        return None
    return plgpu.load(ref.at[pl.ds(first, count)], mask=jnp.arange(count) < valid, other=0)
