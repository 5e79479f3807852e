"""Claim: the ledger's formulas match XLA's allocation: state to the byte, the peak within a few per cent, and "fits" is
never reported for a run that does not fit.

    python experiments/ledger_vs_xla.py --target h100 --cells 110     # compiles; needs the extra cuda12 (v5e: tpu)
    python experiments/ledger_vs_xla.py --target h100 --kernels 24    # runs with our attention kernels
    python experiments/ledger_vs_xla.py --report                      # statistics of the stored cells

Compiles the cells of `grid.py` for each target and saves XLA's figures to `results/ledger_vs_xla_<target>.json` after
each cell, so an interrupted run resumes where it stopped. Formula results are not saved: the report (`grid_report.py`)
recomputes them and compares them with four other estimators (`estimators.py`).
"""

import argparse
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Virtual devices for the CPU cells; less LLVM optimization, which does not change buffers.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import grid
import grid_report
import jax

from jaxllm import architectures
from jaxllm.hardware import detect
from jaxllm.ledger.compiled import absent, inspection
from jaxllm.ledger.compiled.inspection import Inspection, task_programs
from jaxllm.ledger.rows import figure_to_json
from jaxllm.parallel import mesh

FIGURES = ("arguments", "outputs", "aliases", "temps", "peak")


def inspect(cell: grid.Cell) -> Inspection:
    """Compiles a cell's train step and returns XLA's figures for it."""
    config, platform = cell.config, grid.platform(cell.target)
    model = architectures.resolve_config(config)
    if platform == "cpu":
        return inspection.inspect(
            task_programs(config, model, platform, mesh.make_mesh(config.mesh), None)["train_step"].compile
        )
    device = detect.by_name(cell.target)
    program = task_programs(config, model, platform, absent.abstract_mesh(config), None)["train_step"]
    target = absent.require_compiler(device.name, device.compile_target)
    return absent.inspect_program(program, target, math.prod(mesh.axis_sizes(config.mesh).values()))


def measure(cell: grid.Cell) -> dict[str, Any]:
    """Returns a cell's figures as JSON: bytes on one device or the compiler's refusal, seconds, and the run."""
    found = inspect(cell)
    figures = {name: figure_to_json(found.figures[name]) for name in FIGURES}
    return {
        **figures,
        "refused": found.oom_message,
        "seconds": round(found.seconds, 1),
        "run": grid.overrides(cell.config),
    }


def run(folder: pathlib.Path, target: str, cells: Iterable[grid.Cell]) -> None:
    """Measures the cells of a target that are not in its result file yet."""
    path = folder / f"ledger_vs_xla_{target}.json"
    stored = json.loads(path.read_text()) if path.exists() else {"target": target, "jax": jax.__version__, "cells": {}}
    for cell in cells:
        if cell.name in stored["cells"]:
            continue
        stored["cells"][cell.name] = found = measure(cell)
        path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        print(cell.name, found["seconds"], "s", found["peak"], found["refused"][:80], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=grid.TARGETS, help="device that cells are compiled for")
    parser.add_argument("--cells", type=int, default=100, help="number of cells, stored ones included")
    parser.add_argument("--kernels", type=int, help="compile this number of cells with attention kernels instead")
    parser.add_argument("--report", action="store_true", help="print statistics of all targets")
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
