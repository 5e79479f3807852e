"""Statistics of the grid cells: the gap between the formula's peak and XLA's, and that of four other estimators."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import estimators
import grid
from rich import box
from rich.console import Console
from rich.table import Table

from jaxllm import architectures
from jaxllm.hardware import detect
from jaxllm.ledger.formula import training_memory as memory
from jaxllm.ledger.rows import Unknown

# "Fits" means at most this fraction of the device's memory.
FITS = 0.95
# Above this fraction of a GPU's memory XLA rewrites a program to need less (its scheduler's limit is 95 % of what the
# arguments leave of 80 % of the memory), so its peak is not comparable with the formula; only the verdict is.
REMATERIALIZED = 0.76
WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Result:
    """Peaks of one cell by the formula, by XLA and by other estimators.

    Attributes:
      cell: the grid cell.
      formula: peak by the formula, bytes.
      xla: XLA's peak, bytes; for a refused program, the size named by the refusal, or None.
      refused: XLA refused to compile the program.
      state: the formula's state and batch minus XLA's arguments, bytes; None if the program was refused.
      estimates: peak by each other estimator, bytes; None if it has none.
      memory_fraction: formula's peak as a fraction of the device's memory.
      memory: the device's memory, bytes.
    """

    cell: grid.Cell
    formula: int
    xla: int | None
    refused: bool
    state: int | None
    estimates: dict[str, float | None]
    memory_fraction: float
    memory: int

    @property
    def gap(self) -> float | None:
        """Relative gap, (formula − XLA) / XLA; None if XLA rewrote or refused the program."""
        rewritten = grid.platform(self.cell.target) == "gpu" and self.memory_fraction > REMATERIALIZED
        return None if self.refused or rewritten or not self.xla else self.formula / self.xla - 1

    @property
    def false_fit(self) -> bool:
        """True if the formula reports that the run fits and XLA needs more than the device's memory."""
        return self.memory_fraction <= FITS and (self.refused or (self.xla or 0) > self.memory)


def results(folder: pathlib.Path, target: str) -> list[Result]:
    """Returns the results of the stored cells of a target, in draw order."""
    path = folder / f"ledger_vs_xla_{target}.json"
    if not path.exists():
        return []
    stored = json.loads(path.read_text())["cells"]
    return [_result(name, target, stored[name]) for name in sorted(stored)]


def _result(name: str, target: str, stored: dict[str, Any]) -> Result:
    config = grid.configured(stored["run"])
    model = architectures.resolve_config(config)
    policy = config.precision.policy
    ledger = memory.training(model, config, policy, grid.platform(target))
    batch = sum(row.bytes_per_device for row in ledger.rows if row.kind == "batch" and row.phase == ledger.peak_phase)
    refused = bool(stored["refused"])
    known = stored["arguments"] if isinstance(stored["arguments"], int) else None
    found = (
        estimators.estimates(model, config, policy, target)
        if target != "cpu"
        else estimators.estimates(model, config, policy, "h100")
    )
    size = grid.MEMORY[target] if target == "cpu" else detect.by_name(target).memory_bytes or 0
    return Result(
        cell=grid.Cell(name, target, config),
        formula=ledger.peak_bytes,
        xla=stored["peak"] if isinstance(stored["peak"], int) else None,
        refused=refused,
        state=None if known is None else ledger.persistent_bytes + batch - known,
        estimates={name: None if isinstance(figure, Unknown) else float(figure) for name, figure in found.items()},
        memory_fraction=ledger.peak_bytes / size,
        memory=size,
    )


def percentile(values: Sequence[float], part: float) -> float:
    """Returns the percentile of sorted values at the fraction `part`."""
    return values[min(int(part * len(values)), len(values) - 1)]


