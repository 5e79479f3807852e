"""Flash attention forward kernel for NVIDIA Hopper, in Pallas's Mosaic GPU dialect.

FlashAttention-3 (Shah et al. 2024): a block has several warpgroups of 128 threads. The last one is the producer, which
issues TMA copies of keys and values `stages` tiles ahead. The others are consumers; each runs the matmuls of its own
queries on the tensor cores (wgmma). Two consumers alternate, so the softmax of one overlaps with the matmuls of the
other. Two barriers synchronize each tile in shared memory: the copy arrives on `ready`, and each consumer arrives on
`free` after reading the tile.

The backward kernels are those of `flash.triton`. Only Hopper (compute capability 9.0) has wgmma; this kernel fails on
other GPUs. It requires CUDA 12.9.1 or later: JAX's own kernel of this kind rejects causal masks with 12.8.0 to 12.9.0,
whose assembler miscompiles them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxllm.errors import UserError
from jaxllm.kernels.flash.common import (
    LN_2,
    M_INIT,
    MASK_VALUE,
    MASKED_ROW_LSE,
    AttentionSpec,
    Index,
    Inputs,
    Tile,
    Tiles,
    key_head,
    key_ranges,
    loop,
)

HEADS = (64, 128, 192, 256)
DTYPES = ("bfloat16", "float16")
_ROWS = 64  # rows of a wgmma, and therefore queries per consumer
_GROUP_WARPS = 4
# Registers per thread (consumer, producer) by number of consumers; the producer releases most of its registers. All
# threads of a block share 65,536.
_REGISTERS = {2: (232, 40), 3: (160, 32)}
_SWIZZLE_BYTES = 128


def forward(
    inputs: Inputs,
    spec: AttentionSpec,
    tiles: Tiles,
    interpret: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Computes attention with the forward kernel.

    Lengths that are not multiples of the tile are padded, which copies the inputs.

    Returns:
      The attention output, and lse = log(sum(exp(scores))) of each row.

    Raises:
      UserError: The head_dim, dtype or tile is not supported.
    """
    (B, T, N, H), dtype, tile = inputs.q.shape, inputs.q.dtype, tiles.forward
    consumers = _check(H, dtype, tile)
    q, k, v = _pad(inputs.q, 1, tile.queries), _pad(inputs.k, 2, tile.keys), _pad(inputs.v, 2, tile.keys)
    operands = [q, k, v]
    if inputs.q_segments is not None and inputs.k_segments is not None:
        operands += [_pad(inputs.q_segments.astype(jnp.int32), 1, tile.queries)]
        operands += [_pad(inputs.k_segments.astype(jnp.int32), 1, tile.keys)]
    last = q.shape[1] // tile.queries - 1

    def flash_attention(*refs: Any) -> None:
        body = functools.partial(
            _block, refs, spec=spec, tile=tile, group=inputs.group, last=last, ops=_Ops(not interpret)
        )
        pl.run_scoped(body, _scratch(tile, H, dtype, consumers, inputs.segmented), collective_axes="group")

    out, lse = plgpu.kernel(
        flash_attention,
        out_type=[jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct((B, N, q.shape[1]), jnp.float32)],
        grid=(N, last + 1, B),
        grid_names=("head", "tile", "batch"),
        num_threads=consumers + 1,
        thread_name="group",
        # The approximate tanh has an error of 5e-4; with a softcap of 30 that is 1.5 % of a weight.
        compiler_params=plgpu.CompilerParams(approx_math=not spec.softcap),
        interpret=_interpreter() if interpret else None,
    )(*operands)
    return out[:, :T], lse[:, :, :T]


