"""Common types of the inference memory rules: one forward pass, and one array of a live set."""

import dataclasses
from collections.abc import Iterable

from jaxllm.config import Architecture
from jaxllm.config import experts as experts_choice
from jaxllm.ledger.formula.exact.block_graph import rows_of_experts
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.rows import Row
from jaxllm.model.specs import cache_slots, leaves, param_specs


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
      cached: True with a KV cache. Without one, the pass runs all tokens of the sequences, which attend to one another.
    """

    model: Architecture
    batch: int
    capacity: int
    tokens: int
    c: int
    cached: bool

    @property
    def count(self) -> int:
        return self.batch * self.tokens

    @property
    def hidden(self) -> int:
        """Bytes of one hidden state per token, for all tokens."""
        return self.count * self.model.width * self.c

    def slots(self, kind: str) -> int:
        """Returns the cache slots per sequence of a layer of this kind; `capacity` without a cache."""
        return cache_slots(self.model, kind, self.capacity) if self.cached else self.capacity

    @property
    def key_counts(self) -> list[int]:
        """Keys per query in each kind of layer, without repetition, the most first."""
        held = {self.slots(kind) for kind in {*self.model.pattern, *self.model.tail}}
        extra = self.tokens if self.tokens > 1 else 0  # a ring buffer's old slots and the new tokens
        return sorted((slots + (extra if slots < self.capacity else 0) for slots in held), reverse=True)

    @property
    def keys(self) -> int:
        """Keys per query, in the kind of layer that has the most."""
        return self.key_counts[0]

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


def largest_matrix(model: Architecture) -> int:
    """Returns the elements of the largest matrix of a layer, fused as in `decode.weights`."""
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    return model.width * max(heads, (2 if model.gated else 1) * model.mlp_width * max(model.experts, 1))


def experts_elements(one: Pass) -> int:
    """Returns the elements of the temporaries of one layer's experts.

    In blocks of tokens, they include the sliced matrix of one expert.
    """
    model = one.model
    rows, terms = one.count * model.experts_per_token, 3 if model.gated else 2
    method = experts_choice.method(one.count, model.experts_per_token, model.experts)
    if method != experts_choice.BLOCKS:
        rows = rows if method == experts_choice.CHOSEN else one.count * model.experts
        return rows * (terms * model.mlp_width + model.width)
    slots, into = rows_of_experts(rows, model.experts), (terms - 1) * model.mlp_width
    return slots * max(model.width + into, into + model.mlp_width) + into * model.width


def matrix_elements(model: Architecture, head: bool) -> int:
    """Returns the elements of all weights that the layers' matmuls read, and with `head` of the output head."""
    specs = param_specs(model)
    groups = ["layers", "tail"]
    if head:
        groups.append("embed" if model.tied_embeddings else "head")
    return sum(spec.size for group in groups for spec in leaves(specs[group]))
