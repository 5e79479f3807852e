"""Kernel that writes the newest tokens of each row into a stacked cache on a TPU, in place.

With a scatter or `dynamic_update_slice`, XLA chooses the cache layout for that operation rather than for the attention
kernel, and then copies the whole cache in each layer. This kernel reads, updates and writes back the tiles of slots
around the new tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from jaxllm.kernels.decode import tpu as decode_tpu

_SUBLANES = 32  # rows of a tile of 1-byte elements; tiles of wider elements have fewer
_MAX_TOKENS = 128  # tokens per row and call; all of them are in VMEM
_NOT_WRITTEN = -1  # slot of a token that is not written


def write_tokens(
    stacks: dict[str, Array],
    tokens: dict[str, Array],
    layer: Int[Array, ""],
    slot: Int[Array, "B T"],
    *,
    interpret: bool = False,
) -> dict[str, Array]:
    """Writes each row's tokens into their slots of one layer and returns the stacks, in the same memory.

    Args:
      stacks: Keys and values [L, B, K, S, H] by name, and for an int8 cache also their scales [L, B, K, S].
      tokens: New entries with the names and dtypes of `stacks`: [B, K, T, H], and [B, K, T] for scales.
      layer: Layer to write.
      slot: Slot of each token; S marks a token that is not written, at any index. The slots of a row's written tokens
        are distinct and consecutive, with S − 1 followed by 0.
      interpret: Runs the kernel in Pallas's interpreter.

    Returns:
      The updated stacks by name.
    """
    S = next(iter(stacks.values())).shape[3]
    slot = jnp.where(slot < S, slot, _NOT_WRITTEN)
    for begin in range(0, slot.shape[1], _MAX_TOKENS):
        chunk = slice(begin, begin + _MAX_TOKENS)
        new = {name: x[:, :, chunk] for name, x in tokens.items()}
        stacks = _write(stacks, new, layer, slot[:, chunk], interpret)
    return stacks


def _write(
    stacks: dict[str, Array], tokens: dict[str, Array], layer: Array, slot: Int[Array, "B T"], interpret: bool
) -> dict[str, Array]:
    B, T = slot.shape
    layouts = [_array_layout(stack, T) for stack in stacks.values()]
    S = next(iter(stacks.values())).shape[3]
    stored = [layout.transpose(stack) for layout, stack in zip(layouts, stacks.values(), strict=True)]
    new = [tokens[name].reshape(layout.token) for layout, name in zip(layouts, stacks, strict=True)]
    # Slot of the first written token of each row.
    first = jnp.take_along_axis(slot, jnp.argmax(slot != _NOT_WRITTEN, axis=1)[:, None], axis=1)[:, 0]
    # The array with the narrowest tiles determines the steps; the other arrays write their last tile again, unchanged.
    steps = max(layout.tiles(T, S) for layout in layouts)

    def tile(layout: "_ArrayLayout") -> pl.BlockSpec:
        def tile_index(b: Any, step: Any, first_ref: Any, layer_ref: Any) -> tuple[Any, ...]:
            at = [0] * len(layout.block)
            at[layout.slot_dim] = _tile(first_ref[b], step, layout, T, S)
            return layer_ref[0], b, *at

        return pl.BlockSpec((None, None, *layout.block), tile_index)

    def token(layout: "_ArrayLayout") -> pl.BlockSpec:
        return pl.BlockSpec((None, *layout.token[1:]), lambda b, *_: (b, *[0] * (len(layout.token) - 1)))

    tiles = [tile(layout) for layout in layouts]
    bytes_accessed = sum(
        2 * B * layout.tiles(T, S) * layout.size * x.dtype.itemsize for layout, x in zip(layouts, stored, strict=True)
    )
    out = pl.pallas_call(
        functools.partial(_kernel, tokens=T, slots=S, layouts=layouts),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, steps),
            in_specs=[
                pl.BlockSpec((None, 1, T), lambda b, *_: (b, 0, 0)),
                *map(token, layouts),
                *tiles,
            ],
            out_specs=tiles,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored],
        # Input indices count the two scalar arguments and the slots first.
        input_output_aliases={3 + len(layouts) + i: i for i in range(len(layouts))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=bytes_accessed),
        interpret=interpret,
        name="decode_write",
    )(first, layer[None], slot[:, None], *new, *stored)
    return {name: layout.transpose(x) for name, layout, x in zip(stacks, layouts, out, strict=True)}


@dataclasses.dataclass(frozen=True)
class _ArrayLayout:
    """Layout in which the kernel writes one of the arrays.

    Attributes:
      block: Shape of the tile of one row that is read, updated and written back.
      slot_dim: Dimension of `block` that contains the slots; its size is `width`.
      token: Shape of the new entries of all rows; for one token per row it broadcasts against the block.
      transposed: Whether the kernel uses the transposed stack, with the slots last.
    """

    block: tuple[int, ...]
    slot_dim: int
    token: tuple[int, ...]
    transposed: bool

    @property
    def width(self) -> int:
        """Slots per tile."""
        return self.block[self.slot_dim]

    @property
    def size(self) -> int:
        """Elements per tile."""
        return math.prod(self.block)

    def tiles(self, tokens: int, slots: int) -> int:
        """Returns the most tiles that `tokens` consecutive slots can touch, including a wrap around a ring's end."""
        return min(pl.cdiv(tokens - 1, self.width) + (2 if tokens > 1 else 1), pl.cdiv(slots, self.width))

    def transpose(self, stack: Array) -> Array:
        """Converts the stack to the layout of the kernel, or back."""
        return stack.swapaxes(3, 4) if self.transposed else stack


