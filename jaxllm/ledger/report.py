"""The ledger for people: tables that fit 100 columns. An unknown figure has a footnote that says why."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxllm.hardware import Device
from jaxllm.ledger.compiled import Inspection
from jaxllm.ledger.reconcile import COLUMNS, Reconciliation
from jaxllm.ledger.rows import HOST, PERSISTENT, PHASES, Ledger, Unknown, figure_from_json, format_bytes, format_si

WIDTH = 100


class _Footnotes:
    """Numbers the reasons, each once."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def mark(self, figure: Any, text: str) -> str:
        if not isinstance(figure, Unknown):
            return text
        if figure.why not in self.reasons:
            self.reasons.append(figure.why)
        return f"unknown [{self.reasons.index(figure.why) + 1}]"

    def show(self, console: Console) -> None:
        for number, reason in enumerate(self.reasons, 1):
            _say(console, f"[{number}] {reason}")


def show_bill(ledger: Ledger, device: Device, console: Console) -> None:
    """What persists, what the fullest phase adds, their sum, and whether the device holds it."""
    notes = _Footnotes()
    title = f"ledger: {ledger.task} {ledger.model}, {ledger.parameters:,} parameters, {ledger.count} × {device.name}"
    table = _table(title)
    table.add_column("memory of one device", no_wrap=True)
    table.add_column("how", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    peak = ledger.peak_phase

    def add(phase: str) -> None:
        for row in ledger.rows:
            if row.phase == phase:
                table.add_row(row.name, row.formula.rpartition(" = ")[0], format_bytes(row.bytes_per_device))
        table.add_row(f"sum: {phase}", "", format_bytes(ledger.phase_bytes(phase)), style="bold", end_section=True)

    for phase in (PERSISTENT, peak) if peak != PERSISTENT else (PERSISTENT,):
        add(phase)
    table.add_row("peak", "", format_bytes(ledger.peak_bytes), style="bold", end_section=True)
    if ledger.host_bytes:
        add(HOST)
    console.print(table, width=min(WIDTH, console.width))
    others = [phase for phase in PHASES if phase not in (PERSISTENT, peak, HOST) and ledger.phase_bytes(phase)]
    if others:
        sums = ", ".join(f"{phase} {format_bytes(ledger.phase_bytes(phase))}" for phase in others)
        _say(console, f"Phases that need less: {sums}")
    _say(console, verdict(ledger, notes))
    if ledger.compute:
        _say(console, work(ledger.compute, notes))
    notes.show(console)
    _say(console, f"Device: {device.source}")


def verdict(ledger: Ledger, notes: _Footnotes | None = None) -> str:
    """One sentence: fits or does not, with both numbers."""
    need, capacity = format_bytes(ledger.peak_bytes), ledger.capacity_bytes
    if isinstance(capacity, Unknown):
        has = (notes or _Footnotes()).mark(capacity, "")
        return f"Needs {need}; whether that fits is {has}"
    if ledger.fits:
        return f"fits: needs {need} of {format_bytes(capacity)} ({ledger.peak_bytes / max(capacity, 1):.1%})"
    over = format_bytes(ledger.peak_bytes - capacity)
    return f"does not fit: needs {need}, has {format_bytes(capacity)}; {over} too much"


def work(compute: Mapping[str, Any], notes: _Footnotes | None = None) -> str:
    """One sentence: FLOPs, bytes, and the roofline."""
    notes = notes or _Footnotes()
    seconds, bound = figure_from_json(compute["roofline_seconds"]), figure_from_json(compute["bound"])
    least = notes.mark(seconds, "") if isinstance(seconds, Unknown) else f"{format_si(seconds, 's')}, {bound} bound"
    return f"Work: {format_si(compute['flops'], 'FLOP')}, {format_si(compute['bytes'], 'B')} moved; at least {least}"


def show_reconciliation(result: Reconciliation, console: Console) -> None:
    """All columns and the gap of the formula to each."""
    notes = _Footnotes()
    table = _table("reconciliation: bytes on one device, and (formula − column) / column")
    table.add_column("", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for line in result.lines:
        cells = []
        for column in COLUMNS:
            figure = line.columns[column]
            gap = "" if column == "formula" or isinstance(line.gap(column), Unknown) else f" {line.gap(column):+.1%}"
            cells.append(notes.mark(figure, f"{format_bytes(figure)}{gap}"))
        table.add_row(line.name, *cells)
    console.print(table, width=min(WIDTH, console.width))
    notes.show(console)


def show_inspection(name: str, inspection: Inspection, ledger: Ledger, console: Console) -> None:
    """What the compiler told of a program: memory beside the formula's, collectives, and matrix products.

    Args:
      name: of the program; `prefill` and `decode` are held against the phase of that name.
    """
    notes = _Footnotes()
    need = ledger.persistent_bytes + ledger.phase_bytes(name) if name in PHASES else ledger.peak_bytes
    if inspection.refused:
        _say(console, f"{name}, compiled: does not fit. The compiler's words: {inspection.refused}")
        return
    table = _table(f"{name}, compiled in {inspection.seconds:.1f} s")
    table.add_column("", no_wrap=True)
    table.add_column("compiled", justify="right", no_wrap=True)
    table.add_column("formula", justify="right", no_wrap=True)
    for part in ("arguments", "outputs", "aliases", "temps", "host_arguments", "peak"):
        figure = inspection.figures[part]
        if part == "host_arguments" and (isinstance(figure, Unknown) or not figure):
            continue
        label = {"aliases": "− aliases", "host_arguments": "arguments in host memory"}.get(part, part)
        formula = format_bytes(need) if part == "peak" else ""
        if formula and not isinstance(figure, Unknown) and figure:
            formula += f" ({(need - figure) / figure:+.1%})"
        table.add_row(label, notes.mark(figure, format_bytes(figure)), formula)
    console.print(table, width=min(WIDTH, console.width))
    _say(console, _compiled_verdict(inspection, ledger, notes))
    _collectives(inspection, notes, console)
    _say(console, _products(inspection, notes))
    notes.show(console)


def _compiled_verdict(inspection: Inspection, ledger: Ledger, notes: _Footnotes) -> str:
    """One sentence: whether the compiled program fits."""
    peak, capacity = inspection.figures["peak"], ledger.capacity_bytes
    for figure in (peak, capacity):
        if isinstance(figure, Unknown):
            return f"Compiled: whether it fits is {notes.mark(figure, '')}"
    fits = "fits" if peak <= capacity else "does not fit"
    return f"Compiled: {fits}: needs {format_bytes(peak)} of {format_bytes(capacity)}"


def _collectives(inspection: Inspection, notes: _Footnotes, console: Console) -> None:
    found = inspection.collectives
    if isinstance(found, Unknown):
        _say(console, f"Collectives: {notes.mark(found, '')}")
        return
    if not found:
        _say(console, "No collectives.")
        return
    table = _table("collectives of one device; sent: in a ring")
    table.add_column("", no_wrap=True)
    for column in ("dtype", "devices", "runs", "operands", "results", "sent"):
        table.add_column(column, justify="left" if column == "dtype" else "right", no_wrap=True)
    for row in found:
        some = "≤" if row["conditional"] else ""
        for loop in row["unknown_loops"]:
            some = notes.mark(Unknown(f"one trip of {loop} is counted: its length is not in the program"), "") + " "
        sizes = (row[name] for name in ("operand_bytes", "result_bytes", "ring_bytes"))
        cells = (row["dtype"], str(row["devices"]), f"{some}{row['count']:,}", *map(format_bytes, sizes))
        table.add_row(row["op"], *cells)
    console.print(table, width=min(WIDTH, console.width))


def _products(inspection: Inspection, notes: _Footnotes) -> str:
    found = inspection.products
    if isinstance(found, Unknown):
        return f"Matrix products: {notes.mark(found, '')}"
    told = f"Matrix products: {format_si(found['flops'], 'FLOP')} in {found['count']:,} runs"
    if found["uncounted"]:
        told += "; not counted: " + ", ".join(f"{name} × {runs:,}" for name, runs in found["uncounted"].items())
    if found["unknown_loops"]:
        told += f"; one trip counted of {', '.join(found['unknown_loops'])}"
    return told


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, width=min(WIDTH, console.width))