def _check(head_dim: int, dtype: Any, tile: Tile) -> int:
    """Checks the arguments of the kernel and returns the number of consumer warpgroups.

    Raises:
      UserError: The head_dim, dtype or tile is not supported.
    """
    if head_dim not in HEADS or str(jnp.dtype(dtype)) not in DTYPES:
        raise UserError(
            f"the Mosaic-GPU attention kernel takes head_dim {', '.join(map(str, HEADS))} in {' or '.join(DTYPES)}, "
            f"not {head_dim} in {jnp.dtype(dtype)}; use backend='triton'"
        )
    consumers = tile.warps // _GROUP_WARPS
    whole_groups = tile.warps % _GROUP_WARPS == 0 and tile.keys % _ROWS == 0
    if consumers not in _REGISTERS or not whole_groups or tile.queries != consumers * _ROWS:
        raise UserError(
            f"the Mosaic-GPU attention kernel takes tiles of {_ROWS} queries for each {_GROUP_WARPS} warps, 8 or 12 "
            f"warps, and a multiple of {_ROWS} keys, not {tile}"
        )
    return consumers


def _pad(x: Array, axis: int, block: int) -> Array:
    more = -x.shape[axis] % block
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more else x


def _interpreter() -> Any:
    # JAX 0.10 does not export it under a public name.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=True)


@dataclasses.dataclass(frozen=True)
class _Ops:
    """Operations that JAX's interpreter for these kernels lacks: wgmma on registers, and register layouts.

    Attributes:
      compiled: Whether the kernel is compiled for a GPU; False emulates these operations for the interpreter.
    """

    compiled: bool

    def _cast(self, x: Array, layout: Any) -> Array:
        return plgpu.layout_cast(x, layout) if self.compiled else x

    def row_layout(self, x: Array) -> Array:
        """Casts [rows] to the register layout of row statistics: one element per row of a wgmma result."""
        return self._cast(x, plgpu.Layout.WGMMA.reduce(1))

    def column_layout(self, x: Array) -> Array:
        """Casts [columns] to the register layout with one element per column of a wgmma result."""
        return self._cast(x, plgpu.Layout.WGMMA.reduce(0))

    def matmul_layout(self, x: Array) -> Array:
        """Casts [rows, columns] to the register layout of a wgmma result."""
        return self._cast(x, plgpu.Layout.WGMMA)

    def qk(self, q_ref: Any, k_ref: Any, after_issue: Callable[[], None]) -> Array:
        """Computes q·k of [64, H] and [n, H] in shared memory; calls `after_issue` after issuing the matmul."""
        if not self.compiled:
            after_issue()
            return self._emulated_dot(q_ref[...], k_ref, 1)

        def multiply(acc_ref: Any) -> Array:
            plgpu.wgmma(acc_ref, q_ref, k_ref.transpose((1, 0)))
            after_issue()
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((q_ref.shape[0], k_ref.shape[0]), jnp.float32))

    def add_pv(self, acc: Array, p: Array, v_ref: Any) -> Array:
        """Returns acc + p · v, with v in shared memory."""
        if not self.compiled:
            return acc + self._emulated_dot(p, v_ref, 0)
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v_ref))(plgpu.ACC.init(acc))

    def _emulated_dot(self, a: Array, b_ref: Any, contracted: int) -> Array:
        b = b_ref[...]
        # wgmma and TMA share the async proxy; reads by the threads need a fence against TMA writes.
        plgpu.commit_smem()
        return lax.dot_general(a, b, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32)


class _Scratch(NamedTuple):
    """Shared memory and barriers of one block: queries, tiles of keys and values, and barriers.

    Attributes:
      q: Queries of each consumer; the output overwrites them.
      k, v: Tiles of keys and values, one per stage.
      lse: lse of each consumer's queries.
      q_segments, k_segments: Segments of q and k; None if there are none.
      q_ready, k_ready, v_ready: Barriers on which the copies arrive.
      k_free, v_free: Barriers on which consumers arrive after reading a tile.
      turn: Barrier that makes two consumers alternate; None for any other number of consumers.
    """

    q: Any
    k: Any
    v: Any
    lse: Any
    q_segments: Any
    k_segments: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    turn: Any


