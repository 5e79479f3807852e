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

from jaxllm.kernels.flash.spans import key_spans, loop, query_spans
from jaxllm.kernels.flash.tile import (
    EMPTY_LSE,
    LN_2,
    LOG2_E,
    M_INIT,
    MASK_VALUE,
    AttentionSpec,
    Index,
    Inputs,
    compute_delta,
    key_head,
)
from jaxllm.kernels.flash.tile_sizes import Tile, Tiles


def forward(
    inputs: Inputs,
    rule: AttentionSpec,
    tiles: Tiles,
    interpret: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Computes attention with the forward kernel.

    Returns:
      The attention output, and lse = log(sum(exp(scores))) of each row.
    """
    (B, T, N, H), dtype = inputs.q.shape, inputs.v.dtype
    tile, dot = tiles.forward, _product(dtype, interpret)
    last, in_specs, queries, statistics = _by_queries(inputs, tile)
    return _call(
        functools.partial(_forward_kernel, rule=rule, tile=tile, dot=dot, last=last, head_dim=H),
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
    rule: AttentionSpec,
    tiles: Tiles,
    interpret: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Computes the gradients of q, k and v from the output gradient `d_out` (dO)."""
    (B, _, N, H), (_, K, S, _), G = inputs.q.shape, inputs.k.shape, inputs.group
    dot = _product(inputs.q.dtype, interpret)
    operands = (*inputs, d_out, lse, compute_delta(out, d_out))

    tile = tiles.dq
    last, in_specs, queries, statistics = _by_queries(inputs, tile)
    (dq,) = _call(
        functools.partial(_dq_kernel, rule=rule, tile=tile, dot=dot, last=last, head_dim=H),
        tile,
        interpret,
        name="flash_attention_dq",
        grid=(last + 1, N, B),
        in_specs=[*in_specs, queries, statistics, statistics],
        out_specs=[queries],
        out_shape=[jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype)],
    )(*operands)

    tile, layout = tiles.dkv, _Layout(inputs, tiles.dkv)
    group = pl.BlockSpec((None, layout.T, G, layout.H), lambda j, h, b: (b, 0, h, 0))
    keys = pl.BlockSpec((None, None, tile.keys, layout.H), lambda j, h, b: (b, h, j, 0))
    statistics = pl.BlockSpec((None, G, layout.T), lambda j, h, b: (b, h, 0))
    dk, dv = _call(
        functools.partial(_dkv_kernel, rule=rule, tile=tile, dot=dot, heads=G, head_dim=H),
        tile,
        interpret,
        name="flash_attention_dkv",
        grid=(pl.cdiv(S, tile.keys), K, B),
        in_specs=[
            *(group, keys, keys),
            _or_none(inputs.q_segments, pl.BlockSpec((None, layout.T), lambda j, h, b: (b, 0))),
            _or_none(inputs.k_segments, pl.BlockSpec((None, tile.keys), lambda j, h, b: (b, j))),
            *(group, statistics, statistics),
        ],
        out_specs=[keys, keys],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.k, inputs.v)],
    )(*operands)
    return dq, dk, dv


class _Layout:
    """Padded sizes: lengths rounded up to whole tiles, head_dim to a power of two."""

    def __init__(self, inputs: Inputs, tile: Tile) -> None:
        self.T = pl.cdiv(inputs.q.shape[1], tile.queries) * tile.queries
        self.S = pl.cdiv(inputs.k.shape[2], tile.keys) * tile.keys
        self.H = pl.next_power_of_2(inputs.q.shape[3])


def _by_queries(inputs: Inputs, tile: Tile) -> tuple[int, Sequence[Any], pl.BlockSpec, pl.BlockSpec]:
    """Builds the block specs of a grid with one block of queries per program.

    Blocks run in reverse order: under a causal mask the last queries have the most work, so they start first.

    Returns:
      The index of the last block, the input specs, and the specs of [B, T, N, H] and [B, N, T] arrays.
    """
    layout, group = _Layout(inputs, tile), inputs.group
    last = pl.cdiv(inputs.q.shape[1], tile.queries) - 1
    queries = pl.BlockSpec((None, tile.queries, None, layout.H), lambda i, n, b: (b, last - i, n, 0))
    keys = pl.BlockSpec((None, None, layout.S, layout.H), lambda i, n, b: (b, key_head(n, group), 0, 0))
    statistics = pl.BlockSpec((None, None, tile.queries), lambda i, n, b: (b, n, last - i))
    in_specs = [
        *(queries, keys, keys),
        _or_none(inputs.q_segments, pl.BlockSpec((None, tile.queries), lambda i, n, b: (b, last - i))),
        _or_none(inputs.k_segments, pl.BlockSpec((None, layout.S), lambda i, n, b: (b, 0))),
    ]
    return last, in_specs, queries, statistics


