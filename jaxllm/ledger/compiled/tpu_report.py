"""Reads peak and temporary memory from the buffer report that the TPU compiler dumps.

For programs with donated arguments, the `memory_analysis` of an absent TPU is unusable: it counts donated arguments as
temporaries in some programs and not in others. Example (libtpu of JAX 0.10.2): for a 16,384² matmul with one argument
of 256 MiB and 1,024 MiB of temporaries, it reports 1,280 MiB of temporaries, and 768 MiB if nothing is donated. The
report written with `xla_dump_to` has the total of the buffer assignment per memory space.
"""

import pathlib
import re
from typing import Any

_TOTAL = re.compile(r"Memory Space: default \(color=0\)\s+Total bytes: (\d+)")
# A donated argument shares its allocation with an output: `allocation 1: size 512, parameter 0, … maybe-live-out:`.
_ARGUMENT = re.compile(r"^allocation \d+: size (\d+), parameter (?!.*\bcolor\b)", re.MULTILINE)


def figures(folder: pathlib.Path) -> dict[str, Any]:
    """Returns {"temps", "peak"} in bytes of main memory on one device, or {} if there is no report.

    Args:
      folder: Value of `xla_dump_to`. If it has several modules, the one with the highest peak is the program.
    """
    best: dict[str, Any] = {}
    for report in folder.glob("*after_optimizations-memory-usage-report.txt"):
        assignment = report.with_name(report.name.replace("memory-usage-report", "buffer-assignment"))
        total = _TOTAL.search(report.read_text())
        if total is None or not assignment.exists():
            continue
        peak = int(total[1])
        arguments = sum(int(size) for size in _ARGUMENT.findall(assignment.read_text()))
        if peak >= best.get("peak", 0):
            best = {"temps": peak - arguments, "peak": peak}
    return best
