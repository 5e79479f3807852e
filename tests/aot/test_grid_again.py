"""Recompiles cells of the grid: XLA's figures equal the stored ones, and the formula is close."""

import json
import sys

import jax
import pytest
import runs

sys.path.insert(0, str(runs.ROOT / "experiments"))
import grid
import grid_report
import ledger_vs_xla

RESULTS = runs.ROOT / "experiments" / "results"
# Cells whose formula is off by more than 3 per cent, and by how much at most.
ERRORS = {"cpu-01197": 10, "h100-00187": 4, "h100-kernel-00003": 6, "h100-kernel-00010": 4, "h100-kernel-00025": 4}
# Maximum number of cells per target, enough for every kind; a TPU's compiler takes a minute for one.
CELLS = {"cpu": 9, "h100": 6, "v5e": 1}


def kinds(run):
    """Returns the features that a cell exemplifies."""
    config = grid.configured(run)
    mesh = config.mesh
    return {
        ("remat", config.remat.policy.partition(":")[0]),
        ("stage", mesh.zero),
        ("shared", mesh.tensor > 1, mesh.data > 1),
        ("attention", config.attention.implementation),
        ("precision", config.precision.policy),
        ("optimizer", config.optimizer.name),
    }


def chosen(target):
    """Repeatedly picks, of the remaining cells, the one with the most new features per second of compilation."""
    stored = json.loads((RESULTS / f"ledger_vs_xla_{target}.json").read_text())
    left = {name: cell for name, cell in stored["cells"].items() if not cell["refused"]}
    names, seen = [], set()
    while len(names) < CELLS[target]:
        gains = {name: len(kinds(cell["run"]) - seen) / cell["seconds"] for name, cell in left.items()}
        best = max(gains, key=gains.__getitem__)
        if not gains[best]:
            break
        names.append(best)
        seen |= kinds(left.pop(best)["run"])
    return [(name, stored["jax"]) for name in names]


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_cells_of_every_kind_are_chosen(target):
    cells = json.loads((RESULTS / f"ledger_vs_xla_{target}.json").read_text())["cells"]
    seen = set.union(*(kinds(cells[name]["run"]) for name, _ in chosen(target)))
    every = set.union(*(kinds(cell["run"]) for cell in cells.values()))
    assert {kind for kind in every - seen if kind[0] not in ("optimizer", "precision", "shared")} == set()


@pytest.mark.parametrize(("name", "version"), [case for target in CELLS for case in chosen(target)])
def test_a_cell_again(name, version):
    target = name.split("-")[0]
    (stored,) = [result for result in grid_report.results(RESULTS, target) if result.cell.name == name]
    found = ledger_vs_xla.measure(stored.cell)
    assert not found["refused"]
    if jax.__version__ == version:
        assert found["peak"] == pytest.approx(stored.xla, rel=1e-3)
    assert 100 * abs(stored.formula / found["peak"] - 1) < ERRORS.get(name, 3)
