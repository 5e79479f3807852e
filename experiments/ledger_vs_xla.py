"""Claim: the ledger's closed forms are what XLA allocates: state to the byte, the peak within a few per cent, and never
"fits" for what does not.

    python experiments/ledger_vs_xla.py --target h100 --cells 110     # compiles; needs the extra cuda12 (v5e: tpu)
    python experiments/ledger_vs_xla.py --target h100 --kernels 24    # those whose attention our kernels compute
    python experiments/ledger_vs_xla.py --report                      # the statistics of what is there

Compiles the cells of `grid.py` for each target, and keeps what XLA says of each in
`results/ledger_vs_xla_<target>.json`, cell by cell, so that an interrupted run goes on where it stopped. Formulas are
not kept: the report (`grid_report.py`) computes them anew, beside what four other planners would say (`peers.py`).
"""

import argparse
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Pretended devices for the CPU's cells; and less of LLVM's work, which changes no buffer.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import grid
import grid_report
import jax

from jaxllm import architectures
from jaxllm.hardware import detect
from jaxllm.ledger.compiled import absent, attached
from jaxllm.ledger.compiled.attached import Inspection
from jaxllm.ledger.compiled.task_programs import programs_of
from jaxllm.ledger.rows import figure_to_json
from jaxllm.parallel import mesh

FIGURES = ("arguments", "outputs", "aliases", "temps", "peak")


def inspect(cell: grid.Cell) -> Inspection:
    """What XLA says of a cell's train step."""
    config, platform = cell.config, grid.platform(cell.target)
    model = architectures.resolve_config(config)
    if platform == "cpu":
        return attached.inspect(
            programs_of(config, model, platform, mesh.make_mesh(config.mesh), None)["train_step"].compile
        )
    device = detect.named(cell.target)
    program = programs_of(config, model, platform, absent.abstract_mesh(config), None)["train_step"]
    target = absent.require_compiler(device.name, device.compile_target)
    return absent.inspection_for(program, target, math.prod(mesh.sizes(config.mesh).values()))


def measure(cell: grid.Cell) -> dict[str, Any]:
    """The same as JSON: bytes on one device, or the compiler's refusal, and the run."""
    found = inspect(cell)
    figures = {name: figure_to_json(found.figures[name]) for name in FIGURES}
    return {**figures, "refused": found.refused, "seconds": round(found.seconds, 1), "run": grid.overrides(cell.config)}


def run(folder: pathlib.Path, target: str, cells: Iterable[grid.Cell]) -> None:
    """Measures the cells of a target that are not there yet."""
    path = folder / f"ledger_vs_xla_{target}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"target": target, "jax": jax.__version__, "cells": {}}
    for cell in cells:
        if cell.name in kept["cells"]:
            continue
        kept["cells"][cell.name] = told = measure(cell)
        path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        print(cell.name, told["seconds"], "s", told["peak"], told["refused"][:80], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=grid.TARGETS, help="compile cells for it")
    parser.add_argument("--cells", type=int, default=100, help="how many, those that are there included")
    parser.add_argument("--kernels", type=int, help="compile so many of those with kernels of attention instead")
    parser.add_argument("--report", action="store_true", help="statistics of all targets")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if arguments.target:
        cells = grid.cells(arguments.target, arguments.cells)
        if arguments.kernels:
            cells = grid.kernel_cells(arguments.target, arguments.kernels)
        run(arguments.folder, arguments.target, cells)
    if arguments.report or not arguments.target:
        grid_report.report(arguments.folder)


if __name__ == "__main__":
    main()
