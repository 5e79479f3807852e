"""Terminal output of the ledger: tables of at most 100 columns.

Footnotes give the reasons of unknown figures, and the arithmetic that would wrap in its column.
"""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxllm.hardware.detect import Device
from jaxllm.ledger.compiled.inspection import Inspection
from jaxllm.ledger.reconcile import COLUMNS, Reconciliation
from jaxllm.ledger.report import comparison
from jaxllm.ledger.report.sentences import Footnotes, largest_first, parameters_text, verdict, work
from jaxllm.ledger.rows import HOST, PERSISTENT, PHASES, Ledger, Unknown, format_bytes, format_si

WIDTH = 100
_BYTES_WIDTH, _PERCENT_WIDTH, _GAP = len("1,023.99 MiB"), len("100"), 2


def show_bill(ledger: Ledger, device: Device, console: Console) -> None:
    """Prints the persistent rows, the rows of the peak phase, their sum, and whether it fits the device."""
    notes = Footnotes()
    title = f"ledger: {ledger.task} {ledger.model}, {parameters_text(ledger)}, {ledger.count} × {device.name}"
    table = _table()
    peak = ledger.peak_phase
    names = max(len(name) for name in (*(row.name for row in ledger.rows), f"sum: {PERSISTENT}", f"sum: {peak}"))
    space = min(WIDTH, console.width) - names - _BYTES_WIDTH - _PERCENT_WIDTH - 3 * _GAP
    table.add_column("memory of one device", no_wrap=True, min_width=names)
    table.add_column("how", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True, min_width=_BYTES_WIDTH)
    table.add_column("%", justify="right", no_wrap=True, min_width=_PERCENT_WIDTH)

    def share(size: int, phase: str) -> str:
        return "" if phase == HOST or not ledger.peak_bytes else f"{100 * size / ledger.peak_bytes:.0f}"

    def add(phase: str) -> None:
        for row in ledger.rows:
            if row.phase == phase:
                size = row.bytes_per_device
                how = row.derivation if len(row.derivation) <= space else notes.number(row.derivation)
                table.add_row(row.name, Text(how), format_bytes(size), share(size, phase))
        total = ledger.phase_bytes(phase)
        cells = (f"sum: {phase}", "", format_bytes(total), share(total, phase))
        table.add_row(*cells, style="bold", end_section=True)

    for phase in (PERSISTENT, peak) if peak != PERSISTENT else (PERSISTENT,):
        add(phase)
    table.add_row("peak", "", format_bytes(ledger.peak_bytes), "", style="bold", end_section=True)
    if ledger.host_bytes:
        add(HOST)
    _show(console, title, table)
    _say(console, largest_first(ledger))
    others = [phase for phase in PHASES if phase not in (PERSISTENT, peak, HOST) and ledger.phase_bytes(phase)]
    if others:
        sums = ", ".join(f"{phase} {format_bytes(ledger.phase_bytes(phase))}" for phase in others)
        _say(console, f"Phases that need less: {sums}")
    _say(console, verdict(ledger, notes, device.reserved_bytes))
    if ledger.compute is not None:
        _say(console, work(ledger, notes))
    if ledger.attention:
        _say(console, ledger.attention)
    _footnotes(console, notes)
    _say(console, f"Device: {device.source}")


def show_comparison(train: Ledger, infer: Ledger, console: Console) -> None:
    """Prints memory and work of training and inference side by side."""
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("training", justify="right", overflow="fold")
    table.add_column("inference", justify="right", overflow="fold")
    for line in comparison.lines(train, infer):
        table.add_row(line.name, line.train, line.infer, style="bold" if line.name in ("peak", "fits") else "")
    _show(console, f"training beside inference: {train.model}, memory of one device where it is fullest", table)


