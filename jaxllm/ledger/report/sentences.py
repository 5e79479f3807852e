"""Sentences of a bill for people: whether it fits, and how long its work takes at least."""

from collections.abc import Mapping
from typing import Any

from jaxllm.ledger.rows import PERSISTENT, Ledger, Row, Unknown, figure_from_json, format_bytes, format_si


class Footnotes:
    """Numbers the reasons of unknown figures, each once."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def mark(self, figure: Any, text: str) -> str:
        """The text of a figure, or `unknown` with the number of its reason."""
        if not isinstance(figure, Unknown):
            return text
        if figure.why not in self.reasons:
            self.reasons.append(figure.why)
        return f"unknown [{self.reasons.index(figure.why) + 1}]"


def _told(notes: Footnotes | None, figure: Unknown) -> str:
    return notes.mark(figure, "") if notes else f"unknown: {figure.why}"


def verdict(ledger: Ledger, notes: Footnotes | None = None, held_back: int = 0) -> str:
    """One sentence: fits or does not, with peak, capacity and what is left or lacking.

    Args:
      notes: where to put the reason of an unknown capacity; without them it stands in the sentence.
      held_back: bytes of the device's memory that its backend keeps from programs (`hardware.spec.Device.held_back`).
    """
    need, capacity = format_bytes(ledger.peak_bytes), ledger.capacity_bytes
    if isinstance(capacity, Unknown):
        return f"Needs {need}; whether that fits is {_told(notes, capacity)}"
    kept = f"; {format_bytes(held_back)} more is held back by the backend" if held_back else ""
    if ledger.fits:
        share = f"{ledger.peak_bytes / max(capacity, 1):.1%}"
        free = format_bytes(capacity - ledger.peak_bytes)
        return f"fits: needs {need} of {format_bytes(capacity)} ({share}); {free} free{kept}"
    over = format_bytes(ledger.peak_bytes - capacity)
    return f"does not fit: needs {need}, has {format_bytes(capacity)}; {over} too much{kept}"


def told_parameters(ledger: Ledger) -> str:
    """How many there are, and how many of them are trained where that is not all."""
    if ledger.trained in (None, ledger.parameters):
        return f"{ledger.parameters:,} parameters"
    return f"{ledger.parameters:,} parameters ({ledger.trained:,} trained)"


def work(compute: Mapping[str, Any], notes: Footnotes | None = None) -> str:
    """One sentence: FLOPs, bytes, and the roofline."""
    seconds, bound = figure_from_json(compute["roofline_seconds"]), figure_from_json(compute["bound"])
    if isinstance(seconds, Unknown):
        least = f"the least time is {_told(notes, seconds)}"
    else:
        least = f"at least {format_si(seconds, 's')}, {bound} bound"
    return f"Work: {format_si(compute['flops'], 'FLOP')}, {format_si(compute['bytes'], 'B')} moved; {least}"


def largest(ledger: Ledger, count: int = 3) -> tuple[Row, ...]:
    """The rows that make most of the peak, the largest first."""
    phases = {PERSISTENT, ledger.peak_phase}
    there = [row for row in ledger.rows if row.phase in phases and row.bytes_per_device]
    return tuple(sorted(there, key=lambda row: -row.bytes_per_device)[:count])


def largest_first(ledger: Ledger) -> str:
    """One sentence: the rows to lessen first, with their shares of the peak."""
    told = (
        f"{row.name} {format_bytes(row.bytes_per_device)} ({row.bytes_per_device / ledger.peak_bytes:.0%})"
        for row in largest(ledger)
    )
    return f"Largest first: {'; '.join(told)}"
