"""Element counts of a model's arrays on one device, with the division that yields each of them.

A `Count` is an int that formats its division, `8,030,261,248 / 8`; an int computed from one no longer does.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Share:
    """A device's shard of one or more arrays.

    Attributes:
      numbers: Elements of the arrays, on all devices together.
      padding: Elements of zero padding, on all devices together.
      ways: Number of equal shards. A shard size that is not an integer is rounded down.
    """

    numbers: int
    padding: int
    ways: int

    @property
    def held(self) -> int:
        return (self.numbers + self.padding) // self.ways

    def __str__(self) -> str:
        """Formats the arithmetic: `(1,000 + 24 of padding) / 8`."""
        whole = f"({self.numbers:,} + {self.padding:,} of padding)" if self.padding else f"{self.numbers:,}"
        if self.ways == 1:
            return whole
        divides = (self.numbers + self.padding) % self.ways == 0
        return f"{whole} / {self.ways}" if divides else f"⌊{whole} / {self.ways}⌋"


class Count(int):
    """Elements on one device: the sum of its shards, at most one for each number of ways."""

    shares: tuple[Share, ...]

    def __new__(cls, shares: tuple[Share, ...]) -> "Count":
        made = super().__new__(cls, sum(share.held for share in shares))
        made.shares = shares
        return made

    def __reduce__(self) -> tuple[type["Count"], tuple[tuple[Share, ...]]]:
        return Count, (self.shares,)


def count(shares: Iterable[Share]) -> Count:
    """Sums the shards of several arrays, merging those with equally many ways; the most sharded come first."""
    summed: dict[int, tuple[int, int]] = {}
    for share in shares:
        numbers, padding = summed.get(share.ways, (0, 0))
        summed[share.ways] = numbers + share.numbers, padding + share.padding
    return Count(tuple(Share(*summed[ways], ways) for ways in sorted(summed, reverse=True)))


def without_padding(held: Count) -> Count:
    """Returns the elements that a device would store without padding, rounded down per number of ways."""
    return Count(tuple(Share(share.numbers, 0, share.ways) for share in held.shares))


def told(number: int) -> str:
    """Formats a number with thousands separators, and a `Count` with its division."""
    if not isinstance(number, Count) or not number.shares:
        return f"{int(number):,}"
    terms = [str(share) for share in number.shares]
    return terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
