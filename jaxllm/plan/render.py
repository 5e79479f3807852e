"""Terminal output of a plan: tables of at most 100 columns, a summary of the search, and the commands to run."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from jaxllm.hardware.detect import Device
from jaxllm.ledger.advice.remedies import Remedy
from jaxllm.ledger.rows import HOST, PERSISTENT, Ledger, format_bytes, format_si
from jaxllm.plan import inference
from jaxllm.plan.confirm import Confirmation
from jaxllm.plan.inference import InferenceEstimate, InferenceResult
from jaxllm.plan.training import TrainingEstimate, TrainingResult

WIDTH = 100
Columns = Mapping[str, Sequence[str]]  # header -> cells
LARGEST = 5  # rows listed if nothing fits


@dataclasses.dataclass(frozen=True)
class Output:
    """Console and limits for printing a plan.

    Attributes:
      console: where to print; silent with `--json`.
      top: maximum number of candidates to print.
    """

    console: Console
    top: int

    def say(self, text: str) -> None:
        wraps = "\\\n" in text  # a command over several lines
        self.console.print(text, highlight=False, markup=False, width=self._width, soft_wrap=wraps)

    def show(self, title: str, table: Table) -> None:
        self.console.print(Text(title, style="italic"), width=self._width)
        self.console.print(table, width=self._width)

    def show_candidates(self, title: str, columns: Columns, optional: Sequence[str], left: Sequence[str]) -> list[str]:
        """Prints a table with one row per candidate and no wrapped rows.

        Args:
          title: the line above the table.
          columns: header -> cells.
          optional: headers to omit, first ones first, as far as the terminal is too narrow for them.
          left: headers of columns aligned left.

        Returns:
          The headers that were omitted.
        """
        for omitted in range(len(optional) + 1):
            kept = {name: cells for name, cells in columns.items() if name not in optional[:omitted]}
            table = _table()
            for name in kept:
                table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
            for number, cells in enumerate(zip(*kept.values(), strict=True)):
                table.add_row(*cells, style=None if number else "bold")
            if Measurement.get(self.console, self.console.options.update(max_width=1000), table).maximum <= self._width:
                break
        self.show(title, table)
        return list(optional[:omitted])

    def say_column(self, name: str, cells: Sequence[str]) -> None:
        """Prints on one line what the candidates have in a column; once if all agree."""
        if len(set(cells)) == 1:
            self.say(f"{name}: {cells[0]}")
        else:
            self.say(f"{name}: " + "; ".join(f"{number} {each}" for number, each in enumerate(cells, 1)))

    @property
    def _width(self) -> int:
        return min(WIDTH, self.console.width)


def show_training(result: TrainingResult, confirmation: Confirmation[TrainingEstimate], output: Output) -> None:
    """Prints the best candidates of a search over training runs, best first.

    Args:
      result: the search.
      confirmation: XLA's peaks of the compiled candidates, and the candidates that it rejected.
    """
    base, best = result.space.base, confirmation.remaining(result.fitting)
    tokens = base.train.batch_size * base.data.sequence_length
    title = f"plan: train {base.model.name} on {result.space.count} × {result.device.name}, {tokens:,} tokens per step"
    compiled = {estimate.choice: peak for estimate, peak in confirmation.compiled}
    shown = best[: output.top]
    letters = _letters([estimate.choice.remat for estimate in shown])
    columns: dict[str, list[str]] = {}
    for number, estimate in enumerate(shown, 1):
        choice = estimate.choice
        rows = base.train.batch_size // (choice.accumulate * choice.replica * choice.data)
        cells = {
            "": str(number),
            "mesh": f"{choice.replica}×{choice.data}×{choice.tensor}",
            "ZeRO": str(choice.zero),
            "remat": letters.get(choice.remat, choice.remat),
            "rows": f"{rows}×{choice.accumulate}",
            "chunks": f"{choice.attention_chunk or 'all'}/{choice.loss_chunk}",
            "offload": choice.offload,
            "peak": format_bytes(estimate.peak_bytes),
            "compiled": format_bytes(compiled[choice]) if choice in compiled else "",
            "step ≥": format_si(estimate.seconds, "s") + ("*" if estimate.unknown else ""),
            "tokens/s": _rate(tokens / estimate.seconds),
            "bound": estimate.bound,
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    if not compiled:
        columns.pop("compiled", None)
    if all(estimate.choice.offload == "none" for estimate in shown):
        columns.pop("offload", None)
    if best:
        optional = [name for name in ("bound", "chunks", "offload", "ZeRO") if name in columns]
        omitted = output.show_candidates(
            title, columns, optional, ("mesh", "ZeRO", "remat", "rows", "chunks", "offload", "bound")
        )
        for policy, letter in letters.items():
            output.say(f"{letter}: {policy.partition(':')[2]}")
        output.say("mesh: replica × data × tensor; rows: sequences per device and micro-batch × micro-batches")
        if "chunks" in columns:
            output.say("chunks: queries per chunk of attention scores / tokens per chunk of logits")
        output.say("tokens/s: upper bound for all devices together; offload: optimizer state in host memory")
        for name in omitted:
            output.say_column(name, columns[name])
        dtypes = [f"{estimate.choice.precision}, moments {estimate.choice.moment_dtype}" for estimate in shown]
        output.say_column("precision", dtypes)
        for why in dict.fromkeys(estimate.unknown for estimate in shown if estimate.unknown):
            output.say(f"* excludes a resource whose rate is unknown: {why}")
    for estimate, why in confirmation.dropped:
        output.say(f"dropped: {estimate.choice.summary}: {why}")


def _rate(tokens: float) -> str:
    return format_si(tokens, "").strip() if tokens >= 1 else f"{tokens:.3g}"


def _letters(policies: Sequence[str]) -> dict[str, str]:
    """Returns a short name for the table, such as `names a`, for each policy that lists tags."""
    long = [policy for policy in dict.fromkeys(policies) if ":" in policy]
    return {
        policy: f"{policy.partition(':')[0]} {letter}" for policy, letter in zip(long, "abcdefghijklm", strict=False)
    }


def show_inference(result: InferenceResult, confirmation: Confirmation[InferenceEstimate], output: Output) -> None:
    """Prints the best candidates of a search over sampling setups, best first. Arguments as in `show_training`."""
    best = confirmation.remaining(result.fitting)[: output.top]
    compiled = {estimate.choice: peak for estimate, peak in confirmation.compiled}
    columns: dict[str, list[str]] = {}
    for number, estimate in enumerate(best, 1):
        choice, known = estimate.choice, not estimate.unknown
        cells = {
            "": str(number),
            "weights": choice.weights,
            "cache": choice.cache,
            "mesh": f"{choice.mesh.data}×{choice.mesh.tensor}",
            "sequences": str(choice.batch),
            "context": f"{choice.context:,}",
            "peak": format_bytes(estimate.peak_bytes),
            "compiled": format_bytes(compiled[choice]) if choice in compiled else "",
            "tokens/s ≤": f"{estimate.tokens_per_second:,.0f}" if known else "unknown",
            "each": f"{1 / estimate.seconds:,.1f}" if known else "unknown",
            "prompts ≥": format_si(estimate.prefill_seconds, "s") if known else "unknown",
            "bound": estimate.bound,
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    if not compiled:
        columns.pop("compiled", None)
    count = result.space.count
    if count == 1:
        columns.pop("mesh", None)
    if best:
        devices = result.device.name if count == 1 else f"{count} × {result.device.name}"
        title = f"plan: sample from {result.space.name} on {devices}"
        left = ("weights", "cache", "mesh", "bound")
        omitted = output.show_candidates(title, columns, ("bound", "context", "cache"), left)
        if count > 1:
            output.say("mesh: data × tensor; peak: of one device")
        output.say("each: tokens/s of one sequence; prompts: prefill of full-context prompts for all sequences")
        batches = inference.largest_batches(result, best[0].choice).items()
        sizes = "; ".join(f"{batch:,} × {context:,} tokens" for context, batch in batches)
        output.say(f"sequences and lengths that fit with the formats of 1: {sizes}")
        for name in omitted:
            output.say_column(name, columns[name])
        for why in dict.fromkeys(estimate.unknown for estimate in best if estimate.unknown):
            output.say(f"unknown: {why}")
    for estimate, why in confirmation.dropped:
        output.say(f"dropped: {estimate.choice.summary}: {why}")


def show_counts(result: TrainingResult | InferenceResult, margin: float, output: Output) -> None:
    """Prints how many candidates were evaluated, how many fit, and the memory budget."""
    capacity = result.device.memory_bytes
    assert capacity is not None
    counts = f"{result.evaluated:,} candidates evaluated in {result.seconds:.1f} s; {len(result.fitting):,} fit in "
    output.say(f"{counts}{format_bytes(result.budget)} ({format_bytes(capacity)} less {margin:.0%})")


def show_nothing_fits(closest: str, ledger: Ledger, budget: int, remedies: Sequence[Remedy], output: Output) -> None:
    """Prints the closest candidate, how far it exceeds the budget, its largest rows, and changes that would fit.

    Args:
      closest: the candidate in one line.
      ledger: its bill.
      budget: bytes available on one device.
      remedies: single changes that would fit.
    """
    need, over = format_bytes(ledger.peak_bytes), format_bytes(ledger.peak_bytes - budget)
    output.say(f"nothing fits. The closest candidate needs {need}, over budget by {over}:")
    output.say(f"  {closest}")
    largest = (f"{row.name} {format_bytes(row.bytes_per_device)}" for row in ledger.largest_rows(LARGEST))
    output.say(f"  its largest rows: {', '.join(largest)}")
    for remedy in remedies:
        output.say(f"would fit with {remedy}")
    if not remedies:
        output.say("no single change of devices, lengths or dtypes fits: a smaller model would be needed")


def show_bills(train: Ledger, infer: Ledger, device: Device, output: Output) -> None:
    """Prints the peak memory of one device for training and for inference side by side, by kind of row."""
    title = f"{train.model}, {train.parameters:,} parameters: memory of one {device.name} at the peak"
    table = _table()
    table.add_column("")
    table.add_column(f"training, {train.count} device(s)", justify="right")
    table.add_column(f"inference, {infer.count} device(s)", justify="right")
    sizes = [_by_kind(ledger) for ledger in (train, infer)]
    for kind in dict.fromkeys((*sizes[0], *sizes[1])):
        table.add_row(kind, *(format_bytes(size[kind]) if kind in size else "" for size in sizes))
    table.add_section()
    table.add_row("peak", format_bytes(train.peak_bytes), format_bytes(infer.peak_bytes), style="bold")
    if train.host_bytes:
        table.add_row("in host memory", format_bytes(train.host_bytes), "")
    output.show(title, table)


def _by_kind(ledger: Ledger) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in ledger.rows:
        if row.phase != HOST and row.phase in (PERSISTENT, ledger.peak_phase):
            sizes[row.kind] = sizes.get(row.kind, 0) + row.bytes_per_device
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def show_commands(commands: Sequence[Sequence[str]], output: Output) -> None:
    """Prints shell commands ready to copy; long ones continue over several lines."""
    for words in commands:
        quoted = [shlex.quote(word) for word in words]
        lines, line = [], ""
        for word in quoted:
            if line and len(line) + len(word) + 3 > WIDTH:
                lines.append(line)
                line = "   "
            line = f"{line} {word}" if line else word
        output.say(" \\\n".join([*lines, line]))


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
