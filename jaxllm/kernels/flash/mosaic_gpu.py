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
from jaxllm.kernels.flash.spans import key_spans, loop
from jaxllm.kernels.flash.tile import EMPTY_LSE, LN_2, M_INIT, MASK_VALUE, AttentionSpec, Index, Inputs, key_head
from jaxllm.kernels.flash.tile_sizes import Tile, Tiles

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
    groups = _require(H, dtype, tile)
    q, k, v = _pad(inputs.q, 1, tile.queries), _pad(inputs.k, 2, tile.keys), _pad(inputs.v, 2, tile.keys)
    operands = [q, k, v]
    if inputs.q_segments is not None and inputs.k_segments is not None:
        operands += [_pad(inputs.q_segments.astype(jnp.int32), 1, tile.queries)]
        operands += [_pad(inputs.k_segments.astype(jnp.int32), 1, tile.keys)]
    last = q.shape[1] // tile.queries - 1

    def flash_attention(*refs: Any) -> None:
        body = functools.partial(
            _block, refs, spec=spec, tile=tile, group=inputs.group, last=last, machine=_Machine(not interpret)
        )
        pl.run_scoped(body, _scratch(tile, H, dtype, groups, inputs.segmented), collective_axes="group")

    out, lse = plgpu.kernel(
        flash_attention,
        out_type=[jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct((B, N, q.shape[1]), jnp.float32)],
        grid=(N, last + 1, B),
        grid_names=("head", "tile", "batch"),
        num_threads=groups + 1,
        thread_name="group",
        # The approximate tanh has an error of 5e-4; with a softcap of 30 that is 1.5 % of a weight.
        compiler_params=plgpu.CompilerParams(approx_math=not spec.softcap),
        interpret=_interpreter() if interpret else None,
    )(*operands)
    return out[:, :T], lse[:, :, :T]


def _require(head_dim: int, dtype: Any, tile: Tile) -> int:
    """Checks the arguments of the kernel and returns the number of consumer warpgroups.

    Raises:
      UserError: The head_dim, dtype or tile is not supported.
    """
    if head_dim not in HEADS or str(jnp.dtype(dtype)) not in DTYPES:
        raise UserError(
            f"the Mosaic-GPU attention kernel takes head_dim {', '.join(map(str, HEADS))} in {' or '.join(DTYPES)}, "
            f"not {head_dim} in {jnp.dtype(dtype)}; use backend='triton'"
        )
    groups = tile.warps // _GROUP_WARPS
    if groups not in _REGISTERS or tile.warps % _GROUP_WARPS or tile.queries != groups * _ROWS or tile.keys % _ROWS:
        raise UserError(
            f"the Mosaic-GPU attention kernel takes tiles of {_ROWS} queries for each {_GROUP_WARPS} warps, 8 or 12 of "
            f"these, and a multiple of {_ROWS} keys, not {tile}"
        )
    return groups


def _pad(x: Array, axis: int, block: int) -> Array:
    more = -x.shape[axis] % block
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more else x


def _interpreter() -> Any:
    # JAX 0.10 does not export it under a public name.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=True)


@dataclasses.dataclass(frozen=True)
class _Machine:
    """Operations that JAX's interpreter for these kernels lacks: wgmma on registers, and register layouts.

    Attributes:
      real: Whether the kernel is compiled for a GPU; False simulates these operations for the interpreter.
    """

    real: bool

    def placed(self, x: Array, layout: Any) -> Array:
        return plgpu.layout_cast(x, layout) if self.real else x

    def rows(self, x: Array) -> Array:
        """Casts [rows] to the register layout of row statistics: one element per row of a wgmma result."""
        return self.placed(x, plgpu.Layout.WGMMA.reduce(1))

    def columns(self, x: Array) -> Array:
        """Casts [columns] to the register layout with one element per column of a wgmma result."""
        return self.placed(x, plgpu.Layout.WGMMA.reduce(0))

    def product(self, x: Array) -> Array:
        """Casts [rows, columns] to the register layout of a wgmma result."""
        return self.placed(x, plgpu.Layout.WGMMA)

    def scores(self, q_ref: Any, k_ref: Any, meanwhile: Callable[[], None]) -> Array:
        """Computes q·k of [64, H] and [n, H] in shared memory; calls `meanwhile` after issuing the matmul."""
        if not self.real:
            meanwhile()
            return self._simulated(q_ref[...], k_ref, 1)

        def multiply(acc_ref: Any) -> Array:
            plgpu.wgmma(acc_ref, q_ref, k_ref.transpose((1, 0)))
            meanwhile()
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((q_ref.shape[0], k_ref.shape[0]), jnp.float32))

    def add(self, acc: Array, weights: Array, v_ref: Any) -> Array:
        """Returns total + weights · v, with v in shared memory."""
        if not self.real:
            return acc + self._simulated(weights, v_ref, 0)
        return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v_ref))(plgpu.ACC.init(acc))

    def _simulated(self, a: Array, b_ref: Any, contracted: int) -> Array:
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


