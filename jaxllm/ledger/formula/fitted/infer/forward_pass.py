"""One run of the model while it samples, and arrays of a moment of it: what all rules of workspaces are made of."""

import dataclasses
from collections.abc import Iterable

import jax

from jaxllm.config import Architecture
from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.rows import Row
from jaxllm.model.specs import cache_slots, is_spec, param_specs

# The row of what is cut out of the stacks of weights before products read it.
CUT = "weights of one repeat"


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of one moment.

    Attributes:
      size: bytes; on a TPU, in tiles.
      formula: of its row.
      kind: of its row; "" is the phase's workspace.
    """

    name: str
    size: int
    formula: str
    kind: str = ""

    def row(self, phase: str) -> Row:
        return rows.row(self.name, self.kind or f"{phase} workspace", phase, self.formula, self.size)


def size_of(arrays: Iterable[Array]) -> int:
    """Bytes of all of them."""
    return sum(each.size for each in arrays)


@dataclasses.dataclass(frozen=True)
class Pass:
    """One run of the model over `tokens` new tokens of each of `batch` sequences.

    Attributes:
      c: bytes of a number that computes.
      cached: whether there is a cache; else all tokens of the sequences are run, and attend to one another.
    """

    model: Architecture
    batch: int
    capacity: int
    tokens: int
    c: int
    platform: str
    cached: bool

    @property
    def count(self) -> int:
        return self.batch * self.tokens

    @property
    def hidden(self) -> int:
        """Bytes of one hidden state of each token."""
        return self.count * self.model.width * self.c

    @property
    def cuts(self) -> bool:
        """Whether accelerators cut weights out of the stacks: long patterns of layers are read where they lie."""
        return len(self.model.pattern) <= 2

    @property
    def wraps(self) -> bool:
        """Whether layers with a ring take several tokens in: they read the old slots and write the new ones apart."""
        rings = (self.slots(kind) < self.capacity for kind in self.model.pattern)
        return self.tokens > 1 and any(rings)

    def slots(self, kind: str) -> int:
        """Of the cache of a layer of this kind; without a cache, all tokens."""
        return cache_slots(self.model, kind, self.capacity) if self.cached else self.capacity

    @property
    def keys(self) -> int:
        """Keys that a query is scored against, in the kind of layer that has most."""
        wide = [self.slots(kind) for kind in {*self.model.pattern, *self.model.tail}]
        return max(held + (self.tokens if held < self.capacity and self.tokens > 1 else 0) for held in wide)

    @property
    def scores(self) -> int:
        """Bytes of one layer's scores, float32."""
        return self.count * self.model.heads * self.keys * FLOAT32

    @property
    def keys_bytes(self) -> int:
        """Of one layer's keys; its values are as many."""
        return self.batch * self.model.kv_heads * self.keys * self.model.head_dim * self.c

    @property
    def rings_bytes(self) -> int:
        """Of the keys and values of all layers that have a ring."""
        rings = sum(held for kind in self.model.pattern if (held := self.slots(kind)) < self.capacity)
        return 2 * self.model.repeats * self.batch * self.model.kv_heads * self.model.head_dim * rings * self.c

    def weight_bytes(self, *names: str) -> int:
        """Of the weights of one repeat of the layer pattern, or of those arrays of it."""
        layers = param_specs(self.model)["layers" if self.model.repeats else "tail"]
        found = jax.tree_util.tree_leaves_with_path(layers, is_leaf=is_spec)
        size = sum(spec.size for path, spec in found if not names or path[-1].key in names)
        return size // max(self.model.repeats, 1) * self.c
