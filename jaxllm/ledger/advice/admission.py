"""Admission check: predicts, before any allocation, if a batch of prompts fits a device and the largest that does."""

import dataclasses
from collections.abc import Callable

from jaxllm.ledger.rows import Ledger, format_bytes

# (number of sequences, tokens of context per sequence) -> ledger.
Bill = Callable[[int, int], Ledger]


@dataclasses.dataclass(frozen=True)
class Admission:
    """Result of an admission check: required and available bytes, and the largest batch and context that fit.

    Attributes:
      needs, has: Predicted peak and available memory, in bytes.
      batch, context: Requested number of sequences and tokens per sequence.
      largest_batch: Number of sequences of `context` tokens that fit; 0 if not one does.
      largest_context: Tokens per sequence, at most `context`, that fit for `batch` sequences; 0 if not one does.
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
        """Bytes to spare; negative if it does not fit."""
        return self.has - self.needs

    def __str__(self) -> str:
        """Formats one sentence: fits or not, both sizes, the margin and the largest that fits."""
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


def room(bill: Bill, batch: int, context: int, has: int) -> Admission:
    """Checks if `batch` sequences of `context` tokens fit in `has` bytes and finds the largest that do.

    Args:
      bill: Function that returns a ledger; its peak must not decrease as either argument grows.
      batch: Number of sequences.
      context: Tokens per sequence, prompt included.
      has: Available bytes.
    """

    def fits(sequences: int, tokens: int) -> bool:
        return bill(sequences, tokens).peak_bytes <= has

    return Admission(
        needs=bill(batch, context).peak_bytes,
        has=has,
        batch=batch,
        context=context,
        largest_batch=largest(lambda sequences: fits(sequences, context)),
        largest_context=largest(lambda tokens: fits(batch, tokens), most=context),
    )


def largest(fits: Callable[[int], bool], most: int | None = None) -> int:
    """Returns the largest positive integer, up to `most`, that fits, or 0 if 1 does not; `fits` must be monotone."""
    low, high = 0, 1  # low fits; high is the next candidate
    while fits(high) if most is None or high <= most else False:
        low, high = high, 2 * high
    high = high if most is None else min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
