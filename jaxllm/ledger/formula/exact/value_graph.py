"""Graph of a block's values: what the backward pass reads, saves and recomputes under a remat policy."""

import dataclasses
import functools
from collections.abc import Mapping

from jaxllm.config.remat import TAGS

BLOCK_INPUT = "block_input"


@dataclasses.dataclass(frozen=True)
class Value:
    """One value of a block, on one device, for one micro-batch.

    Attributes:
      inputs: Names of the values that it is computed from, weights not included.
      flops: FLOPs of the forward matmuls that compute it.
      bytes: Size in bytes.
      tag: Checkpoint tag under which a policy can save it; "" if there is none.
      moved: Elements gathered or reduced by the collective over `tensor` that produces it.
      frozen: FLOPs, among `flops`, of matmuls with weights that have no gradient.
    """

    inputs: tuple[str, ...]
    flops: int = 0
    bytes: int = 0
    tag: str = ""
    moved: int = 0
    frozen: int = 0


@dataclasses.dataclass(frozen=True)
class Block:
    """The values of a transformer block, by name, and those that its backward pass reads.

    Attributes:
      values: Name -> value.
      read: Names of the values that the backward pass reads.
      attention: whole | chunked | pallas | cudnn. Chunked attention processes queries in chunks, and recomputes the
        scores of each chunk for the chunk's gradients (Rabe & Staats 2021).
    """

    values: Mapping[str, Value]
    read: tuple[str, ...]
    attention: str

    def kept(self, tags: tuple[str, ...]) -> dict[str, int]:
        """Returns tag -> bytes of saved activations, without the block's input."""
        found: dict[str, int] = {}
        for name in self._needed(tags)[0]:
            value = self.values[name]
            found[value.tag] = found.get(value.tag, 0) + value.bytes
        return {tag: found[tag] for tag in TAGS if tag in found}

    def recomputed(self, tags: tuple[str, ...]) -> dict[str, Value]:
        """Returns the values that the backward pass recomputes when these tags are saved."""
        return {name: self.values[name] for name in self._needed(tags)[1] if name != BLOCK_INPUT}

    def saves_input(self, tags: tuple[str, ...]) -> bool:
        """Returns whether the backward pass reads the block's input when these tags are saved."""
        return BLOCK_INPUT in self._needed(tags)[1]

    def recompute_flops(self, tags: tuple[str, ...]) -> int:
        """Returns the FLOPs of the matmuls that recompute values when these tags are saved."""
        again = self.recomputed(tags)
        flops = sum(value.flops for value in again.values())
        # Each chunk recomputes its scores once more; those counted above are for the unsaved context.
        if self.attention == "chunked" and "attn_scores" in again and "attn_context" in again:
            flops += again["attn_scores"].flops
        return flops

    @property
    def score_recompute_flops(self) -> int:
        """FLOPs that the backward pass of an attention kernel has beyond two matmuls per forward matmul.

        They recompute scores and gradients of probabilities. The kernel's forward pass has two matmuls.
        """
        more = {"pallas": 3, "cudnn": 1}.get(self.attention, 0)
        return more * self.values["attn_kernel"].flops // 2 if more else 0

    @functools.cached_property
    def _found(self) -> dict[tuple[str, ...], tuple[list[str], list[str]]]:
        """Cache of `_needed`: tags -> its result."""
        return {}

    def _needed(self, tags: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """Returns (names of values saved, names of values recomputed) when these tags are saved."""
        if tags not in self._found:
            self._found[tags] = self._search(tags)
        return self._found[tags]

    def _search(self, tags: tuple[str, ...]) -> tuple[list[str], list[str]]:
        kept: list[str] = []
        made: list[str] = []
        waiting = list(self.read)
        while waiting:
            name = waiting.pop()
            if name in kept or name in made:
                continue
            if name == BLOCK_INPUT:  # untagged: saved whenever it, or a value computed from it, is read
                made.append(name)
                continue
            if self.values[name].tag in tags:
                kept.append(name)
            else:
                made.append(name)
                waiting += self.values[name].inputs
        return kept, made

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass."""
        return sum(value.flops for value in self.values.values())

    @property
    def frozen_flops(self) -> int:
        """FLOPs of the forward pass in matmuls with frozen weights."""
        return sum(value.frozen for value in self.values.values())
