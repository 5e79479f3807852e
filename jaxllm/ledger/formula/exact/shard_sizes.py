"""How many numbers a device holds of a model's arrays, and the division that makes it so many.

A count is an int that can tell its division, `8,030,261,248 / 8`; what is computed from one is an int that cannot.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Share:
    """A device's part of arrays.

    Attributes:
      numbers: of the arrays, on all devices together.
      padding: zeros beside them.
      ways: into how many equal parts they are split. Of parts that are not whole numbers, the whole is counted.
    """

    numbers: int
    padding: int
    ways: int

    @property
    def held(self) -> int:
        return (self.numbers + self.padding) // self.ways

    def __str__(self) -> str:
        """The arithmetic: `(1,000 + 24 of padding) / 8`."""
        whole = f"({self.numbers:,} + {self.padding:,} of padding)" if self.padding else f"{self.numbers:,}"
        if self.ways == 1:
            return whole
        divides = (self.numbers + self.padding) % self.ways == 0
        return f"{whole} / {self.ways}" if divides else f"⌊{whole} / {self.ways}⌋"


class Count(int):
    """Numbers on one device: the sum of its shares, of which no two are split alike."""

    shares: tuple[Share, ...]

    def __new__(cls, shares: tuple[Share, ...]) -> "Count":
        made = super().__new__(cls, sum(share.held for share in shares))
        made.shares = shares
        return made

    def __reduce__(self) -> tuple[type["Count"], tuple[tuple[Share, ...]]]:
        return Count, (self.shares,)


def count(shares: Iterable[Share]) -> Count:
    """Of arrays one by one: those that are split into as many parts are put together, the most split first."""
    summed: dict[int, tuple[int, int]] = {}
    for share in shares:
        numbers, padding = summed.get(share.ways, (0, 0))
        summed[share.ways] = numbers + share.numbers, padding + share.padding
    return Count(tuple(Share(*summed[ways], ways) for ways in sorted(summed, reverse=True)))


def without_padding(held: Count) -> Count:
    """What a device would hold if nothing were padded: of parts that are not whole numbers, the whole."""
    return Count(tuple(Share(share.numbers, 0, share.ways) for share in held.shares))


def told(number: int) -> str:
    """With thousands apart, and with its division where it is a Count."""
    if not isinstance(number, Count) or not number.shares:
        return f"{int(number):,}"
    terms = [str(share) for share in number.shares]
    return terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