def _array_layout(stack: Array, tokens: int) -> _ArrayLayout:
    B, K, S = stack.shape[1:4]
    lanes, sublanes = min(decode_tpu.LANES, S), min(_SUBLANES, S)
    if stack.ndim == 4:
        return _ArrayLayout((K, lanes), 1, (B, K, tokens), False)
    H = stack.shape[4]
    if decode_tpu.slots_last(H):
        return _ArrayLayout((K, H, lanes), 2, (B, K, H, 1) if tokens == 1 else (B, K, tokens, H), True)
    return _ArrayLayout((K, sublanes, H), 1, (B, K, tokens, H), False)


def _tile(first: Any, step: Any, layout: _ArrayLayout, tokens: int, slots: int) -> Any:
    """Returns the tile of a row that a step writes: from the first slot's tile on, around the ring, up to the last."""
    at = jax.lax.div(jnp.maximum(first, 0), layout.width)
    return jax.lax.rem(at + jnp.minimum(step, layout.tiles(tokens, slots) - 1), pl.cdiv(slots, layout.width))


def _kernel(
    first_ref: Any, layer_ref: Any, slot_ref: Any, *refs: Any, tokens: int, slots: int, layouts: Sequence[_ArrayLayout]
) -> None:
    del layer_ref  # read by the index maps
    first, step, count = first_ref[pl.program_id(0)], pl.program_id(1), len(layouts)
    for layout, new_ref, old_ref, out_ref in zip(
        layouts, refs[:count], refs[count : 2 * count], refs[2 * count :], strict=True
    ):
        begin = _tile(first, step, layout, tokens, slots) * layout.width
        if tokens == 1:
            written = begin + jax.lax.broadcasted_iota(jnp.int32, old_ref.shape, layout.slot_dim) == first
            out_ref[...] = jnp.where(written, new_ref[...], old_ref[...])
        else:
            _scatter_tokens(begin, slot_ref[...], new_ref, old_ref, out_ref, layout)


def _scatter_tokens(
    begin: Any, slot: Int[Array, "1 T"], new_ref: Any, old_ref: Any, out_ref: Any, layout: _ArrayLayout
) -> None:
    """Scatters tokens into their slots by a matmul with a 0/1 matrix; each sum has at most one nonzero term."""
    dtype = out_ref.dtype
    wide = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    slots = begin + jax.lax.broadcasted_iota(jnp.int32, (layout.width, slot.shape[1]), 0)
    one_hot = (slots == slot).astype(wide)
    written_rows = one_hot.astype(jnp.float32).max(1, keepdims=True) > 0  # [width, 1]
    if old_ref.ndim == 2:
        written = dot(jnp.ones((1, slot.shape[1]), wide), one_hot, (((1,), (1,)), ((), ()))) > 0
        scattered = dot(new_ref[...].astype(wide), one_hot, (((1,), (1,)), ((), ())))
        out_ref[...] = jnp.where(written, scattered, old_ref[...])
        return
    for head in range(old_ref.shape[0]):
        new, old = new_ref[head].astype(wide), old_ref[head].astype(jnp.float32)
        if layout.transposed:
            written = dot(jnp.ones((1, slot.shape[1]), wide), one_hot, (((1,), (1,)), ((), ()))) > 0
            scattered = dot(new, one_hot, (((0,), (1,)), ((), ())))
            out_ref[head] = jnp.where(written, scattered, old).astype(dtype)
        else:
            scattered = dot(one_hot, new, (((1,), (0,)), ((), ())))
            out_ref[head] = jnp.where(written_rows, scattered, old).astype(dtype)