def show_reconciliation(result: Reconciliation, console: Console) -> None:
    """Prints all columns of a reconciliation and the relative gap of the formula to each."""
    notes = Footnotes()
    table = _table()
    table.add_column("", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for figure in result.figures:
        cells = []
        for column in COLUMNS:
            value, gap = figure.columns[column], figure.gap(column)
            shown_gap = "" if column == "formula" or isinstance(gap, Unknown) else f" {gap:+.1%}"
            cells.append(notes.mark(value, f"{format_bytes(value)}{shown_gap}"))
        table.add_row(figure.name, *cells)
    _show(console, "reconciliation: bytes on one device, and (formula − column) / column", table)
    _footnotes(console, notes)


def show_inspection(name: str, inspection: Inspection, ledger: Ledger, console: Console) -> None:
    """Prints what the compiler reports of a program: memory beside the formula's, collectives, and matmuls.

    Args:
      name: name of the program; `prefill` and `decode` are compared with the phase of that name.
    """
    notes = Footnotes()
    need = ledger.persistent_bytes + ledger.phase_bytes(name) if name in PHASES else ledger.peak_bytes
    if inspection.oom_message:
        _say(console, f"{name}, compiled: does not fit. Compiler: {inspection.oom_message}")
        return
    table = _table()
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
    _show(console, f"{name}, compiled in {inspection.seconds:.1f} s", table)
    _say(console, _compiled_verdict(inspection, ledger, notes))
    _collectives(inspection, notes, console)
    _say(console, _matmul_line(inspection, notes))
    _footnotes(console, notes)


def _compiled_verdict(inspection: Inspection, ledger: Ledger, notes: Footnotes) -> str:
    """Returns a sentence that says whether the compiled program fits."""
    peak, capacity = inspection.figures["peak"], ledger.capacity_bytes
    for figure in (peak, capacity):
        if isinstance(figure, Unknown):
            return f"Compiled: whether it fits is {notes.mark(figure, '')}"
    fits = "fits" if peak <= capacity else "does not fit"
    return f"Compiled: {fits}: needs {format_bytes(peak)} of {format_bytes(capacity)}"


def _collectives(inspection: Inspection, notes: Footnotes, console: Console) -> None:
    found = inspection.collectives
    if isinstance(found, Unknown):
        _say(console, f"Collectives: {notes.mark(found, '')}")
        return
    if not found:
        _say(console, "No collectives.")
        return
    table = _table()
    table.add_column("", no_wrap=True)
    for column in ("dtype", "devices", "runs", "operands", "results", "sent"):
        table.add_column(column, justify="left" if column == "dtype" else "right", no_wrap=True)
    for row in found:
        some = "≤" if row["conditional"] else ""
        for loop in row["unknown_loops"]:
            some = notes.number(f"{loop} is counted as one iteration: its trip count is not in the program") + " "
        sizes = (row[name] for name in ("operand_bytes", "result_bytes", "ring_bytes"))
        cells = (row["dtype"], str(row["devices"]), f"{some}{row['count']:,}", *map(format_bytes, sizes))
        table.add_row(row["op"], *cells)
    _show(console, "collectives of one device; sent: in a ring", table)


def _matmul_line(inspection: Inspection, notes: Footnotes) -> str:
    found = inspection.matmul_counts
    if isinstance(found, Unknown):
        return f"Matmuls: {notes.mark(found, '')}"
    sentence = f"Matmuls: {format_si(found['flops'], 'FLOP')} in {found['count']:,} runs"
    if found["uncounted"]:
        sentence += "; not counted: " + ", ".join(f"{name} × {runs:,}" for name, runs in found["uncounted"].items())
    if found["unknown_loops"]:
        sentence += f"; counted as one iteration: {', '.join(found['unknown_loops'])}"
    return sentence


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.padding = (0, 1, 0, 0)
    return table


def _show(console: Console, title: str, table: Table) -> None:
    console.print(Text(title, style="italic"), width=min(WIDTH, console.width))
    console.print(table, width=min(WIDTH, console.width))


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, width=min(WIDTH, console.width))


def _footnotes(console: Console, notes: Footnotes) -> None:
    for number, reason in enumerate(notes.texts, 1):
        _say(console, f"[{number}] {reason}")
