"""24 cells of the grid compiled again: XLA says what is kept of it, and the formula is near."""

import json
import sys

import jax
import pytest
import runs

sys.path.insert(0, str(runs.ROOT / "experiments"))
import grid_report
import ledger_vs_xla

RESULTS = runs.ROOT / "experiments" / "results"
# The quickest to compile of each target; one that takes a TPU's compiler a minute is worth four others.
CELLS = {"cpu": 10, "h100": 10, "v5e": 4}


def quickest(target):
    kept = json.loads((RESULTS / f"ledger_vs_xla_{target}.json").read_text())
    made = {name: told for name, told in kept["cells"].items() if not told["refused"]}
    names = sorted(made, key=lambda name: made[name]["seconds"])[: CELLS[target]]
    return [(name, kept["jax"]) for name in names]


@pytest.mark.parametrize(("name", "version"), [case for target in CELLS for case in quickest(target)])
def test_a_cell_again(name, version):
    target = name.split("-")[0]
    (kept,) = [result for result in grid_report.results(RESULTS, target) if result.cell.name == name]
    found = ledger_vs_xla.measure(kept.cell)
    assert not found["refused"]
    if jax.__version__ == version:
        assert found["peak"] == pytest.approx(kept.xla, rel=1e-3)
    assert kept.formula == pytest.approx(found["peak"], rel=0.1)
