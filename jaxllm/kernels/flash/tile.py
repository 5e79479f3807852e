"""Tiles of attention scores: which tiles exist, their masks, and the arithmetic on them.

The GPU and TPU kernels loop over the same tiles; they differ in how they load a tile.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
# HIDDEN is the score of a masked key. LEAST, the initial row maximum m, is far above it and far below any real score,
# so the weight exp2(HIDDEN - m) is 0 even in a fully masked row. All three constants are finite in float32.
MASK_VALUE = -1e30
M_INIT = -1e20
# lse of a fully masked row: the weights of such a row in the backward pass are exp2 of about -1e30, which is 0.
EMPTY_LSE = 1e30

Index = Int[Array, ""] | int


class Inputs(NamedTuple):
    """Inputs of attention: q, k, v and optional segments, given for both queries and keys or for neither."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    q_segments: Int[Array, "B T"] | None = None
    k_segments: Int[Array, "B S"] | None = None

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.q.shape[2] // self.k.shape[1]

    @property
    def segmented(self) -> bool:
        return self.q_segments is not None


def compute_delta(out: Float[Array, "B T N H"], d_out: Float[Array, "B T N H"]) -> Float[Array, "B N T"]:
    """Returns delta = rowsum(dO * O) of FlashAttention's backward pass, in float32; `d_out` is dO."""
    return jnp.einsum("btnh,btnh->bnt", out, d_out, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static attention parameters: lengths, mask, scale and softcap.

    Query t has position t + keys - queries, so the last query is aligned with the last key.

    Attributes:
      queries, keys: Sequence lengths T and S.
      causal: Whether keys after the query's position are masked.
      window: Keys at a distance below this are visible (the query's own has distance 0); 0 means no limit. If not
        causal, the window extends equally in both directions.
      scale: Factor of q·k.
      softcap: Applies c·tanh(score / c); 0 disables it.
    """

    queries: int
    keys: int
    causal: bool
    window: int
    scale: float
    softcap: float

    @property
    def offset(self) -> int:
        return self.keys - self.queries

    def keys_of(self, first: Index, end: Index) -> tuple[Index, Index]:
        """Returns the range [low, high) of keys visible to queries [first, end); empty if high <= low."""
        low: Index = 0
        high: Index = self.keys
        if self.window:
            low = _most(0, first + self.offset - self.window + 1)
        if self.causal:
            high = _least(high, end + self.offset)
        elif self.window:
            high = _least(high, end + self.offset + self.window - 1)
        return low, high

    def queries_of(self, first: Index, end: Index) -> tuple[Index, Index]:
        """Returns the range [low, high) of queries to which keys [first, end) are visible; empty if high <= low."""
        low: Index = 0
        high: Index = self.queries
        if self.causal:
            low = _most(0, first - self.offset)
        elif self.window:
            low = _most(0, first - self.offset - self.window + 1)
        if self.window:
            high = _least(high, end - self.offset + self.window - 1)
        return low, high

    def visible(
        self,
        rows: Int[Array, "..."],
        columns: Int[Array, "..."],
        row_segments: Int[Array, "..."] | None,
        column_segments: Int[Array, "..."] | None,
    ) -> Bool[Array, "..."]:
        """Returns the mask of a tile's scores, which excludes keys past the end; the arguments broadcast."""
        shown = (columns < self.keys) & (rows >= 0)
        distance = rows + self.offset - columns
        if self.causal:
            shown &= distance >= 0
        if self.window:
            shown &= distance < self.window
            if not self.causal:
                shown &= distance > -self.window
        if row_segments is not None and column_segments is not None:
            shown &= row_segments == column_segments
        return shown

    def bits(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        """Converts q·k to softcapped scores in base 2, that is times log2(e), so that exp2 gives the weights."""
        if self.softcap:
            return jnp.tanh(products * (self.scale / self.softcap)) * (self.softcap * LOG2_E)
        return products * (self.scale * LOG2_E)

    def slope(self, bits: Float[Array, "..."], d_out: Float[Array, "..."]) -> Float[Array, "..."]:
        """Converts a gradient of the capped score to one of q·k·scale: times the softcap's derivative, 1 - tanh²."""
        if not self.softcap:
            return d_out
        tanh = bits * (1 / (self.softcap * LOG2_E))
        return d_out * (1 - tanh * tanh)


def key_head(head: Index, group: int) -> Index:
    """Returns the key head of a query head; each key head serves `group` query heads."""
    return _quotient(head, group)


def blocks_of(span: tuple[Index, Index], block: int) -> tuple[Index, Index]:
    """Returns the range [first, end) of blocks that contain a span of elements; both bounds are nonnegative."""
    low, high = span
    return _quotient(low, block), _quotient(_most(high, 0) + block - 1, block)


def _quotient(value: Index, block: int) -> Index:
    """Divides a nonnegative value, for which truncating lax.div is exact floor division in one instruction."""
    return value // block if isinstance(value, int) else lax.div(value, block)


def _least(a: Index, b: Index) -> Index:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _most(a: Index, b: Index) -> Index:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
