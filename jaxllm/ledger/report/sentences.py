"""User-facing sentences of a bill: whether it fits, and the least time of its work."""

from typing import Any

from jaxllm.ledger.rows import Ledger, Unknown, format_bytes, format_si


class Footnotes:
    """Numbered footnotes, each once: the reasons of unknown figures, and arithmetic too long for its column."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, figure: Any, text: str) -> str:
        """Returns `text`, or `unknown` with the number of its reason if the figure is unknown."""
        if not isinstance(figure, Unknown):
            return text
        return f"unknown {self.number(figure.why)}"

    def number(self, text: str) -> str:
        """Adds a footnote and returns its number in brackets."""
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"


def _format_figure(notes: Footnotes | None, figure: Unknown) -> str:
    return notes.mark(figure, "") if notes else f"unknown: {figure.why}"


def verdict(ledger: Ledger, notes: Footnotes | None = None, reserved_bytes: int = 0) -> str:
    """Returns a sentence that says whether the bill fits, with peak, capacity, and the bytes free or missing.

    Args:
      notes: collects the reason of an unknown capacity; without it the reason is in the sentence.
      reserved_bytes: bytes of device memory that the backend reserves (`hardware.spec.Device.reserved_bytes`).
    """
    need, capacity = format_bytes(ledger.peak_bytes), ledger.capacity_bytes
    if isinstance(capacity, Unknown):
        return f"Needs {need}; whether that fits is {_format_figure(notes, capacity)}"
    kept = f"; {format_bytes(reserved_bytes)} more is reserved by the backend" if reserved_bytes else ""
    if ledger.fits:
        share = f"{ledger.peak_bytes / max(capacity, 1):.1%}"
        free = format_bytes(capacity - ledger.peak_bytes)
        return f"fits: needs {need} of {format_bytes(capacity)} ({share}); {free} free{kept}"
    over = format_bytes(ledger.peak_bytes - capacity)
    return f"does not fit: needs {need}, has {format_bytes(capacity)}; {over} over{kept}"


def parameters_text(ledger: Ledger) -> str:
    """Returns the number of parameters as text, with the number of trained ones if not all are."""
    if ledger.trained in (None, ledger.parameters):
        return f"{ledger.parameters:,} parameters"
    return f"{ledger.parameters:,} parameters ({ledger.trained:,} trained)"


def work(ledger: Ledger, notes: Footnotes | None = None) -> str:
    """Returns a sentence with the FLOPs and bytes of a step or token, the least time that they take, and its bound."""
    compute = ledger.compute
    assert compute is not None, "a bill of memory alone"
    seconds = compute.seconds
    if isinstance(seconds, Unknown):
        least = f"the least time is {_format_figure(notes, seconds)}"
    else:
        least = f"at least {format_si(seconds, 's')}, {compute.bound} bound"
    return f"Work: {format_si(compute.work.flops, 'FLOP')}, {format_si(compute.work.bytes, 'B')} moved; {least}"


def largest_first(ledger: Ledger) -> str:
    """Returns a sentence with the largest rows, which to reduce first, and their percentages of the peak."""
    parts = (
        f"{row.name} {format_bytes(row.bytes_per_device)} ({row.bytes_per_device / ledger.peak_bytes:.0%})"
        for row in ledger.largest_rows(3)
    )
    return f"Largest first: {'; '.join(parts)}"
