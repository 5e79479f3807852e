"""Compiles a program and reads its memory, FLOPs and collectives from XLA's analyses and the HLO text."""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxllm.ledger.compiled import collectives as collectives_lib
from jaxllm.ledger.compiled import hlo, matmuls
from jaxllm.ledger.rows import Unknown, figure_from_json, figure_to_json

# Fields for device memory. The host memory fields are separate and not included in them.
_FIELDS = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliases": "alias_size_in_bytes",
    "temps": "temp_size_in_bytes",
}
_HOST_FIELDS = {f"host_{name}": f"host_{field}" for name, field in _FIELDS.items()}
NAMES = (*_FIELDS, *_HOST_FIELDS, "peak", "flops")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def figures(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Returns XLA's memory figures, in bytes on one device, and FLOPs of a compiled program.

    Returns:
      {"arguments", "outputs", "aliases", "temps", the same four with the prefix "host_", "peak", "flops"}: each a
      number or Unknown. `peak` is arguments + outputs + temps − aliases, since an output that aliases an argument
      shares its buffer. It is not the backend's `peak_memory_in_bytes`, which omits temporaries on some backends.
      Buffers in host memory are in the "host_" figures only.
    """
    return read(compiled.memory_analysis(), compiled.cost_analysis())


def read(memory: Any, cost: Any) -> dict[str, Any]:
    """Extracts the result of `figures` from XLA's memory and cost analyses; either may be None or lack fields."""
    found: dict[str, Any] = {}
    for name, field in (_FIELDS | _HOST_FIELDS).items():
        value = getattr(memory, field, None)
        why = "this backend gives no memory analysis" if memory is None else f"its memory analysis has no {field}"
        found[name] = Unknown(why) if value is None else int(value)
    lacking = [name for name in _FIELDS if isinstance(found[name], Unknown)]
    if lacking:
        found["peak"] = Unknown(f"{', '.join(lacking)}: {found[lacking[0]].why}")
    else:
        found["peak"] = found["arguments"] + found["outputs"] + found["temps"] - found["aliases"]
    cost = cost[0] if isinstance(cost, (list, tuple)) and cost else cost
    flops = cost.get("flops") if isinstance(cost, dict) else None
    # XLA reports a negative number, or none, if the FLOPs are unknown.
    found["flops"] = int(flops) if flops is not None and flops >= 0 else Unknown("its cost analysis has no flops")
    return found


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Result of compiling a program: memory figures, collectives and matmuls, or the compiler's out-of-memory error.

    Attributes:
      figures: Result of `figures`; all Unknown after an out-of-memory error, except a peak that the error names.
      collectives: Result of `collectives.summary`; Unknown if the HLO text cannot be parsed.
      matmul_counts: Fields of `matmuls.Matmuls`; Unknown if the HLO text cannot be parsed.
      seconds: Compile time.
      oom_message: The compiler's message if the program does not fit the device, else "".
    """

    figures: Mapping[str, Any]
    collectives: list[dict[str, Any]] | Unknown
    matmul_counts: Mapping[str, Any] | Unknown
    seconds: float
    oom_message: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "figures": {name: figure_to_json(value) for name, value in self.figures.items()},
            "collectives": figure_to_json(self.collectives),
            "products": figure_to_json(self.matmul_counts),
            "seconds": round(self.seconds, 3),
            "refused": self.oom_message,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Inspection":
        collectives, matmul_counts = value["collectives"], value["products"]
        return cls(
            figures={name: figure_from_json(figure) for name, figure in value["figures"].items()},
            collectives=collectives if isinstance(collectives, list) else figure_from_json(collectives),
            matmul_counts=figure_from_json(matmul_counts) if "unknown" in matmul_counts else matmul_counts,
            seconds=value["seconds"],
            oom_message=value["refused"],
        )


def inspect(
    compile_: Callable[[], jax.stages.Compiled],
    figures_of: Callable[[jax.stages.Compiled], Mapping[str, Any]] = figures,
) -> Inspection:
    """Compiles a program and inspects it; a compiler's out-of-memory error is returned, not raised.

    Args:
      compile_: Function that compiles the program.
      figures_of: Replaces `figures` for backends whose `memory_analysis` is not enough.
    Raises:
      jax.errors.JaxRuntimeError: Compilation failed for another reason.
    """
    begun = time.perf_counter()
    try:
        compiled = compile_()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return oom_inspection(str(error), time.perf_counter() - begun)
    seconds = time.perf_counter() - begun
    collectives: list[dict[str, Any]] | Unknown
    matmul_counts: Mapping[str, Any] | Unknown
    try:
        module = hlo.parse(compiled.as_text() or "")
        collectives = collectives_lib.summary(collectives_lib.collectives(module))
        matmul_counts = dataclasses.asdict(matmuls.count_matmuls(module))
    except (ValueError, KeyError, IndexError) as error:  # HLO syntax that the parser does not support
        collectives = matmul_counts = Unknown(f"the program's text cannot be read: {type(error).__name__}: {error}")
    return Inspection(figures_of(compiled), collectives, matmul_counts, seconds)


def oom_inspection(message: str, seconds: float) -> Inspection:
    """Builds the Inspection of a RESOURCE_EXHAUSTED error; `peak` is the size in its message, else Unknown."""
    told = " ".join(message.split())
    told = told[told.find("RESOURCE_EXHAUSTED") :]
    first = re.split(r"(?<=[a-z).]\.) (?=[A-Z])", told)[0]
    why = Unknown(f"the compiler refused: {first[:200]}")
    found: dict[str, Any] = dict.fromkeys(NAMES, why)
    needs = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available", told) or re.search(r"Used ([\d.]+)([KMGT]?) of", told)
    if needs:
        found["peak"] = int(float(needs[1]) * _UNITS[needs[2]])
    return Inspection(found, why, why, seconds, first[:200])