def _scratch(tile: Tile, head_dim: int, dtype: Any, groups: int, segmented: bool) -> _Scratch:
    lanes = _SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(_SWIZZLE_BYTES))
    keys = plgpu.SMEM((tile.stages, tile.keys, head_dim), dtype, transforms=transforms)
    ready = plgpu.Barrier(num_barriers=tile.stages)
    free = plgpu.Barrier(num_barriers=tile.stages, num_arrivals=groups)
    # Segment copies arrive on the same barriers as the copies of queries and keys.
    copies = 2 if segmented else 1
    return _Scratch(
        q=plgpu.SMEM((groups, _ROWS, head_dim), dtype, transforms=transforms),
        k=keys,
        v=keys,
        lse=plgpu.SMEM((groups, _ROWS), jnp.float32),
        q_segments=plgpu.SMEM((groups, _ROWS), jnp.int32) if segmented else None,
        k_segments=plgpu.SMEM((tile.stages, tile.keys), jnp.int32) if segmented else None,
        q_ready=plgpu.Barrier(num_barriers=groups, num_arrivals=copies),
        k_ready=plgpu.Barrier(num_barriers=tile.stages, num_arrivals=copies),
        v_ready=ready,
        k_free=free,
        v_free=free,
        turn=plgpu.Barrier(num_arrivals=2) if groups == 2 else None,
    )