def _scratch(tile: Tile, head_dim: int, dtype: Any, consumers: int, segmented: bool) -> _Scratch:
    lanes = _SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(_SWIZZLE_BYTES))
    keys = plgpu.SMEM((tile.stages, tile.keys, head_dim), dtype, transforms=transforms)
    ready = plgpu.Barrier(num_barriers=tile.stages)
    free = plgpu.Barrier(num_barriers=tile.stages, num_arrivals=consumers)
    # Segment copies arrive on the same barriers as the copies of queries and keys.
    copies = 2 if segmented else 1
    return _Scratch(
        q=plgpu.SMEM((consumers, _ROWS, head_dim), dtype, transforms=transforms),
        k=keys,
        v=keys,
        lse=plgpu.SMEM((consumers, _ROWS), jnp.float32),
        q_segments=plgpu.SMEM((consumers, _ROWS), jnp.int32) if segmented else None,
        k_segments=plgpu.SMEM((tile.stages, tile.keys), jnp.int32) if segmented else None,
        q_ready=plgpu.Barrier(num_barriers=consumers, num_arrivals=copies),
        k_ready=plgpu.Barrier(num_barriers=tile.stages, num_arrivals=copies),
        v_ready=ready,
        k_free=free,
        v_free=free,
        turn=plgpu.Barrier(num_arrivals=2) if consumers == 2 else None,
    )


def _block(
    refs: tuple[Any, ...],
    scratch: _Scratch,
    *,
    spec: AttentionSpec,
    tile: Tile,
    group: int,
    last: int,
    ops: _Ops,
) -> None:
    """Computes the output of `tile.queries` queries of one head in one thread block."""
    q_ref, k_ref, v_ref, *segment_refs, out_ref, lse_ref = refs
    q_segments_ref, k_segments_ref = segment_refs or (None, None)
    b, n, warpgroup = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("group")
    # Under a causal mask the last queries have the most work, so they start first.
    start = (last - lax.axis_index("tile")) * tile.queries
    # All consumers iterate over the union of their tiles: they alternate, so they need equal iteration counts.
    ranges = key_ranges(spec, start, tile, scratch.q_segments is not None)
    begin, end = ranges[0][0], ranges[-1][1]
    consumers = tile.queries // _ROWS

    @pl.when(warpgroup == consumers)
    def produce() -> None:
        plgpu.set_max_registers(_REGISTERS[consumers][1], action="decrease")
        head = key_head(n, group)

        def fetch(j: Index, _: None) -> None:
            step = j - begin
            stage = lax.rem(step, jnp.int32(tile.stages))
            block = pl.ds(j * tile.keys, tile.keys)

            @pl.when(step >= tile.stages)
            def wait_for_keys() -> None:
                plgpu.barrier_wait(scratch.k_free.at[stage])

            plgpu.copy_gmem_to_smem(k_ref.at[b, head, block], scratch.k.at[stage], scratch.k_ready.at[stage])
            if k_segments_ref is not None:
                plgpu.copy_gmem_to_smem(
                    k_segments_ref.at[b, block], scratch.k_segments.at[stage], scratch.k_ready.at[stage]
                )

            @pl.when(step >= tile.stages)
            def wait_for_values() -> None:
                plgpu.barrier_wait(scratch.v_free.at[stage])

            plgpu.copy_gmem_to_smem(v_ref.at[b, head, block], scratch.v.at[stage], scratch.v_ready.at[stage])

        def drain(j: Index, _: None) -> None:
            stage = lax.rem(j - begin, jnp.int32(tile.stages))
            plgpu.barrier_wait(scratch.k_free.at[stage])
            plgpu.barrier_wait(scratch.v_free.at[stage])

        lax.fori_loop(begin, end, fetch, None)
        # Every arrival on a barrier must be waited for before the kernel ends.
        lax.fori_loop(jnp.maximum(begin, end - tile.stages), end, drain, None)

    @pl.when(warpgroup < consumers)
    def consume() -> None:
        plgpu.set_max_registers(_REGISTERS[consumers][0], action="increase")
        first = start + warpgroup * _ROWS
        block, q_ready = pl.ds(first, _ROWS), scratch.q_ready.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[b, block, n], scratch.q.at[warpgroup], q_ready)
        if q_segments_ref is not None:
            plgpu.copy_gmem_to_smem(q_segments_ref.at[b, block], scratch.q_segments.at[warpgroup], q_ready)
        plgpu.barrier_wait(q_ready)
        if scratch.turn is not None:
            pl.when(warpgroup == 1)(lambda: _take_turns(scratch))
        step = functools.partial(_step, scratch=scratch, begin=begin, first=first, spec=spec, ops=ops)
        shape = scratch.q.shape[1:]
        initial = (
            ops.matmul_layout(jnp.zeros(shape, jnp.float32)),
            ops.row_layout(jnp.full(shape[:1], M_INIT, jnp.float32)),
            ops.row_layout(jnp.zeros(shape[:1], jnp.float32)),
        )
        acc, m, l = loop(ranges, step, initial)
        if scratch.turn is not None:
            pl.when(warpgroup == 0)(lambda: _take_turns(scratch))
        fully_masked = l == 0
        l = jnp.where(fully_masked, 1.0, l)
        scratch.q[warpgroup] = (acc / _broadcast(l, shape, 0)).astype(out_ref.dtype)
        scratch.lse[warpgroup] = jnp.where(fully_masked, MASKED_ROW_LSE, m * LN_2 + jnp.log(l))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.q.at[warpgroup], out_ref.at[b, block, n])
        plgpu.copy_smem_to_gmem(scratch.lse.at[warpgroup], lse_ref.at[b, n, block])
        plgpu.wait_smem_to_gmem(0)


