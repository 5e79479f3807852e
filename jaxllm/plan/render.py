"""Terminal output of a plan: tables of at most 100 columns, a summary of the search, and the commands to run."""

import shlex
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from jaxllm.hardware.detect import Device
from jaxllm.ledger.rows import HOST, PERSISTENT, Ledger, format_bytes, format_si
from jaxllm.plan import inference, training
from jaxllm.plan.confirm import Confirmation
from jaxllm.plan.remedies import Remedy

WIDTH = 100
_LARGEST = 5  # rows listed if nothing fits


def show_training(
    found: training.Search, confirmation: Confirmation[training.Verdict], top: int, console: Console
) -> None:
    """Prints the best candidates of a search over training runs, best first.

    Args:
      found: the search.
      confirmation: XLA's peaks of the compiled candidates, and the candidates that it rejected.
      top: maximum number of candidates to print.
    """
    base, best = found.space.base, confirmation.remaining(found.fitting)
    tokens = base.train.batch_size * base.data.sequence_length
    title = f"plan: train {base.model.name} on {found.space.count} × {found.device.name}, {tokens:,} tokens a step"
    table = _table(title)
    compiled = {verdict.choice: peak for verdict, peak in confirmation.compiled}
    shown = best[:top]
    offloads = any(verdict.choice.offload != "none" for verdict in shown)
    letters = _letters([verdict.choice.remat for verdict in shown])
    # The offload column is omitted if no candidate offloads; the chunks column if the others need its width.
    chunks = not (compiled and offloads)
    left = ["mesh", "ZeRO", "remat", "rows", *(["chunks"] if chunks else []), *(["offload"] if offloads else [])]
    right = ["peak", *(["compiled"] if compiled else []), "step ≥", "tokens/s"]
    table.add_column("", justify="right", no_wrap=True)
    for column in left:
        table.add_column(column, no_wrap=True)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound", overflow="fold")
    for number, verdict in enumerate(shown, 1):
        choice = verdict.choice
        rows = base.train.batch_size // (choice.accumulate * choice.replica * choice.data)
        peak = compiled.get(choice)
        cells = {
            "mesh": f"{choice.replica}×{choice.data}×{choice.tensor}",
            "ZeRO": str(choice.zero),
            "remat": letters.get(choice.remat, choice.remat),
            "rows": f"{rows}×{choice.accumulate}",
            "chunks": f"{choice.attention_chunk or 'all'}/{choice.loss_chunk}",
            "offload": choice.offload,
            "peak": format_bytes(verdict.peak_bytes),
            "compiled": "" if peak is None else format_bytes(peak),
            "step ≥": format_si(verdict.seconds, "s") + ("*" if verdict.unknown else ""),
            "tokens/s": _rate(tokens / verdict.seconds),
        }
        style = "bold" if number == 1 else None
        table.add_row(str(number), *(cells[name] for name in (*left, *right)), verdict.bound, style=style)
    if best:
        console.print(table, width=min(WIDTH, console.width))
        for policy, letter in letters.items():
            _say(console, f"{letter}: {policy.partition(':')[2]}")
        _say(console, "mesh: replica × data × tensor; rows: sequences of a micro-batch on a device × micro-batches")
        if chunks:
            _say(console, "chunks: queries whose scores exist at one time / tokens whose logits do")
        _say(console, "tokens/s: of all devices, at most; offload: what the optimizer keeps in host memory")
        _dtypes(shown, console)
        for why in dict.fromkeys(verdict.unknown for verdict in shown if verdict.unknown):
            _say(console, f"* without a rate that is not there: {why}")
    for verdict, why in confirmation.dropped:
        _say(console, f"dropped: {verdict.choice.summary}: {why}")


def _rate(tokens: float) -> str:
    return format_si(tokens, "").strip() if tokens >= 1 else f"{tokens:.3g}"


def _letters(policies: Sequence[str]) -> dict[str, str]:
    """Returns a short name for the table, such as `names a`, for each policy that lists tags."""
    long = [policy for policy in dict.fromkeys(policies) if ":" in policy]
    return {
        policy: f"{policy.partition(':')[0]} {letter}" for policy, letter in zip(long, "abcdefghijklm", strict=False)
    }


def _dtypes(shown: Sequence[training.Verdict], console: Console) -> None:
    """Prints the precision and moment dtype of the candidates, on one line if all agree."""
    told = [f"{verdict.choice.precision}, moments {verdict.choice.moment_dtype}" for verdict in shown]
    if len(set(told)) == 1:
        _say(console, f"precision: {told[0]}")
    else:
        _say(console, "precision: " + "; ".join(f"{number} {each}" for number, each in enumerate(told, 1)))


