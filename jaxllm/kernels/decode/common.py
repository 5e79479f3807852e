"""Parts that the decode kernels and the layer cache share: slots, masks, and int8 quantization of keys and values.

Position p is stored in slot p mod S. A full cache has one slot per position that a row may reach. A ring cache has
fewer, and a token overwrites the slot of the token S positions earlier.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

# Score of a masked slot: large, but the difference of two such values is finite.
MASK_VALUE = -1e30
_INT8_MAX = 127


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """Static parameters of decode attention.

    Attributes:
      tokens: New tokens per row, the last ones of the row.
      slots: Slots S per row.
      window: Number of visible positions, including the query's own; 0 means all.
      scale: Factor of q·k.
      softcap: Applies c·tanh(score / c) before the mask; 0 disables it.
    """

    tokens: int
    slots: int
    window: int
    scale: float
    softcap: float

    def slot_range(self, length: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Returns the range [first, end) of slots visible to the new tokens of a row with `length` tokens."""
        end = jnp.minimum(length, self.slots)
        if not self.window:
            return jnp.zeros_like(end), end
        earliest = jnp.maximum(length - self.tokens - self.window + 1, 0)
        return jnp.where(length <= self.slots, earliest, 0), end

    def block_range(
        self, length: Int[Array, ""], split: Int[Array, ""], block: int, splits: int
    ) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Returns the range [first, end) of blocks of `block` slots that belong to one split.

        The splits divide the blocks that the row uses, not the whole cache.
        """
        first, end = self.slot_range(length)
        first_block, end_block = jax.lax.div(first, block), jax.lax.div(end + (block - 1), block)
        per_split = jax.lax.div(end_block - first_block + (splits - 1), splits)
        low = first_block + split * per_split
        return low, jnp.minimum(low + per_split, end_block)

    def query_positions(self, rows: Int[Array, "R 1"], queries: int, length: Int[Array, ""]) -> Int[Array, "R 1"]:
        """Returns the positions of the given rows of a key head's queries.

        Queries are ordered by token, then by head within the group. Comparisons replace the division of rows by the
        group size because a TPU's vector unit has no integer division.
        """
        token = jnp.zeros_like(rows)
        for later in range(1, self.tokens):
            token += (rows >= later * (queries // self.tokens)).astype(jnp.int32)
        return length - self.tokens + token

    def mask(self, slot: Int[Array, "1 n"], query: Int[Array, "R 1"], length: Int[Array, ""]) -> Bool[Array, "R n"]:
        """Returns the mask of visible slots: the slot is occupied, and its token is not later and within the window.

        Args:
          slot: Slot indices; indices past the last slot count as empty.
          query: Positions of the queries.
          length: Tokens of the row.
        """
        last = length - 1
        newest = jax.lax.rem(jnp.maximum(last, 0), jnp.asarray(self.slots, last.dtype))
        # In a ring, slots up to the newest token's belong to the current lap and later slots to the previous one.
        position = slot + (last - newest)
        position = jnp.where(slot > newest, position - self.slots, position)
        mask = (slot < jnp.minimum(length, self.slots)) & (position >= 0) & (position <= query)
        if self.window:
            mask &= query - position < self.window
        return mask


def slot_positions(lengths: Int[Array, " B"], slots: int) -> Int[Array, "B S"]:
    """Returns the position stored in each slot of rows with `lengths` tokens; negative for empty slots."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots


def quantize(x: Float[Array, "*batch H"]) -> tuple[Int8[Array, "*batch H"], Float[Array, "*batch"]]:
    """Quantizes vectors to int8 in -127..127, such that x ≈ values · scale with an error of at most scale / 2.

    Returns:
      The int8 values, and the float32 scale of each vector: its largest magnitude / 127, 0 for a zero vector.
    """
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1) / _INT8_MAX
    steps = x / jnp.where(scale > 0, scale, 1.0)[..., None]
    return jnp.clip(jnp.round(steps), -_INT8_MAX, _INT8_MAX).astype(jnp.int8), scale


def dequantize(values: Int8[Array, "*batch H"], scale: Float[Array, "*batch"]) -> Float[Array, "*batch H"]:
    """Dequantizes int8 values to float32: values · scale."""
    return values.astype(jnp.float32) * scale[..., None]
