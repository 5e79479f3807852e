"""Element counts of a model's arrays on one device, with the division that yields each of them.

A `Count` is an int that formats its division, `8,030,261,248 / 8`; an int computed from one no longer does.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Shard:
    """A device's shard of one or more arrays.

    Attributes:
      elements: Elements of the arrays, on all devices together.
      padding: Elements of zero padding, on all devices together.
      num_shards: Number of equal shards. A shard size that is not an integer is rounded down.
    """

    elements: int
    padding: int
    num_shards: int

    @property
    def elements_per_device(self) -> int:
        return (self.elements + self.padding) // self.num_shards

    def __str__(self) -> str:
        """Formats the arithmetic: `(1,000 + 24 of padding) / 8`."""
        whole = f"({self.elements:,} + {self.padding:,} of padding)" if self.padding else f"{self.elements:,}"
        if self.num_shards == 1:
            return whole
        divides = (self.elements + self.padding) % self.num_shards == 0
        return f"{whole} / {self.num_shards}" if divides else f"⌊{whole} / {self.num_shards}⌋"


class Count(int):
    """Elements on one device: the sum of its shards, at most one for each number of shards."""

    shards: tuple[Shard, ...]

    def __new__(cls, shards: tuple[Shard, ...]) -> "Count":
        made = super().__new__(cls, sum(shard.elements_per_device for shard in shards))
        made.shards = shards
        return made

    def __reduce__(self) -> tuple[type["Count"], tuple[tuple[Shard, ...]]]:
        return Count, (self.shards,)


def count(shards: Iterable[Shard]) -> Count:
    """Sums the shards of several arrays, merging those with equally many shards; the most sharded come first."""
    summed: dict[int, tuple[int, int]] = {}
    for shard in shards:
        elements, padding = summed.get(shard.num_shards, (0, 0))
        summed[shard.num_shards] = elements + shard.elements, padding + shard.padding
    return Count(tuple(Shard(*summed[num_shards], num_shards) for num_shards in sorted(summed, reverse=True)))


def without_padding(elements_per_device: Count) -> Count:
    """Returns the elements that a device would store without padding, rounded down per number of shards."""
    return Count(tuple(Shard(shard.elements, 0, shard.num_shards) for shard in elements_per_device.shards))


def format_count(number: int) -> str:
    """Formats a number with thousands separators, and a `Count` with its division."""
    if not isinstance(number, Count) or not number.shards:
        return f"{int(number):,}"
    terms = [str(shard) for shard in number.shards]
    return terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