def _step(
    j: Index,
    carry: tuple[Array, Array, Array],
    masked: bool,
    *,
    scratch: _Scratch,
    begin: Index,
    first: Index,
    spec: AttentionSpec,
    ops: _Ops,
) -> tuple[Array, Array, Array]:
    """Processes one tile of keys for the 64 queries of a consumer that start at `first`."""
    acc, m, l = carry
    warpgroup = lax.axis_index("group")
    stages, keys = scratch.k.shape[:2]
    stage = lax.rem(j - begin, jnp.int32(stages))

    def take_turns() -> None:
        if scratch.turn is not None:
            _take_turns(scratch)

    plgpu.barrier_wait(scratch.k_ready.at[stage])
    shape = (_ROWS, keys)
    s = spec.base2_scores(ops.qk(scratch.q.at[warpgroup], scratch.k.at[stage], take_turns))
    if masked:
        rows = first + ops.matmul_layout(lax.broadcasted_iota(jnp.int32, shape, 0))
        columns = j * keys + ops.matmul_layout(lax.broadcasted_iota(jnp.int32, shape, 1))
        row_segments = column_segments = None
        if scratch.q_segments is not None:
            row_segments = _broadcast(ops.row_layout(scratch.q_segments[warpgroup]), shape, 0)
            column_segments = _broadcast(ops.column_layout(scratch.k_segments[stage]), shape, 1)
            plgpu.commit_smem()  # fences the reads by the threads from the next TMA write
        s = jnp.where(spec.mask(rows, columns, row_segments, column_segments), s, MASK_VALUE)
    plgpu.barrier_arrive(scratch.k_free.at[stage])
    new_m = jnp.maximum(m, s.max(1))
    p = jnp.exp2(s - _broadcast(new_m, shape, 0))
    alpha = jnp.exp2(m - new_m)
    acc = acc * _broadcast(alpha, acc.shape, 0)
    l = l * alpha + p.sum(1)
    plgpu.barrier_wait(scratch.v_ready.at[stage])
    take_turns()
    acc = ops.add_pv(acc, p.astype(scratch.v.dtype), scratch.v.at[stage])
    plgpu.barrier_arrive(scratch.v_free.at[stage])
    return acc, new_m, l


def _take_turns(scratch: _Scratch) -> None:
    plgpu.barrier_arrive(scratch.turn)
    plgpu.barrier_wait(scratch.turn)


def _broadcast(x: Array, shape: tuple[int, ...], dim: int) -> Array:
    """Broadcasts a vector along the other dimension of `shape`; its elements are indexed by dimension `dim`."""
    return lax.broadcast_in_dim(x, shape, [dim])
