"""Writes the newest tokens of each row into a stacked cache on a TPU, in place.

A scatter or an update of slices would do, but XLA lays the cache out for those, and not for the kernel that reads it:
it then copies the whole cache in each layer. Here the slots around the new ones are read, changed and written back.
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

_SUBLANES = 32  # a tile's rows, for numbers of one byte; of wider ones it has fewer
_MOST_TOKENS = 128  # of a row in one call: all of them are in VMEM
_NOWHERE = -1


def write_tokens(
    stacks: dict[str, Array],
    tokens: dict[str, Array],
    layer: Int[Array, ""],
    slot: Int[Array, "B T"],
    *,
    interpret: bool = False,
) -> dict[str, Array]:
    """The stacks, in the same memory, with each row's tokens in their slots of one layer.

    Args:
      stacks: keys and values [L, B, K, S, H], and their scales [L, B, K, S] where they are in int8.
      tokens: the same names: [B, K, T, H], and [B, K, T] of scales; of their stacks' dtypes.
      slot: one after another (S − 1 is followed by 0), and no slot twice; S for a token that is not written, which may
        stand anywhere.
    """
    S = next(iter(stacks.values())).shape[3]
    slot = jnp.where(slot < S, slot, _NOWHERE)
    for begin in range(0, slot.shape[1], _MOST_TOKENS):
        part = slice(begin, begin + _MOST_TOKENS)
        news = {name: x[:, :, part] for name, x in tokens.items()}
        stacks = _write(stacks, news, layer, slot[:, part], interpret)
    return stacks


def _write(
    stacks: dict[str, Array], tokens: dict[str, Array], layer: Array, slot: Int[Array, "B T"], interpret: bool
) -> dict[str, Array]:
    B, T = slot.shape
    parts = [_part(stack, T) for stack in stacks.values()]
    S = next(iter(stacks.values())).shape[3]
    turned = [part.turn(stack) for part, stack in zip(parts, stacks.values(), strict=True)]
    news = [tokens[name].reshape(part.token) for part, name in zip(parts, stacks, strict=True)]
    # The slot that all others follow: of the tokens that are written, the first.
    first = jnp.take_along_axis(slot, jnp.argmax(slot != _NOWHERE, axis=1)[:, None], axis=1)[:, 0]
    # As many steps as the array of the narrowest tiles takes; the others are written again, the same.
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
    moved = sum(2 * B * part.tiles(T, S) * part.size * x.dtype.itemsize for part, x in zip(parts, turned, strict=True))
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
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in turned],
        # Counted with the two scalar arguments and the slots.
        input_output_aliases={3 + len(parts) + i: i for i in range(len(parts))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name="decode_write",
    )(first, layer[None], slot[:, None], *news, *turned)
    return {name: part.turn(x) for name, part, x in zip(stacks, parts, out, strict=True)}


@dataclasses.dataclass(frozen=True)
class _Part:
    """How one of the arrays is written.

    Attributes:
      block: of a row: what is read around slots and written back.
      slot_dim: of the block, in which the slots are; it has `width` of them.
      token: the new numbers of all rows: of one token a row, as they are broadcast against the block.
      swaps: whether the slots stand last while the kernel runs, and elsewhere in the stack.
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
        """Tiles that so many slots one after another may lie in; one more where they pass the end of a ring."""
        return min(pl.cdiv(tokens - 1, self.width) + (2 if tokens > 1 else 1), pl.cdiv(slots, self.width))

    def turn(self, stack: Array) -> Array:
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
    """Which tile of a row a step writes: from the first slot's on, around the ring; past the last it stays."""
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
    """Tokens to their slots, by a product with a matrix of ones and zeros: each sum has one number in it."""
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