def _block(
    refs: tuple[Any, ...],
    scratch: _Scratch,
    *,
    spec: AttentionSpec,
    tile: Tile,
    group: int,
    last: int,
    machine: _Machine,
) -> None:
    """Computes the output of `tile.queries` queries of one head in one thread block."""
    q_ref, k_ref, v_ref, *segment_refs, out_ref, lse_ref = refs
    q_segments_ref, k_segments_ref = segment_refs or (None, None)
    b, n, worker = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("group")
    # Under a causal mask the last queries have the most work, so they start first.
    start = (last - lax.axis_index("tile")) * tile.queries
    # All consumers iterate over the union of their tiles: they alternate, so they need equal iteration counts.
    spans = key_spans(spec, start, tile, scratch.q_segments is not None)
    begin, end = spans[0][0], spans[-1][1]
    groups = tile.queries // _ROWS

    @pl.when(worker == groups)
    def copy() -> None:
        plgpu.set_max_registers(_REGISTERS[groups][1], action="decrease")
        head = key_head(n, group)

        def fetch(j: Index, _: None) -> None:
            step = j - begin
            slot = lax.rem(step, jnp.int32(tile.stages))
            here = pl.ds(j * tile.keys, tile.keys)

            @pl.when(step >= tile.stages)
            def wait_for_keys() -> None:
                plgpu.barrier_wait(scratch.k_free.at[slot])

            plgpu.copy_gmem_to_smem(k_ref.at[b, head, here], scratch.k.at[slot], scratch.k_ready.at[slot])
            if k_segments_ref is not None:
                plgpu.copy_gmem_to_smem(
                    k_segments_ref.at[b, here], scratch.k_segments.at[slot], scratch.k_ready.at[slot]
                )

            @pl.when(step >= tile.stages)
            def wait_for_values() -> None:
                plgpu.barrier_wait(scratch.v_free.at[slot])

            plgpu.copy_gmem_to_smem(v_ref.at[b, head, here], scratch.v.at[slot], scratch.v_ready.at[slot])

        def drain(j: Index, _: None) -> None:
            slot = lax.rem(j - begin, jnp.int32(tile.stages))
            plgpu.barrier_wait(scratch.k_free.at[slot])
            plgpu.barrier_wait(scratch.v_free.at[slot])

        lax.fori_loop(begin, end, fetch, None)
        # Every arrival on a barrier must be waited for before the kernel ends.
        lax.fori_loop(jnp.maximum(begin, end - tile.stages), end, drain, None)

    @pl.when(worker < groups)
    def compute() -> None:
        plgpu.set_max_registers(_REGISTERS[groups][0], action="increase")
        first = start + worker * _ROWS
        here, q_ready = pl.ds(first, _ROWS), scratch.q_ready.at[worker]
        plgpu.copy_gmem_to_smem(q_ref.at[b, here, n], scratch.q.at[worker], q_ready)
        if q_segments_ref is not None:
            plgpu.copy_gmem_to_smem(q_segments_ref.at[b, here], scratch.q_segments.at[worker], q_ready)
        plgpu.barrier_wait(q_ready)
        if scratch.turn is not None:
            pl.when(worker == 1)(lambda: _meet(scratch))
        step = functools.partial(_step, scratch=scratch, begin=begin, first=first, spec=spec, machine=machine)
        shape = scratch.q.shape[1:]
        nothing = (
            machine.product(jnp.zeros(shape, jnp.float32)),
            machine.rows(jnp.full(shape[:1], M_INIT, jnp.float32)),
            machine.rows(jnp.zeros(shape[:1], jnp.float32)),
        )
        acc, m, l = loop(spans, step, nothing)
        if scratch.turn is not None:
            pl.when(worker == 0)(lambda: _meet(scratch))
        empty = l == 0
        whole = jnp.where(empty, 1.0, l)
        scratch.q[worker] = (acc / _across(whole, shape)).astype(out_ref.dtype)
        scratch.lse[worker] = jnp.where(empty, EMPTY_LSE, m * LN_2 + jnp.log(whole))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.q.at[worker], out_ref.at[b, here, n])
        plgpu.copy_smem_to_gmem(scratch.lse.at[worker], lse_ref.at[b, n, here])
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
    machine: _Machine,
) -> tuple[Array, Array, Array]:
    """Processes one tile of keys for the 64 queries of a consumer that start at `first`."""
    acc, m, l = carry
    worker = lax.axis_index("group")
    stages, keys = scratch.k.shape[:2]
    slot = lax.rem(j - begin, jnp.int32(stages))

    def meet() -> None:
        if scratch.turn is not None:
            _meet(scratch)

    plgpu.barrier_wait(scratch.k_ready.at[slot])
    shape = (_ROWS, keys)
    bits = spec.bits(machine.scores(scratch.q.at[worker], scratch.k.at[slot], meet))
    if masked:
        rows = first + machine.product(lax.broadcasted_iota(jnp.int32, shape, 0))
        columns = j * keys + machine.product(lax.broadcasted_iota(jnp.int32, shape, 1))
        row_segments = column_segments = None
        if scratch.q_segments is not None:
            row_segments = _across(machine.rows(scratch.q_segments[worker]), shape)
            column_segments = _down(machine.columns(scratch.k_segments[slot]), shape)
            plgpu.commit_smem()  # fences the reads by the threads from the next TMA write
        bits = jnp.where(spec.visible(rows, columns, row_segments, column_segments), bits, MASK_VALUE)
    plgpu.barrier_arrive(scratch.k_free.at[slot])
    new_m = jnp.maximum(m, bits.max(1))
    weights = jnp.exp2(bits - _across(new_m, shape))
    alpha = jnp.exp2(m - new_m)
    acc = acc * _across(alpha, acc.shape)
    l = l * alpha + weights.sum(1)
    plgpu.barrier_wait(scratch.v_ready.at[slot])
    meet()
    acc = machine.add(acc, weights.astype(scratch.v.dtype), scratch.v.at[slot])
    plgpu.barrier_arrive(scratch.v_free.at[slot])
    return acc, new_m, l


def _meet(scratch: _Scratch) -> None:
    plgpu.barrier_arrive(scratch.turn)
    plgpu.barrier_wait(scratch.turn)


def _across(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _down(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, [1])
