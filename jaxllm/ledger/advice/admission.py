"""Whether a batch of prompts fits a device, before anything is allocated; and the largest that would."""

import dataclasses
from collections.abc import Callable

from jaxllm.ledger.rows import Ledger, format_bytes

# (sequences, tokens of context) -> the bill.
Bill = Callable[[int, int], Ledger]


@dataclasses.dataclass(frozen=True)
class Room:
    """What a device has room for.

    Attributes:
      needs, has: bytes.
      batch, context: asked for.
      largest_batch: sequences of that context that fit; 0 where not one does.
      largest_context: tokens that so many sequences may have each; 0 where not one fits.
    """

    needs: int
    has: int
    batch: int
    context: int
    largest_batch: int
    largest_context: int

    @property
    def fits(self) -> bool:
        return self.needs <= self.has

    @property
    def margin(self) -> int:
        """Bytes left over; negative where it does not fit."""
        return self.has - self.needs

    def __str__(self) -> str:
        """One sentence: yes or no, with both numbers, the margin and the largest that fits."""
        asked = f"{_count(self.batch, 'sequence')} of {_count(self.context, 'token')}"
        numbers = f"{asked} need {format_bytes(self.needs)} of {format_bytes(self.has)}"
        if self.fits:
            return f"fits: {numbers}, {format_bytes(self.margin)} to spare; at most {self.largest_batch:,} at a time"
        best = []
        if self.largest_batch:
            best.append(f"{_count(self.largest_batch, 'sequence')} of that length")
        if self.largest_context:
            best.append(f"{_count(self.largest_context, 'token')} in each of {self.batch:,}")
        largest = f"the largest that fits: {', or '.join(best)}" if best else "not one token fits beside the weights"
        return f"does not fit: {numbers}, {format_bytes(-self.margin)} too much; {largest}"


def room(bill: Bill, batch: int, context: int, has: int) -> Room:
    """Room for `batch` sequences of `context` tokens in `has` bytes.

    Args:
      bill: whose peak grows with both of its arguments.
    """

    def fits(sequences: int, tokens: int) -> bool:
        return bill(sequences, tokens).peak_bytes <= has

    return Room(
        needs=bill(batch, context).peak_bytes,
        has=has,
        batch=batch,
        context=context,
        largest_batch=largest(lambda sequences: fits(sequences, context)),
        largest_context=largest(lambda tokens: fits(batch, tokens), most=context),
    )


def largest(fits: Callable[[int], bool], most: int | None = None) -> int:
    """The largest number from 1 to `most` that fits; 0 where 1 does not. What is smaller than one that fits, fits."""
    low, high = 0, 1  # low fits; high is to be tried
    while fits(high) if most is None or high <= most else False:
        low, high = high, 2 * high
    high = high if most is None else min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
