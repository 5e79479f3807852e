"""Admission check: predicts, before any allocation, if a batch of prompts fits a device and the largest that does."""

import dataclasses
from collections.abc import Callable

from jaxllm.ledger.advice.remedies import largest_fitting
from jaxllm.ledger.rows import Ledger, format_bytes

# (number of sequences, tokens of context per sequence) -> ledger.
Bill = Callable[[int, int], Ledger]


@dataclasses.dataclass(frozen=True)
class Admission:
    """Result of an admission check: required and available bytes, and the largest batch and context that fit.

    Attributes:
      required_bytes, available_bytes: Predicted peak and available memory of one device.
      batch, context: Requested number of sequences and tokens per sequence.
      largest_batch: Number of sequences of `context` tokens that fit; 0 if none does.
      largest_context: Tokens per sequence, at most `context`, that fit for `batch` sequences; 0 if none does.
    """

    required_bytes: int
    available_bytes: int
    batch: int
    context: int
    largest_batch: int
    largest_context: int

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.available_bytes

    @property
    def margin(self) -> int:
        """Bytes to spare; negative if it does not fit."""
        return self.available_bytes - self.required_bytes

    @property
    def largest(self) -> str:
        """Names the largest batch and context that fit, for the message of a refusal."""
        best = []
        if self.largest_batch:
            best.append(f"{_count(self.largest_batch, 'sequence')} of that length")
        if self.largest_context:
            best.append(f"{_count(self.largest_context, 'token')} in each of {self.batch:,}")
        return f"the largest that fits: {', or '.join(best)}" if best else "not one token fits beside the weights"

    def __str__(self) -> str:
        """Formats one sentence: fits or not, both sizes, the margin and the largest that fits."""
        request = f"{_count(self.batch, 'sequence')} of {_count(self.context, 'token')}"
        sizes = f"{request} need {format_bytes(self.required_bytes)} of {format_bytes(self.available_bytes)}"
        if self.fits:
            return f"fits: {sizes}, {format_bytes(self.margin)} to spare; at most {self.largest_batch:,} at a time"
        return f"does not fit: {sizes}, over by {format_bytes(-self.margin)}; {self.largest}"


def check_admission(bill: Bill, batch: int, context: int, available_bytes: int) -> Admission:
    """Checks if `batch` sequences of `context` tokens fit in the available memory and finds the largest that do.

    Args:
      bill: Function that returns a ledger; its peak must not decrease as either argument grows.
      batch: Number of sequences.
      context: Tokens per sequence, prompt included.
      available_bytes: Memory of one device for weights, cache and workspace.
    """

    def fits(sequences: int, tokens: int) -> bool:
        return bill(sequences, tokens).peak_bytes <= available_bytes

    return Admission(
        required_bytes=bill(batch, context).peak_bytes,
        available_bytes=available_bytes,
        batch=batch,
        context=context,
        largest_batch=largest_fitting(lambda sequences: fits(sequences, context)),
        largest_context=largest_fitting(lambda tokens: fits(batch, tokens), at_most=context),
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
