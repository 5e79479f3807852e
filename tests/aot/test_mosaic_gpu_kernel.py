"""The Hopper kernel compiled for an absent H100 by Mosaic and NVIDIA's assembler: what it spills."""

import json
import os
import re
import subprocess
import sys

import pytest

# In a separate process: Mosaic reads these settings when it is imported.
PROGRAM = """
import json, sys
from test_attention_kernels import program
from jaxllm.hardware import detect
from jaxllm.kernels.flash.common import Tile, Tiles
from jaxllm.ledger.compiled import absent, inspection
target = absent.require_compiler("h100", detect.by_name("h100").compile_target)
for head_dim, rule, dtype, length, tile in json.loads(sys.argv[1]):
    tiles = tile and Tiles(Tile(*tile), Tile(32, 32), Tile(32, 32))
    made = program("gpu", head_dim, length, rule, dtype, backend="mosaic_gpu", tiles=tiles)
    print(json.dumps(inspection.figures(absent.compile_for(made, target, 1))["temps"]), file=sys.stderr)
"""


def compiled(folder, cells):
    """Returns for each cell (temporaries, bytes spilled, whether it multiplies with wgmma)."""
    here = os.path.dirname(__file__)
    paths = [here, os.path.dirname(here), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    dumps = {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cells)],
        capture_output=True,
        text=True,
        env=os.environ | dumps | {"PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    temps = [int(line) for line in child.stderr.splitlines() if line.isdigit()]
    assert child.returncode == 0, child.stderr[-2000:]
    found = []
    for i, temp_bytes in enumerate(temps):
        (report,) = folder.glob(f"flash_attention_{i}.ptxas")
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", report.read_text())]
        assert len(spilled) >= 2  # stores and loads, once or more
        found.append((temp_bytes, sum(spilled), "wgmma.mma_async" in report.with_suffix(".ptx").read_text()))
    return found


# head_dim, masks of `test_attention_kernels`, dtype, length, tile
CELLS = [
    *[(head_dim, rule, "bfloat16", 1024, None) for head_dim in (64, 128, 192, 256) for rule in ("rich", "bare")],
    (128, "rich", "float16", 1024, None),
    (64, "bare", "bfloat16", 1152, (192, 128, 12, 2)),
    (128, "bare", "bfloat16", 1000, None),
]
TOO_LARGE = (128, "bare", "bfloat16", 1152, (192, 192, 12, 1))


@pytest.mark.slow
def test_it_spills_only_with_too_large_a_tile(tmp_path):
    *found, (_, too_many, _) = compiled(tmp_path, [*CELLS, TOO_LARGE])
    for cell, (temps, spilled, multiplies) in zip(CELLS, found, strict=True):
        assert multiplies, cell
        assert spilled == 0, cell
        if cell[3] % 128 == 0:  # no padding: lse and delta in float32, four heads
            assert temps <= 2 * 4 * 4 * cell[3] + 1024, cell
    assert too_many > 0, "spills would be seen"
