"""Comparison of training and inference of one model on one kind of device: memory, fit and work."""

import dataclasses

from jaxllm.ledger.report import groups as view
from jaxllm.ledger.rows import PERSISTENT, Ledger, Unknown, format_bytes, format_si

DIRECTIONS = {"train": "forward and backward", "infer": "forward only"}
_UNITS = {"train": "a step", "infer": "a token of each sequence"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One quantity of both tasks, as text; "–" if a task has none of it."""

    name: str
    train: str
    infer: str


def lines(train: Ledger, infer: Ledger) -> tuple[Line, ...]:
    """Returns the comparison table: memory at each peak by group, whether it fits, and the work."""
    both = (train, infer)
    held = [view.at_peak(ledger) for ledger in both]

    def line(name: str, texts: list[str]) -> Line:
        return Line(name, *texts)

    made = [line("direction", [DIRECTIONS[ledger.task] for ledger in both])]
    made.append(line("devices", [f"{ledger.count} × {ledger.device}" for ledger in both]))
    for group in view.GROUPS:
        if any(group in groups for groups in held):
            made.append(line(group, [format_bytes(groups[group]) if group in groups else "–" for groups in held]))
    made.append(line("peak", [format_bytes(ledger.peak_bytes) for ledger in both]))
    made.append(line("fullest", [_fullest(ledger) for ledger in both]))
    made.append(line("fits", [_fits(ledger) for ledger in both]))
    steps = [ledger.compute for ledger in both if ledger.compute is not None]
    assert len(steps) == 2, "bills of memory alone cannot be compared"
    flops = [format_si(step.work.flops, "FLOP") for step in steps]
    made.append(line("FLOPs", [f"{count} {_UNITS[ledger.task]}" for count, ledger in zip(flops, both, strict=True)]))
    made.append(line("bytes moved", [format_si(step.work.bytes, "B") for step in steps]))
    made.append(line("at least", [format_si(step.seconds, "s") for step in steps]))
    made.append(line("bottleneck", [str(step.bound) for step in steps]))
    return tuple(made)


def _fullest(ledger: Ledger) -> str:
    return "always" if ledger.peak_phase == PERSISTENT else ledger.peak_phase


def _fits(ledger: Ledger) -> str:
    capacity = ledger.capacity_bytes
    if isinstance(capacity, Unknown):
        return "unknown"
    return f"{'yes' if ledger.fits else 'no'}, {ledger.peak_bytes / max(capacity, 1):.0%} of {format_bytes(capacity)}"
