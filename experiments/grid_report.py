"""Statistics of the grid cells: the gap between the formula's peak and XLA's, and that of four other estimators."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import grid
import peers
from rich import box
from rich.console import Console
from rich.table import Table

from jaxllm import architectures
from jaxllm.hardware import detect
from jaxllm.ledger.formula import training_memory as memory
from jaxllm.ledger.rows import Unknown

# "Fits" means at most this fraction of the device's memory.
FILL = 0.95
# Above this fraction of a GPU's memory XLA rewrites a program to need less (its scheduler's limit is 95 % of what the
# arguments leave of 80 % of the memory), so its peak is not comparable with the formula; only the verdict is.
REMADE = 0.76
WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Result:
    """Formula, XLA and peer figures of one cell.

    Attributes:
      cell: the grid cell.
      formula: peak by the formula, bytes.
      xla: XLA's peak, bytes; for a refused program, the size named by the refusal, or None.
      refused: XLA refused to compile the program.
      state: the formula's state and batch minus XLA's arguments, bytes; None if the program was refused.
      peers: peak by each other estimator, bytes; None if it has no answer.
      fill: formula's peak as a fraction of the device's memory.
      memory: the device's memory, bytes.
    """

    cell: grid.Cell
    formula: int
    xla: int | None
    refused: bool
    state: int | None
    peers: dict[str, float | None]
    fill: float
    memory: int

    @property
    def gap(self) -> float | None:
        """Relative gap, (formula − XLA) / XLA; None if XLA rewrote or refused the program."""
        remade = grid.platform(self.cell.target) == "gpu" and self.fill > REMADE
        return None if self.refused or remade or not self.xla else self.formula / self.xla - 1

    @property
    def false_fit(self) -> bool:
        """True if the formula reports that the run fits and XLA needs more than the device's memory."""
        return self.fill <= FILL and (self.refused or (self.xla or 0) > self.memory)


def results(folder: pathlib.Path, target: str) -> list[Result]:
    """Returns the results of the stored cells of a target, in draw order."""
    path = folder / f"ledger_vs_xla_{target}.json"
    if not path.exists():
        return []
    kept = json.loads(path.read_text())["cells"]
    return [_result(name, target, kept[name]) for name in sorted(kept)]


def _result(name: str, target: str, told: dict[str, Any]) -> Result:
    config = grid.configured(told["run"])
    model = architectures.resolve_config(config)
    policy = config.precision.policy
    ledger = memory.training(model, config, policy, grid.platform(target))
    batch = sum(row.bytes_per_device for row in ledger.rows if row.kind == "batch" and row.phase == ledger.peak_phase)
    refused = bool(told["refused"])
    known = told["arguments"] if isinstance(told["arguments"], int) else None
    found = (
        peers.estimates(model, config, policy, target)
        if target != "cpu"
        else peers.estimates(model, config, policy, "h100")
    )
    size = grid.MEMORY[target] if target == "cpu" else detect.by_name(target).memory_bytes or 0
    return Result(
        cell=grid.Cell(name, target, config),
        formula=ledger.peak_bytes,
        xla=told["peak"] if isinstance(told["peak"], int) else None,
        refused=refused,
        state=None if known is None else ledger.persistent_bytes + batch - known,
        peers={peer: None if isinstance(figure, Unknown) else float(figure) for peer, figure in found.items()},
        fill=ledger.peak_bytes / size,
        memory=size,
    )


def percentile(values: Sequence[float], part: float) -> float:
    """Returns the percentile of sorted values at the fraction `part`."""
    return values[min(int(part * len(values)), len(values) - 1)]