def _or_none(array: Array | None, spec: pl.BlockSpec) -> pl.BlockSpec | None:
    return None if array is None else spec


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
    rule: AttentionSpec,
    tile: Tile,
    dot: Callable[..., Array],
    last: int,
    head_dim: int,
) -> None:
    start = (last - pl.program_id(0)) * tile.queries
    rows = start + jnp.arange(tile.queries)
    q = _Rows(q_ref, 0, tile.queries, rule.queries - start, head_dim, tile.depth)
    row_segments = _load_segments(q_segments_ref, 0, tile.queries, rule.queries - start)

    def step(j: Index, carry: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
        acc, m, l = carry
        first = j * tile.keys
        k = _Rows(k_ref, first, tile.keys, rule.keys - first, head_dim, tile.depth)
        v = _Rows(v_ref, first, tile.keys, rule.keys - first, head_dim, tile.depth).whole()
        bits = rule.bits(_inner(dot, q, k))
        if masked:
            column_segments = _load_segments(k_segments_ref, first, tile.keys, rule.keys - first)
            columns = first + jnp.arange(tile.keys)
            mask = rule.visible(rows[:, None], columns[None, :], _down(row_segments), _along(column_segments))
            bits = jnp.where(mask, bits, MASK_VALUE)
        new_m = jnp.maximum(m, bits.max(1))
        weights = jnp.exp2(bits - new_m[:, None])
        alpha = jnp.exp2(m - new_m)
        acc = acc * alpha[:, None] + dot(weights.astype(v.dtype), v, (1, 0))
        return acc, new_m, l * alpha + weights.sum(1)

    shape = (tile.queries, q_ref.shape[-1])
    carry = (jnp.zeros(shape, jnp.float32), jnp.full(shape[:1], M_INIT, jnp.float32), jnp.zeros(shape[:1], jnp.float32))
    carry = loop(key_spans(rule, start, tile, row_segments is not None), step, carry)
    acc, m, l = carry
    empty = l == 0
    out = acc / jnp.where(empty, 1.0, l)[:, None]
    lse = jnp.where(empty, EMPTY_LSE, m * LN_2 + jnp.log(jnp.where(empty, 1.0, l)))
    _store_rows(out_ref, out, rule.queries - start, head_dim)
    plgpu.store(lse_ref, lse, mask=rows < rule.queries)


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
    rule: AttentionSpec,
    tile: Tile,
    dot: Callable[..., Array],
    last: int,
    head_dim: int,
) -> None:
    start = (last - pl.program_id(0)) * tile.queries
    rows = start + jnp.arange(tile.queries)
    q = _Rows(q_ref, 0, tile.queries, rule.queries - start, head_dim, tile.depth)
    d_out = _Rows(d_out_ref, 0, tile.queries, rule.queries - start, head_dim, tile.depth)
    row_segments = _load_segments(q_segments_ref, 0, tile.queries, rule.queries - start)
    lse = plgpu.load(lse_ref, mask=rows < rule.queries, other=EMPTY_LSE) * LOG2_E
    delta = plgpu.load(delta_ref, mask=rows < rule.queries, other=0.0)

    def step(j: Index, dq: Array, masked: bool) -> Array:
        first = j * tile.keys
        k = _Rows(k_ref, first, tile.keys, rule.keys - first, head_dim, tile.depth)
        v = _Rows(v_ref, first, tile.keys, rule.keys - first, head_dim, tile.depth)
        bits = rule.bits(_inner(dot, q, k))
        shown = bits
        if masked:
            column_segments = _load_segments(k_segments_ref, first, tile.keys, rule.keys - first)
            columns = first + jnp.arange(tile.keys)
            mask = rule.visible(rows[:, None], columns[None, :], _down(row_segments), _along(column_segments))
            shown = jnp.where(mask, bits, MASK_VALUE)
        weights = jnp.exp2(shown - lse[:, None])
        scores = rule.slope(bits, weights * (_inner(dot, d_out, v) - delta[:, None]))
        return dq + dot(scores.astype(k_ref.dtype), k.whole(), (1, 0))

    shape = (tile.queries, q_ref.shape[-1])
    dq = loop(key_spans(rule, start, tile, row_segments is not None), step, jnp.zeros(shape, jnp.float32))
    _store_rows(dq_ref, dq * rule.scale, rule.queries - start, head_dim)


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
    rule: AttentionSpec,
    tile: Tile,
    dot: Callable[..., Array],
    heads: int,
    head_dim: int,
) -> None:
    start = pl.program_id(0) * tile.keys
    k = _Rows(k_ref, 0, tile.keys, rule.keys - start, head_dim, tile.depth)
    v = _Rows(v_ref, 0, tile.keys, rule.keys - start, head_dim, tile.depth)
    column_segments = _load_segments(k_segments_ref, 0, tile.keys, rule.keys - start)
    columns = start + jnp.arange(tile.keys)
    spans = query_spans(rule, start, tile, column_segments is not None)

    def one_head(g: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def step(i: Index, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
            dk, dv = carry
            first = i * tile.queries
            rows = first + jnp.arange(tile.queries)
            here = pl.ds(first, tile.queries)
            q = _Rows(q_ref, first, tile.queries, rule.queries - first, head_dim, tile.depth, g)
            d_out = _Rows(d_out_ref, first, tile.queries, rule.queries - first, head_dim, tile.depth, g)
            lse = plgpu.load(lse_ref.at[g, here], mask=rows < rule.queries, other=EMPTY_LSE) * LOG2_E
            delta = plgpu.load(delta_ref.at[g, here], mask=rows < rule.queries, other=0.0)
            # Scores are [keys, queries], so the matmuls with change and q below need no transpose.
            bits = rule.bits(_inner(dot, k, q))
            shown = bits
            if masked:
                row_segments = _load_segments(q_segments_ref, first, tile.queries, rule.queries - first)
                mask = rule.visible(rows[None, :], columns[:, None], _along(row_segments), _down(column_segments))
                shown = jnp.where(mask, bits, MASK_VALUE)
            weights = jnp.exp2(shown - lse[None, :])
            dv += dot(weights.astype(d_out_ref.dtype), d_out.whole(), (1, 0))
            scores = rule.slope(bits, weights * (_inner(dot, v, d_out) - delta[None, :]))
            return dk + dot(scores.astype(q_ref.dtype), q.whole(), (1, 0)), dv

        return loop(spans, step, carry)

    zero = jnp.zeros((tile.keys, k_ref.shape[-1]), jnp.float32)
    dk, dv = lax.fori_loop(0, heads, one_head, (zero, zero))
    _store_rows(dk_ref, dk * rule.scale, rule.keys - start, head_dim)
    _store_rows(dv_ref, dv, rule.keys - start, head_dim)


def _down(segments: Int[Array, " n"] | None) -> Int[Array, "n 1"] | None:
    return None if segments is None else segments[:, None]


def _along(segments: Int[Array, " n"] | None) -> Int[Array, "1 n"] | None:
    return None if segments is None else segments[None, :]


def _product(dtype: DTypeLike, interpret: bool) -> Callable[..., Array]:
    """Returns a function (a, b, (contracted dimension of a, of b)) -> matmul in float32."""
    # Tensor cores round float32 to a 10-bit mantissa (TF32); three matmuls of partial values restore the precision. The
    # algorithm exists only on NVIDIA GPUs, so interpret mode uses another one.
    exact = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    precision = exact if dtype == jnp.float32 else None

    def product(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
        dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
        return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

    return product


class _Rows:
    """Rows [first, first + count) of a ref, of which `left` are valid; zeros elsewhere and past head_dim.

    If `depth` is set, every use loads the chunks from memory again, because rows kept across loop iterations would not
    fit into registers.
    """

    def __init__(
        self, ref: Any, first: Index, count: int, left: Index, head_dim: int, depth: int, head: Index | None = None
    ) -> None:
        self._ref, self._first, self._left, self._head = ref, first, left, head
        self.count, self.head_dim, self.depth = count, head_dim, depth
        self._read = None if depth else self._load(0, ref.shape[-1])

    def whole(self) -> Float[Array, "count H"]:
        return self._load(0, self._ref.shape[-1]) if self._read is None else self._read

    def part(self, index: Index) -> Float[Array, "count depth"]:
        return self._load(index * self.depth, self.depth)

    def _load(self, begin: Index, width: int) -> Array:
        here, columns = pl.ds(self._first, self.count), pl.ds(begin, width)
        part = self._ref.at[here, columns] if self._head is None else self._ref.at[here, self._head, columns]
        return plgpu.load(part, mask=_there(self.count, self._left, width, self.head_dim - begin), other=0.0)


def _inner(dot: Callable[..., Array], a: _Rows, b: _Rows) -> Float[Array, "a b"]:
    """Computes the matmul of a with b transposed, in one step or summed over chunks of the head dimension."""
    if not a.depth:
        return dot(a.whole(), b.whole(), (1, 1))

    def add(index: Index, acc: Array) -> Array:
        return acc + dot(a.part(index), b.part(index), (1, 1))

    # Not unrolled: the compiler would prefetch all chunks and keep them in registers at once.
    return lax.fori_loop(0, pl.cdiv(a.head_dim, a.depth), add, jnp.zeros((a.count, b.count), jnp.float32))


def _store_rows(ref: Any, value: Array, left: Index, head_dim: int) -> None:
    plgpu.store(ref, value.astype(ref.dtype), mask=_there(value.shape[0], left, value.shape[1], head_dim))


def _there(count: int, left: Index, width: int, head_dim: Index) -> Bool[Array, "count width"]:
    return (jnp.arange(count) < left)[:, None] & (jnp.arange(width) < head_dim)[None, :]


def _load_segments(ref: Any, first: Index, count: int, left: Index) -> Int[Array, " count"] | None:
    if ref is None:
        return None
    return plgpu.load(ref.at[pl.ds(first, count)], mask=jnp.arange(count) < left, other=0)
