"""What the TPU compiler's own report says of its buffers.

Where a program takes over its arguments' buffers, the `memory_analysis` of an absent TPU's program is of no use: it
counts those arguments among the temporaries of some programs and not of others (libtpu of JAX 0.10.2; a product of
16,384² with one argument of 256 MiB and 1,024 MiB of temporaries is told as 1,280 MiB of them, and as 768 MiB where
nothing is donated). The report that it writes with `xla_dump_to` has the sum of its buffer assignment, by memory space.
"""

import pathlib
import re
from typing import Any

_TOTAL = re.compile(r"Memory Space: default \(color=0\)\s+Total bytes: (\d+)")
# A donated argument's allocation is its output's too: `allocation 1: size 512, parameter 0, … maybe-live-out:`.
_ARGUMENT = re.compile(r"^allocation \d+: size (\d+), parameter (?!.*\bcolor\b)", re.MULTILINE)


def figures(folder: pathlib.Path) -> dict[str, Any]:
    """{"temps", "peak"} in bytes of one device's main memory; {} where the report is not there.

    Args:
      folder: that was given as `xla_dump_to`; of several modules the one that needs most is the program.
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