def report(folder: pathlib.Path) -> None:
    """Prints the tables of targets, other estimators and worst cells; draws the plot; writes a summary."""
    console = Console(width=WIDTH)
    found = {target: results(folder, target) for target in grid.TARGETS}
    found = {target: made for target, made in found.items() if made}
    summary = {target: _summary(made) for target, made in found.items()}
    table = Table(title="Peak by formula against XLA's", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("target", "cells", "state off", "compared", "median", "95th", "worst", "said to fit", "false fits"):
        table.add_column(heading, justify="left" if heading == "target" else "right")
    for target, figures in summary.items():
        table.add_row(target, *(_cell(figures[key]) for key in list(figures) if key != "peers"))
    console.print(table)
    console.print(_estimator_table(summary))
    console.print(_worst_table([result for made in found.values() for result in made]))
    console.print(f"Verdict: {verdict(summary)}")
    (folder / "ledger_vs_xla.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(found, folder / "ledger_vs_xla.png")


def _summary(made: list[Result]) -> dict[str, Any]:
    gaps = sorted(abs(result.gap) for result in made if result.gap is not None)
    compared: dict[str, Any] = {}
    for name in estimators.ESTIMATORS:
        pairs = [(r.estimates[name], r.xla) for r in made if r.gap is not None and r.xla]
        known = [(estimate, xla) for estimate, xla in pairs if estimate is not None]
        off = sorted(abs(estimate / xla - 1) for estimate, xla in known)
        fits = sum(1 for estimate, xla in known if estimate <= FITS * made[0].memory < made[0].memory < xla)
        compared[name] = {
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
        "said to fit": sum(result.memory_fraction <= FITS for result in made),
        "false fits": sum(result.false_fit for result in made),
        "peers": compared,
    }


def _cell(value: float | int | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def _estimator_table(summary: dict[str, Any]) -> Table:
    table = Table(
        title="Other estimators, on the cells that they support",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("target")
    for name in estimators.ESTIMATORS:
        table.add_column(f"{name}: cells, median, 95th", justify="right")
    for target, figures in summary.items():
        row = (figures["peers"][name] for name in estimators.ESTIMATORS)
        table.add_row(target, *(f"{one['cells']}, {_cell(one['median'])}, {_cell(one['95th'])}" for one in row))
    return table


def _worst_table(made: list[Result]) -> Table:
    table = Table(title="The ten cells with the largest gaps", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("cell", "gap", "memory", "run"):
        table.add_column(heading, justify="right" if heading in ("gap", "memory") else "left")
    for result in sorted((r for r in made if r.gap is not None), key=lambda r: -abs(r.gap or 0))[:10]:
        table.add_row(
            result.cell.name,
            f"{result.gap:+.1%}",
            f"{result.memory_fraction:.0%}",
            grid.description(result.cell.config),
        )
    return table


def verdict(summary: dict[str, Any]) -> str:
    """Returns the verdict on the claim in one line: that it holds, or what fails."""
    faults = []
    for target, figures in summary.items():
        faults += [f"{target}: state is {figures['state off']:,} B off"] if figures["state off"] else []
        faults += [f"{target}: median {figures['median']:.1%}"] if figures["median"] > 0.02 else []
        faults += [f"{target}: 95th percentile {figures['95th']:.1%}"] if figures["95th"] > 0.06 else []
        faults += [f"{target}: {figures['false fits']} false fits"] if figures["false fits"] else []
    return "; ".join(faults) if faults else "holds: state exact, median ≤ 2 %, 95th percentile ≤ 6 %, no false fit"


def draw(found: dict[str, list[Result]], path: pathlib.Path) -> None:
    """Plots each cell's formula and each other estimator's against XLA's peak; does nothing without matplotlib."""
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
        for name, marker in zip(estimators.ESTIMATORS, "^vsD", strict=True):
            pairs = [
                (r.xla / 2**30, r.estimates[name] / 2**30) for r in cells if r.estimates[name] is not None and r.xla
            ]
            if pairs:
                place.scatter(*zip(*pairs, strict=True), marker=marker, s=14, alpha=0.6, label=name, linewidths=0)
        place.scatter(xla, [r.formula / 2**30 for r in cells], s=16, color="black", label="jaxllm", zorder=3)
        ends = (min(xla) / 2, max(xla) * 2)
        place.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
        place.set(
            xscale="log", yscale="log", title=f"{target}: {len(cells)} cells", xlabel="XLA's peak, GiB per device"
        )
        place.set_ylabel("estimate, GiB per device")
        place.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
