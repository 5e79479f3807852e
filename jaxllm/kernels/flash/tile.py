"""One tile of attention scores: which tiles there are, what a tile's queries see, and the arithmetic on it.

Both platforms' kernels are loops over these tiles; they differ in how a tile gets to the processor.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
# Of a key that is not seen. A row's maximum begins far above it and far below any real score, so that the weight
# exp2(HIDDEN - maximum) is 0 even in a row that sees nothing; all three are finite in float32.
HIDDEN = -1e30
LEAST = -1e20
# Log of the sum of a row that sees nothing: its weights in the backward pass are exp2 of about -1e30.
EMPTY = 1e30

Index = Int[Array, ""] | int


class Inputs(NamedTuple):
    """What attention is of; segments of both queries and keys, or of neither."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    q_segments: Int[Array, "B T"] | None = None
    k_segments: Int[Array, "B S"] | None = None

    @property
    def group(self) -> int:
        """Query heads that read the same key head."""
        return self.q.shape[2] // self.k.shape[1]

    @property
    def segmented(self) -> bool:
        return self.q_segments is not None


def losses(out: Float[Array, "B T N H"], change: Float[Array, "B T N H"]) -> Float[Array, "B N T"]:
    """What the change of each of a row's weights loses to the normalisation: the output along its own change."""
    return jnp.einsum("btnh,btnh->bnt", out, change, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What attention is asked for; static.

    Query t stands at t + keys - queries, so that the last query stands at the last key.

    Attributes:
      queries, keys: lengths T and S.
      causal: a query sees no key after its own place.
      window: keys nearer than this are seen (a query's own is at distance 0); 0 is all. Where it is not causal, the
        window reaches as far ahead as back.
      scale: of q·k.
      softcap: c·tanh(score / c); 0 is none.
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
        """[first, end) of the keys that queries [first, end) can see; empty where the end is not after the first."""
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
        """[first, end) of the queries that can see keys [first, end)."""
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
        """Which of a tile's scores count, keys past the end left out. Arguments broadcast against each other."""
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
        """Scores of q·k in units of which exp2 is the weight: capped, and times log2(e)."""
        if self.softcap:
            return jnp.tanh(products * (self.scale / self.softcap)) * (self.softcap * LOG2_E)
        return products * (self.scale * LOG2_E)

    def slope(self, bits: Float[Array, "..."], change: Float[Array, "..."]) -> Float[Array, "..."]:
        """A change of the capped score as one of q·k·scale: times the cap's derivative, 1 - tanh²."""
        if not self.softcap:
            return change
        tanh = bits * (1 / (self.softcap * LOG2_E))
        return change * (1 - tanh * tanh)


def key_head(head: Index, group: int) -> Index:
    """Which key head a query head reads; `group` query heads read the same."""
    return _quotient(head, group)


def blocks_of(span: tuple[Index, Index], block: int) -> tuple[Index, Index]:
    """[first, end) of the blocks in which a span lies; neither is negative."""
    low, high = span
    return _quotient(low, block), _quotient(_most(high, 0) + block - 1, block)


def _quotient(value: Index, block: int) -> Index:
    """Of a value that is not negative: lax.div truncates, in one instruction."""
    return value // block if isinstance(value, int) else lax.div(value, block)


def _least(a: Index, b: Index) -> Index:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _most(a: Index, b: Index) -> Index:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