def show_inference(
    found: inference.Search, confirmation: Confirmation[inference.Verdict], top: int, console: Console
) -> None:
    """Prints the best candidates of a search over sampling setups, best first. Arguments as in `show_training`."""
    table = _table(f"plan: sample from {found.name} on {found.device.name}")
    best = confirmation.remaining(found.fitting)[:top]
    compiled = {verdict.choice: peak for verdict, peak in confirmation.compiled}
    columns = ["", "weights", "cache", "sequences", "context", "peak", *(["compiled"] if compiled else [])]
    for column in (*columns, "tokens/s ≤", "each", "prompts ≥"):
        table.add_column(column, justify="left" if column in ("weights", "cache") else "right", no_wrap=True)
    table.add_column("bound")
    for number, verdict in enumerate(best, 1):
        choice, known = verdict.choice, not verdict.unknown
        peaks = [format_bytes(verdict.peak_bytes)]
        if compiled:
            peaks.append(format_bytes(compiled[choice]) if choice in compiled else "")
        table.add_row(
            *(str(number), choice.weights, choice.cache, str(choice.batch), f"{choice.context:,}"),
            *peaks,
            f"{verdict.tokens_per_second:,.0f}" if known else "unknown",
            f"{1 / verdict.seconds:,.1f}" if known else "unknown",
            format_si(verdict.prefill_seconds, "s") if known else "unknown",
            verdict.bound,
            style="bold" if number == 1 else None,
        )
    if best:
        console.print(table, width=min(WIDTH, console.width))
        _say(console, "each: tokens a second of one sequence; prompts: taking in the whole context of all sequences")
        for why in dict.fromkeys(verdict.unknown for verdict in best if verdict.unknown):
            _say(console, f"unknown: {why}")
    for verdict, why in confirmation.dropped:
        _say(console, f"dropped: {verdict.choice.summary}: {why}")


def show_counts(found: training.Search | inference.Search, margin: float, console: Console) -> None:
    """Prints how many candidates were judged, how many fit, and the memory budget."""
    capacity = found.device.memory_bytes
    assert capacity is not None
    told = f"{found.judged:,} candidates judged in {found.seconds:.1f} s; {len(found.fitting):,} fit in "
    _say(console, f"{told}{format_bytes(found.budget)} ({format_bytes(capacity)} less {margin:.0%})")


def show_nothing_fits(closest: str, ledger: Ledger, budget: int, remedies: Sequence[Remedy], console: Console) -> None:
    """Prints the closest candidate, how far it exceeds the budget, its largest rows, and changes that would fit.

    Args:
      closest: the candidate in one line.
      ledger: its bill.
      budget: bytes available on one device.
      remedies: single changes that would fit.
    """
    over = ledger.peak_bytes - budget
    _say(console, f"nothing fits. The closest needs {format_bytes(ledger.peak_bytes)}: {format_bytes(over)} too much")
    _say(console, f"  {closest}")
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest_rows(ledger))
    _say(console, f"  its largest rows: {largest}")
    for remedy in remedies:
        _say(console, f"would fit with {remedy}")
    if not remedies:
        _say(console, "no single change of devices, lengths or dtypes fits: a smaller model would be needed")


def largest_rows(ledger: Ledger) -> list[tuple[str, int]]:
    """Returns (name, bytes per device) of the largest rows that are live at the peak."""
    alive = [row for row in ledger.rows if row.phase in (PERSISTENT, ledger.peak_phase)]
    alive.sort(key=lambda row: -row.bytes_per_device)
    return [(row.name, row.bytes_per_device) for row in alive[:_LARGEST]]


def show_bills(train: Ledger, infer: Ledger, device: Device, console: Console) -> None:
    """Prints the peak memory of one device for training and for inference side by side, by kind of row."""
    table = _table(f"{train.model}, {train.parameters:,} parameters: memory of one {device.name} at the peak")
    table.add_column("")
    table.add_column(f"training, {train.count} device(s)", justify="right")
    table.add_column("inference, 1 device", justify="right")
    sums = [_by_kind(ledger) for ledger in (train, infer)]
    for kind in dict.fromkeys((*sums[0], *sums[1])):
        table.add_row(kind, *(format_bytes(one[kind]) if kind in one else "" for one in sums))
    table.add_section()
    table.add_row("peak", format_bytes(train.peak_bytes), format_bytes(infer.peak_bytes), style="bold")
    if train.host_bytes:
        table.add_row("in host memory", format_bytes(train.host_bytes), "")
    console.print(table, width=min(WIDTH, console.width))


def _by_kind(ledger: Ledger) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in ledger.rows:
        if row.phase != HOST and row.phase in (PERSISTENT, ledger.peak_phase):
            found[row.kind] = found.get(row.kind, 0) + row.bytes_per_device
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def show_commands(commands: Sequence[Sequence[str]], console: Console) -> None:
    """Prints shell commands ready to copy; long ones continue over several lines."""
    for words in commands:
        quoted = [shlex.quote(word) for word in words]
        lines, line = [], ""
        for word in quoted:
            if line and len(line) + len(word) + 3 > WIDTH:
                lines.append(line)
                line = "   "
            line = f"{line} {word}" if line else word
        _say(console, " \\\n".join([*lines, line]))


def say(console: Console, text: str) -> None:
    _say(console, text)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, width=min(WIDTH, console.width), soft_wrap="\\\n" in text)
