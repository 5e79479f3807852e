"""Collectives of a compiled program, parsed from its HLO text: bytes moved, group sizes and execution counts."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

from jaxllm.ledger.compiled.hlo import (
    Computation,
    ExecutionCount,
    Instruction,
    Module,
    Shape,
    executed_instructions,
)

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of one computation, as one device sees it.

    Attributes:
      op: One of COLLECTIVES. An asynchronous one is named like its synchronous form and counted where it starts.
      operands, results: Input and output arrays on this device; several if XLA combined collectives.
      devices: Number of devices in the group, this one included.
      executions: Number of executions, and what is unknown about it.
      computation: Name of the computation that contains it.
    """

    op: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    devices: int
    executions: ExecutionCount
    computation: str

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operands of one execution."""
        return sum(shape.bytes for shape in self.operands)

    @property
    def result_bytes(self) -> int:
        """Bytes of the results of one execution."""
        return sum(shape.bytes for shape in self.results)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({shape.dtype for shape in self.operands}))

    @property
    def volume(self) -> int:
        """Elements that a device sends over all executions, as counted in the ZeRO paper (Rajbhandari et al. 2020, §7).

        A ring all-gather or reduce-scatter of Ψ elements sends Ψ(n−1)/n of them, counted as Ψ. An all-reduce is one of
        each, 2Ψ. Other collectives count their operands.
        """
        if self.devices == 1:
            return 0
        gathered = self.results if self.op == "all-gather" else self.operands
        once = sum(shape.elements for shape in gathered) * (2 if self.op == "all-reduce" else 1)
        return once * self.executions.count

    @property
    def ring_bytes(self) -> float:
        """Bytes that a device sends over all executions with ring algorithms."""
        n = self.devices
        if n == 1:
            return 0.0
        size = max(self.operand_bytes, self.result_bytes) if self.op != "all-gather" else self.result_bytes
        fraction = 1.0 if self.op == "collective-permute" else (n - 1) / n
        return size * fraction * (2 if self.op == "all-reduce" else 1) * self.executions.count


def collectives(module: Module) -> list[Collective]:
    """Returns the executed collectives of a module, in text order within each computation."""
    found = []
    for computation, instruction, executions in executed_instructions(module):
        op = instruction.opcode.removesuffix("-start")
        if op not in COLLECTIVES or _is_async_continuation(computation, instruction):
            continue
        results: tuple[Shape, ...] | None = None
        if op == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
            op, results = "reduce-scatter", tuple(computation.root.shapes)  # a TPU fuses an all-reduce with a slice
        operands = tuple(s for name in instruction.operands for s in computation.instructions[name].shapes)
        found.append(
            Collective(
                op=op,
                operands=operands,
                results=_results(instruction, len(operands)) if results is None else results,
                devices=_devices(instruction.attributes, module.devices),
                executions=executions,
                computation=computation.name,
            )
        )
    return found


def _is_async_continuation(computation: Computation, instruction: Instruction) -> bool:
    """Returns True for the copies of an asynchronous TPU collective in the fusions after the one that starts it."""
    chained = "chain_id=" in instruction.attributes
    return chained and not any("AsyncCollectiveStart" in i.attributes for i in computation.instructions.values())


def _results(instruction: Instruction, operands: int) -> tuple[Shape, ...]:
    """Returns the result shapes, without the operands and handles in the type of an asynchronous collective."""
    found = instruction.shapes
    if instruction.opcode.endswith("-start") and len(found) >= 2 * operands:
        found = found[operands : 2 * operands]
    return tuple(found)


def _devices(attributes: str, all_devices: int) -> int:
    """Returns the group size from `replica_groups`, in any of its three notations, or `source_target_pairs`."""
    if match := re.search(r"source_target_pairs=\{((?:\{[\d,\s]*\}[,\s]*)*)\}", attributes):
        return len(set(re.findall(r"\d+", match[1])))
    if match := re.search(r"replica_groups=\{\s*\{([\d,\s]*)\}", attributes):
        return len(re.findall(r"\d+", match[1]))
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=", attributes):
        return int(match[1].split(",")[-1])
    if match := re.search(r"replica_groups=@?[\w.\-]*\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        named = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[axis]) for axis, part in named)
    return all_devices


def summary(found: Iterable[Collective]) -> list[dict[str, Any]]:
    """Aggregates collectives by operation, dtype, group size and loop uncertainty, as JSON.

    Returns:
      [{"op", "dtype", "devices", "count", "operand_bytes", "result_bytes", "ring_bytes", "volume", "unknown_loops",
      "conditional"}], largest `ring_bytes` first. Bytes and elements are totals over all executions. `unknown_loops`
      names loops with unknown trip count, counted as one trip.
    """
    groups: dict[tuple[Any, ...], list[Collective]] = collections.defaultdict(list)
    for c in found:
        groups[c.op, c.dtypes, c.devices, c.executions.unknown_loops, c.executions.conditional].append(c)
    rows = [
        {
            "op": op,
            "dtype": "+".join(dtypes),
            "devices": devices,
            "count": sum(c.executions.count for c in group),
            "operand_bytes": sum(c.operand_bytes * c.executions.count for c in group),
            "result_bytes": sum(c.result_bytes * c.executions.count for c in group),
            "ring_bytes": round(sum(c.ring_bytes for c in group)),
            "volume": sum(c.volume for c in group),
            "unknown_loops": list(unknown),
            "conditional": conditional,
        }
        for (op, dtypes, devices, unknown, conditional), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["ring_bytes"])
