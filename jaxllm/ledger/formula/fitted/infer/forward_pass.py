"""Common types of the inference memory rules: one forward pass, and one array of a live set."""

import dataclasses
from collections.abc import Iterable

import jax

from jaxllm.config import Architecture
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.rows import Row
from jaxllm.model.specs import cache_slots, is_spec, param_specs

# Name of the row of weights sliced from their stacks before matmuls read them.
SLICED_WEIGHTS = "weights of one repeat"


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a live set, which `row` turns into a row of the bill.

    Attributes:
      name: name of its row.
      size: bytes; on a TPU, with tile padding.
      formula: arithmetic shown in its row.
      kind: kind of its row; "" is the phase's workspace.
    """

    name: str
    size: int
    formula: str
    kind: str = ""

    def row(self, phase: str) -> Row:
        return Row(self.name, self.kind or f"{phase} workspace", phase, self.size, self.formula)


def size_of(arrays: Iterable[Array]) -> int:
    """Returns the total bytes of the arrays."""
    return sum(each.size for each in arrays)


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass over `tokens` new tokens of each of `batch` sequences.

    Attributes:
      capacity: tokens per sequence.
      c: bytes per element of the compute dtype.
      platform: cpu | gpu | tpu.
      cached: True with a KV cache. Without one, the pass runs all tokens of the sequences, which attend to one another.
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
        """Bytes of one hidden state per token, for all tokens."""
        return self.count * self.model.width * self.c

    @property
    def slices_weights(self) -> bool:
        """True if accelerators slice weights from the stacks; weights of long layer patterns are read in place."""
        return len(self.model.pattern) <= 2

    @property
    def wraps(self) -> bool:
        """True if ring-buffer layers take in several tokens: they read old slots and write new ones separately."""
        rings = (self.slots(kind) < self.capacity for kind in self.model.pattern)
        return self.tokens > 1 and any(rings)

    def slots(self, kind: str) -> int:
        """Returns the cache slots per sequence of a layer of this kind; `capacity` without a cache."""
        return cache_slots(self.model, kind, self.capacity) if self.cached else self.capacity

    @property
    def keys(self) -> int:
        """Keys per query, in the kind of layer that has the most."""
        wide = [self.slots(kind) for kind in {*self.model.pattern, *self.model.tail}]
        return max(held + (self.tokens if held < self.capacity and self.tokens > 1 else 0) for held in wide)

    @property
    def scores(self) -> int:
        """Bytes of one layer's float32 scores."""
        return self.count * self.model.heads * self.keys * FLOAT32

    @property
    def keys_bytes(self) -> int:
        """Bytes of one layer's keys; its values take as many."""
        return self.batch * self.model.kv_heads * self.keys * self.model.head_dim * self.c

    @property
    def rings_bytes(self) -> int:
        """Bytes of the keys and values of all layers with a ring buffer."""
        rings = sum(held for kind in self.model.pattern if (held := self.slots(kind)) < self.capacity)
        return 2 * self.model.repeats * self.batch * self.model.kv_heads * self.model.head_dim * rings * self.c

    def weight_bytes(self, *names: str) -> int:
        """Returns the compute-dtype bytes of one repeat of the layer pattern: all weights, or the named arrays."""
        layers = param_specs(self.model)["layers" if self.model.repeats else "tail"]
        found = jax.tree_util.tree_leaves_with_path(layers, is_leaf=is_spec)
        size = sum(spec.size for path, spec in found if not names or path[-1].key in names)
        return size // max(self.model.repeats, 1) * self.c