def report(folder: pathlib.Path) -> None:
    """Prints the tables of all targets, of the peers and of the worst cells; draws the plot; writes a summary."""
    console = Console(width=WIDTH)
    found = {target: results(folder, target) for target in grid.TARGETS}
    found = {target: made for target, made in found.items() if made}
    summary = {target: _summary(made) for target, made in found.items()}
    table = Table(title="Peak by formula against XLA's", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("target", "cells", "state off", "compared", "median", "95th", "worst", "said to fit", "false fits"):
        table.add_column(heading, justify="left" if heading == "target" else "right")
    for target, told in summary.items():
        table.add_row(target, *(_told(told[key]) for key in list(told) if key != "peers"))
    console.print(table)
    console.print(_peer_table(summary))
    console.print(_worst_table([result for made in found.values() for result in made]))
    console.print(f"Verdict: {verdict(summary)}")
    (folder / "ledger_vs_xla.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(found, folder / "ledger_vs_xla.png")


def _summary(made: list[Result]) -> dict[str, Any]:
    gaps = sorted(abs(result.gap) for result in made if result.gap is not None)
    compared: dict[str, Any] = {}
    for peer in peers.PEERS:
        both = [(r.peers[peer], r.xla) for r in made if r.gap is not None and r.peers[peer] is not None and r.xla]
        off = sorted(abs(said / xla - 1) for said, xla in both if said is not None)
        fits = sum(1 for said, xla in both if said is not None and said <= FILL * made[0].memory < made[0].memory < xla)
        compared[peer] = {
            "cells": len(off),
            "median": statistics.median(off) if off else None,
            "95th": percentile(off, 0.95) if off else None,
            "false fits": fits,
        }
    return {
        "cells": len(made),
        "state off": max((abs(result.state) for result in made if result.state is not None), default=0),
        "compared": len(gaps),
        "median": statistics.median(gaps),
        "95th": percentile(gaps, 0.95),
        "worst": gaps[-1],
        "said to fit": sum(result.fill <= FILL for result in made),
        "false fits": sum(result.false_fit for result in made),
        "peers": compared,
    }


def _told(value: float | int | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def _peer_table(summary: dict[str, Any]) -> Table:
    table = Table(
        title="What others would say of the cells that they have an answer for",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("target")
    for peer in peers.PEERS:
        table.add_column(f"{peer}: cells, median, 95th", justify="right")
    for target, told in summary.items():
        row = (told["peers"][peer] for peer in peers.PEERS)
        table.add_row(target, *(f"{one['cells']}, {_told(one['median'])}, {_told(one['95th'])}" for one in row))
    return table


def _worst_table(made: list[Result]) -> Table:
    table = Table(title="The ten cells that miss most", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("cell", "gap", "fill", "run"):
        table.add_column(heading, justify="right" if heading in ("gap", "fill") else "left")
    for result in sorted((r for r in made if r.gap is not None), key=lambda r: -abs(r.gap or 0))[:10]:
        table.add_row(
            result.cell.name, f"{result.gap:+.1%}", f"{result.fill:.0%}", grid.description(result.cell.config)
        )
    return table


def verdict(summary: dict[str, Any]) -> str:
    """Returns the verdict on the claim in one line: that it holds, or what fails."""
    faults = []
    for target, told in summary.items():
        faults += [f"{target}: state is {told['state off']:,} B off"] if told["state off"] else []
        faults += [f"{target}: median {told['median']:.1%}"] if told["median"] > 0.02 else []
        faults += [f"{target}: 95th percentile {told['95th']:.1%}"] if told["95th"] > 0.06 else []
        faults += [f"{target}: {told['false fits']} false fits"] if told["false fits"] else []
    return "; ".join(faults) if faults else "holds: state exact, median ≤ 2 %, 95th percentile ≤ 6 %, no false fit"


def draw(found: dict[str, list[Result]], path: pathlib.Path) -> None:
    """Plots each cell's formula and each peer's answer against XLA's peak; does nothing without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(5 * len(found), 5), squeeze=False, layout="constrained")
    for place, (target, made) in zip(axes[0], found.items(), strict=True):
        cells = [result for result in made if result.gap is not None and result.xla]
        xla = [result.xla / 2**30 for result in cells if result.xla]
        for peer, marker in zip(peers.PEERS, "^vsD", strict=True):
            both = [(r.xla / 2**30, r.peers[peer] / 2**30) for r in cells if r.peers[peer] is not None and r.xla]
            if both:
                place.scatter(*zip(*both, strict=True), marker=marker, s=14, alpha=0.6, label=peer, linewidths=0)
        place.scatter(xla, [r.formula / 2**30 for r in cells], s=16, color="black", label="jaxllm", zorder=3)
        ends = (min(xla) / 2, max(xla) * 2)
        place.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
        place.set(xscale="log", yscale="log", title=f"{target}: {len(cells)} cells", xlabel="XLA's peak, GiB a device")
        place.set_ylabel("said, GiB a device")
        place.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
