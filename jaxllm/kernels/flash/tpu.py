"""Flash attention kernels for TPUs, in Pallas's Mosaic dialect.

The tiles are those of `flash.triton`. A TPU core runs the grid in order, so partial sums stay in scratch memory between
steps of the innermost grid dimension. That dimension covers only the tiles of a block that are not fully masked. A step
past a block's last tile computes nothing, and loads nothing because its block index does not change.

Values with one element per query (segment, lse, delta) are passed as rows [1, T], which are compact in memory. If a
tile needs them as a column, they are transposed into scratch once per block.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

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
    key_blocks,
    key_head,
    query_blocks,
)

LANES = 128


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
    q, k, v, q_segments, k_segments = inputs
    (B, T, N, H), G = q.shape, inputs.group
    tile = _limit_tile(tiles.forward, spec)
    specs = _query_grid_specs(spec, tile, G, H)
    out, lse = _call(
        functools.partial(_forward_kernel, spec=spec, tile=tile),
        interpret,
        name="flash_attention",
        grid=(B, N, pl.cdiv(T, tile.queries), _max_key_blocks(spec, tile)),
        in_specs=[specs.queries, specs.keys, specs.keys, *_segment_specs(q_segments, specs)],
        out_specs=[specs.queries, specs.statistics],
        out_shape=[jax.ShapeDtypeStruct((B, N, T, H), v.dtype), jax.ShapeDtypeStruct((B, N, 1, T), jnp.float32)],
        scratch_shapes=_scratch(tile, H),
    )(q.swapaxes(1, 2), k, v, _row(q_segments), _row(k_segments))
    return out.swapaxes(1, 2), lse[:, :, 0]


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
    q, k, v, q_segments, k_segments = inputs
    (B, T, N, H), (_, K, S, _), G = q.shape, k.shape, inputs.group
    delta = compute_delta(out, d_out)
    operands = (
        *(q.swapaxes(1, 2), k, v, _row(q_segments), _row(k_segments)),
        *(d_out.swapaxes(1, 2), lse[:, :, None], delta[:, :, None]),
    )

    tile = _limit_tile(tiles.dq, spec)
    specs = _query_grid_specs(spec, tile, G, H)
    (dq,) = _call(
        functools.partial(_dq_kernel, spec=spec, tile=tile),
        interpret,
        name="flash_attention_dq",
        grid=(B, N, pl.cdiv(T, tile.queries), _max_key_blocks(spec, tile)),
        in_specs=[
            *(specs.queries, specs.keys, specs.keys, *_segment_specs(q_segments, specs)),
            *(specs.queries, specs.statistics, specs.statistics),
        ],
        out_specs=[specs.queries],
        out_shape=[jax.ShapeDtypeStruct((B, N, T, H), q.dtype)],
        scratch_shapes=_scratch(tile, H),
    )(*operands)

    tile = _limit_tile(tiles.dkv, spec)
    specs = _key_grid_specs(spec, tile, G, H)
    dk, dv = _call(
        functools.partial(_dkv_kernel, spec=spec, tile=tile, steps=_max_query_blocks(spec, tile)),
        interpret,
        name="flash_attention_dkv",
        grid=(B, K, pl.cdiv(S, tile.keys), G * _max_query_blocks(spec, tile)),
        in_specs=[
            *(specs.queries, specs.keys, specs.keys, *_segment_specs(q_segments, specs)),
            *(specs.queries, specs.statistics, specs.statistics),
        ],
        out_specs=[specs.keys, specs.keys],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        scratch_shapes=[
            *[pltpu.VMEM((tile.keys, H), jnp.float32)] * 2,
            pltpu.VMEM((tile.keys, LANES), jnp.int32),
        ],
    )(*operands)
    return dq.swapaxes(1, 2), dk, dv


def _scratch(tile: Tile, head_dim: int) -> Sequence[Any]:
    """Returns scratch shapes for a block of queries: a float32 sum [queries, H], two row statistics and the segment."""
    return [
        pltpu.VMEM((tile.queries, head_dim), jnp.float32),
        *[pltpu.VMEM((tile.queries, LANES), jnp.float32)] * 2,
        pltpu.VMEM((tile.queries, LANES), jnp.int32),
    ]


class _BlockSpecs:
    """Block specs of a grid: for [B, heads, length, H], [B, N, 1, T] and segments [B, 1, length] arrays."""

    def __init__(self, tile: Tile, head_dim: int, query: Callable[..., Any], key: Callable[..., Any]) -> None:
        """Builds the specs from `query` and `key`, which map a grid step to (head, block)."""

        def rows(b: Index, *step: Index) -> tuple[Index, ...]:
            head, block = query(*step)
            return b, head, block, 0

        def row(b: Index, *step: Index) -> tuple[Index, ...]:
            head, block = query(*step)
            return b, head, 0, block

        def columns(b: Index, *step: Index) -> tuple[Index, ...]:
            head, block = key(*step)
            return b, head, block, 0

        self.queries = pl.BlockSpec((None, None, tile.queries, head_dim), rows)
        self.keys = pl.BlockSpec((None, None, tile.keys, head_dim), columns)
        self.statistics = pl.BlockSpec((None, None, 1, tile.queries), row)
        self.query_segments = pl.BlockSpec((None, 1, tile.queries), lambda b, *step: (b, 0, query(*step)[1]))
        self.key_segments = pl.BlockSpec((None, 1, tile.keys), lambda b, *step: (b, 0, key(*step)[1]))


def _query_grid_specs(spec: AttentionSpec, tile: Tile, group: int, head_dim: int) -> _BlockSpecs:
    def key(n: Index, i: Index, j: Index) -> tuple[Index, Index]:
        low, end = key_blocks(spec, i * tile.queries, tile)
        return key_head(n, group), _clamp(low + j, end)

    return _BlockSpecs(tile, head_dim, lambda n, i, j: (n, i), key)


def _key_grid_specs(spec: AttentionSpec, tile: Tile, group: int, head_dim: int) -> _BlockSpecs:
    steps = _max_query_blocks(spec, tile)

    def query(h: Index, j: Index, step: Index) -> tuple[Index, Index]:
        low, end = query_blocks(spec, j * tile.keys, tile)
        return h * group + lax.div(step, steps), _clamp(low + lax.rem(step, steps), end)

    return _BlockSpecs(tile, head_dim, query, lambda h, j, step: (h, j))


def _segment_specs(segments: Array | None, specs: _BlockSpecs) -> tuple[pl.BlockSpec | None, pl.BlockSpec | None]:
    return (None, None) if segments is None else (specs.query_segments, specs.key_segments)


def _row(segments: Array | None) -> Array | None:
    return None if segments is None else segments[:, None]


def _limit_tile(tile: Tile, spec: AttentionSpec) -> Tile:
    """Limits the tile to the sequence lengths, rounded up to multiples of 128 lanes."""
    lengths = zip((tile.queries, tile.keys), (spec.queries, spec.keys), strict=True)
    return Tile(*(min(size, pl.cdiv(length, LANES) * LANES) for size, length in lengths))


def _max_key_blocks(spec: AttentionSpec, tile: Tile) -> int:
    """Returns the steps of the innermost grid dimension: at least one, because the last step writes the output."""
    ranges = (key_blocks(spec, i * tile.queries, tile) for i in range(pl.cdiv(spec.queries, tile.queries)))
    return max(1, *(int(end - low) for low, end in ranges))


def _max_query_blocks(spec: AttentionSpec, tile: Tile) -> int:
    ranges = (query_blocks(spec, j * tile.keys, tile) for j in range(pl.cdiv(spec.keys, tile.keys)))
    return max(1, *(int(end - low) for low, end in ranges))


def _clamp(block: Index, end: Index) -> Index:
    return jnp.maximum(jnp.minimum(block, end - 1), 0)


def _call(kernel: Callable[..., None], interpret: bool, **arguments: Any) -> Callable[..., Any]:
    parameters = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))
    return pl.pallas_call(kernel, compiler_params=parameters, interpret=interpret, **arguments)


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_segments_ref: Any,
    k_segments_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    acc_ref: Any,
    m_ref: Any,
    l_ref: Any,
    segments_ref: Any,
    *,
    spec: AttentionSpec,
    tile: Tile,
) -> None:
    i, j = pl.program_id(2), pl.program_id(3)
    low, end = key_blocks(spec, i * tile.queries, tile)

    @pl.when(j == 0)
    def begin() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        m_ref[...] = jnp.full_like(m_ref, M_INIT)
        l_ref[...] = jnp.zeros_like(l_ref)
        if q_segments_ref is not None:
            segments_ref[...] = _column(q_segments_ref[...])

    @pl.when(low + j < end)
    def step() -> None:
        v = _zero_past_end(v_ref[...], (low + j) * tile.keys, spec.keys)
        s = spec.base2_scores(_dot(q_ref[...], k_ref[...], (1, 1)))
        mask = _tile_mask(spec, tile, i, low + j, segments_ref, k_segments_ref)
        s = jnp.where(mask, s, MASK_VALUE)
        m = m_ref[:, :1]
        new_m = jnp.maximum(m, s.max(1, keepdims=True))
        p = jnp.exp2(s - new_m)
        alpha = jnp.exp2(m - new_m)
        acc_ref[...] = acc_ref[...] * alpha + _dot(p.astype(v.dtype), v, (1, 0))
        m_ref[...] = jnp.broadcast_to(new_m, m_ref.shape)
        l = l_ref[:, :1] * alpha + p.sum(1, keepdims=True)
        l_ref[...] = jnp.broadcast_to(l, l_ref.shape)

    @pl.when(j == pl.num_programs(3) - 1)
    def finish() -> None:
        l = l_ref[...]
        fully_masked = l == 0
        l = jnp.where(fully_masked, 1.0, l)
        out_ref[...] = (acc_ref[...] / l[:, :1]).astype(out_ref.dtype)
        lse = jnp.where(fully_masked, MASKED_ROW_LSE, m_ref[...] * LN_2 + jnp.log(l))
        lse_ref[...] = lse.T[:1]


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
    acc_ref: Any,
    lse_column_ref: Any,
    delta_column_ref: Any,
    segments_ref: Any,
    *,
    spec: AttentionSpec,
    tile: Tile,
) -> None:
    i, j = pl.program_id(2), pl.program_id(3)
    low, end = key_blocks(spec, i * tile.queries, tile)

    @pl.when(j == 0)
    def begin() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        lse_column_ref[...] = _column(lse_ref[...] * LOG2_E)
        delta_column_ref[...] = _column(delta_ref[...])
        if q_segments_ref is not None:
            segments_ref[...] = _column(q_segments_ref[...])

    @pl.when(low + j < end)
    def step() -> None:
        k = _zero_past_end(k_ref[...], (low + j) * tile.keys, spec.keys)
        s = spec.base2_scores(_dot(q_ref[...], k, (1, 1)))
        mask = _tile_mask(spec, tile, i, low + j, segments_ref, k_segments_ref)
        p = jnp.exp2(jnp.where(mask, s, MASK_VALUE) - lse_column_ref[:, :1])
        dp_minus_delta = _dot(d_out_ref[...], v_ref[...], (1, 1)) - delta_column_ref[:, :1]
        # Values read past the end are undefined.
        ds = jnp.where(mask, spec.softcap_backward(s, p * dp_minus_delta), 0.0)
        acc_ref[...] += _dot(ds.astype(k.dtype), k, (1, 0))

    @pl.when(j == pl.num_programs(3) - 1)
    def finish() -> None:
        dq_ref[...] = (acc_ref[...] * spec.scale).astype(dq_ref.dtype)


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
    dk_acc_ref: Any,
    dv_acc_ref: Any,
    segments_ref: Any,
    *,
    spec: AttentionSpec,
    tile: Tile,
    steps: int,
) -> None:
    j, step_index = pl.program_id(2), pl.program_id(3)
    low, end = query_blocks(spec, j * tile.keys, tile)
    i = low + lax.rem(step_index, steps)

    @pl.when(step_index == 0)
    def begin() -> None:
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)
        if k_segments_ref is not None:
            segments_ref[...] = _column(k_segments_ref[...])

    @pl.when(i < end)
    def step() -> None:
        # Scores are [keys, queries], so lse and delta can stay rows.
        q = _zero_past_end(q_ref[...], i * tile.queries, spec.queries)
        d_out = _zero_past_end(d_out_ref[...], i * tile.queries, spec.queries)
        s = spec.base2_scores(_dot(k_ref[...], q, (1, 1)))
        mask = _tile_mask(spec, tile, i, j, q_segments_ref, segments_ref, transposed=True)
        p = jnp.where(mask, jnp.exp2(jnp.where(mask, s, MASK_VALUE) - lse_ref[...] * LOG2_E), 0.0)
        dv_acc_ref[...] += _dot(p.astype(d_out.dtype), d_out, (1, 0))
        dp_minus_delta = _dot(v_ref[...], d_out, (1, 1)) - delta_ref[...]
        ds = jnp.where(mask, spec.softcap_backward(s, p * dp_minus_delta), 0.0)
        dk_acc_ref[...] += _dot(ds.astype(q.dtype), q, (1, 0))

    @pl.when(step_index == pl.num_programs(3) - 1)
    def finish() -> None:
        dk_ref[...] = (dk_acc_ref[...] * spec.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


def _tile_mask(
    spec: AttentionSpec,
    tile: Tile,
    i: Index,
    j: Index,
    row_segments: Any,
    column_segments: Any,
    transposed: bool = False,
) -> Array:
    """Returns the mask of a tile as [queries, keys], or as [keys, queries] if `transposed`.

    Segments along the second dimension are a row; those along the first are a column of scratch. `row_segments` belong
    to queries and `column_segments` to keys; either is None if there are no segments.
    """
    shape, (down, along) = ((tile.keys, tile.queries), (1, 0)) if transposed else ((tile.queries, tile.keys), (0, 1))
    rows = i * tile.queries + lax.broadcasted_iota(jnp.int32, shape, down)
    columns = j * tile.keys + lax.broadcasted_iota(jnp.int32, shape, along)
    if row_segments is None or column_segments is None:
        mask = spec.mask(rows, columns, None, None)
    elif transposed:
        mask = spec.mask(rows, columns, row_segments[...], column_segments[:, :1])
    else:
        mask = spec.mask(rows, columns, row_segments[:, :1], column_segments[...])
    return mask & (rows < spec.queries) if spec.queries % tile.queries else mask


def _column(row: Array) -> Array:
    """Transposes a row [1, n] to [n, LANES], broadcast over the lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _zero_past_end(rows: Array, first: Index, length: int) -> Array:
    """Zeroes rows past the end, whose undefined values could be NaN or infinite and survive a zero weight."""
    if length % rows.shape[0] == 0:
        return rows
    index = first + lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where(index < length, rows, jnp.zeros_like(rows))


def _dot(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    # At default precision the matmul unit would round float32 inputs to 8 significant bits.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
