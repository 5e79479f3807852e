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
_NOWHERE = -1


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
    slot = jnp.where(slot < S, slot, _NOWHERE)
    for begin in range(0, slot.shape[1], _MAX_TOKENS):
        part = slice(begin, begin + _MAX_TOKENS)
        news = {name: x[:, :, part] for name, x in tokens.items()}
        stacks = _write(stacks, news, layer, slot[:, part], interpret)
    return stacks


def _write(
    stacks: dict[str, Array], tokens: dict[str, Array], layer: Array, slot: Int[Array, "B T"], interpret: bool
) -> dict[str, Array]:
    B, T = slot.shape
    parts = [_part(stack, T) for stack in stacks.values()]
    S = next(iter(stacks.values())).shape[3]
    transposed = [part.transpose(stack) for part, stack in zip(parts, stacks.values(), strict=True)]
    news = [tokens[name].reshape(part.token) for part, name in zip(parts, stacks, strict=True)]
    # Slot of the first written token of each row.
    first = jnp.take_along_axis(slot, jnp.argmax(slot != _NOWHERE, axis=1)[:, None], axis=1)[:, 0]
    # The array with the narrowest tiles determines the steps; the other arrays write their last tile again, unchanged.
    steps = max(part.tiles(T, S) for part in parts)

    def tile(part: "_Part") -> pl.BlockSpec:
        def around(b: Any, step: Any, first_ref: Any, layer_ref: Any) -> tuple[Any, ...]:
            at = [0] * len(part.block)
            at[part.slot_dim] = _tile(first_ref[b], step, part, T, S)
            return layer_ref[0], b, *at

        return pl.BlockSpec((None, None, *part.block), around)

    def token(part: "_Part") -> pl.BlockSpec:
        return pl.BlockSpec((None, *part.token[1:]), lambda b, *_: (b, *[0] * (len(part.token) - 1)))

    tiles = [tile(part) for part in parts]
    moved = sum(
        2 * B * part.tiles(T, S) * part.size * x.dtype.itemsize for part, x in zip(parts, transposed, strict=True)
    )
    out = pl.pallas_call(
        functools.partial(_kernel, tokens=T, slots=S, parts=parts),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, steps),
            in_specs=[
                pl.BlockSpec((None, 1, T), lambda b, *_: (b, 0, 0)),
                *map(token, parts),
                *tiles,
            ],
            out_specs=tiles,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in transposed],
        # Input indices count the two scalar arguments and the slots first.
        input_output_aliases={3 + len(parts) + i: i for i in range(len(parts))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name="decode_write",
    )(first, layer[None], slot[:, None], *news, *transposed)
    return {name: part.transpose(x) for name, part, x in zip(stacks, parts, out, strict=True)}


@dataclasses.dataclass(frozen=True)
class _Part:
    """Block shapes and layout with which the kernel writes one of the arrays.

    Attributes:
      block: Shape of the tile of one row that is read, updated and written back.
      slot_dim: Dimension of `block` that contains the slots; its size is `width`.
      token: Shape of the new entries of all rows; for one token per row it broadcasts against the block.
      swaps: Whether the kernel uses the stack transposed, with the slots last.
    """

    block: tuple[int, ...]
    slot_dim: int
    token: tuple[int, ...]
    swaps: bool

    @property
    def width(self) -> int:
        return self.block[self.slot_dim]

    @property
    def size(self) -> int:
        return math.prod(self.block)

    def tiles(self, tokens: int, slots: int) -> int:
        """Returns the most tiles that `tokens` consecutive slots can touch, including a wrap around a ring's end."""
        return min(pl.cdiv(tokens - 1, self.width) + (2 if tokens > 1 else 1), pl.cdiv(slots, self.width))

    def transpose(self, stack: Array) -> Array:
        return stack.swapaxes(3, 4) if self.swaps else stack


def _part(stack: Array, tokens: int) -> _Part:
    B, K, S = stack.shape[1:4]
    lanes, sublanes = min(decode_tpu.LANES, S), min(_SUBLANES, S)
    if stack.ndim == 4:
        return _Part((K, lanes), 1, (B, K, tokens), False)
    H = stack.shape[4]
    if decode_tpu.slots_last(H):
        return _Part((K, H, lanes), 2, (B, K, H, 1) if tokens == 1 else (B, K, tokens, H), True)
    return _Part((K, sublanes, H), 1, (B, K, tokens, H), False)


def _tile(first: Any, step: Any, part: _Part, tokens: int, slots: int) -> Any:
    """Returns the tile of a row that a step writes: from the first slot's tile on, around the ring, up to the last."""
    at = jax.lax.div(jnp.maximum(first, 0), part.width)
    return jax.lax.rem(at + jnp.minimum(step, part.tiles(tokens, slots) - 1), pl.cdiv(slots, part.width))


def _kernel(
    first_ref: Any, layer_ref: Any, slot_ref: Any, *refs: Any, tokens: int, slots: int, parts: Sequence[_Part]
) -> None:
    del layer_ref  # read by the index maps
    first, step, count = first_ref[pl.program_id(0)], pl.program_id(1), len(parts)
    for part, new_ref, old_ref, out_ref in zip(
        parts, refs[:count], refs[count : 2 * count], refs[2 * count :], strict=True
    ):
        begin = _tile(first, step, part, tokens, slots) * part.width
        if tokens == 1:
            here = begin + jax.lax.broadcasted_iota(jnp.int32, old_ref.shape, part.slot_dim) == first
            out_ref[...] = jnp.where(here, new_ref[...], old_ref[...])
        else:
            _move(begin, slot_ref[...], new_ref, old_ref, out_ref, part)


def _move(begin: Any, slot: Int[Array, "1 T"], new_ref: Any, old_ref: Any, out_ref: Any, part: _Part) -> None:
    """Scatters tokens into their slots by a matmul with a 0/1 matrix; each sum has at most one nonzero term."""
    dtype = out_ref.dtype
    wide = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    places = begin + jax.lax.broadcasted_iota(jnp.int32, (part.width, slot.shape[1]), 0)
    moves = (places == slot).astype(wide)
    here = moves.astype(jnp.float32).max(1, keepdims=True) > 0  # [width, 1]
    if old_ref.ndim == 2:
        there = dot(jnp.ones((1, slot.shape[1]), wide), moves, (((1,), (1,)), ((), ()))) > 0
        moved = dot(new_ref[...].astype(wide), moves, (((1,), (1,)), ((), ())))
        out_ref[...] = jnp.where(there, moved, old_ref[...])
        return
    for head in range(old_ref.shape[0]):
        new, old = new_ref[head].astype(wide), old_ref[head].astype(jnp.float32)
        if part.swaps:
            there = dot(jnp.ones((1, slot.shape[1]), wide), moves, (((1,), (1,)), ((), ()))) > 0
            moved = dot(new, moves, (((0,), (1,)), ((), ())))
            out_ref[head] = jnp.where(there, moved, old).astype(dtype)
        else:
            moved = dot(moves, new, (((1,), (0,)), ((), ())))
            out_ref[head] = jnp.where(here, moved, old).astype(dtype)
