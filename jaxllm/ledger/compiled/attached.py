"""The compiled column: what XLA's own buffer assignment and the program's text say."""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxllm.ledger.compiled import collectives as collectives_lib
from jaxllm.ledger.compiled import hlo
from jaxllm.ledger.compiled import matmuls as products_lib
from jaxllm.ledger.rows import Unknown, figure_from_json, figure_to_json

# On the device; then the same in the host's memory, which are not in the device's.
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
    """Bytes on one device, and FLOPs.

    Returns:
      {"arguments", "outputs", "aliases", "temps", the same with "host_" before them, "peak", "flops"}: a number or
      Unknown each. `peak` is arguments + outputs + temps − aliases: an output that takes over an argument's buffer
      is one buffer. It is not the backend's own `peak_memory_in_bytes`, which leaves temporaries out on some. What
      is in host memory is in the host's figures only.
    """
    return read(compiled.memory_analysis(), compiled.cost_analysis())


def read(memory: Any, cost: Any) -> dict[str, Any]:
    """The same from XLA's two analyses; either may be None or lack fields."""
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
    # XLA writes a negative number, or nothing, where it cannot tell.
    found["flops"] = int(flops) if flops is not None and flops >= 0 else Unknown("its cost analysis has no flops")
    return found


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What compiling a program told.

    Attributes:
      figures: of `figures`; all Unknown where the compiler refused.
      collectives: of `collectives.summary`; Unknown where the text cannot be read.
      products: fields of `products.Products`; likewise.
      seconds: that compiling took.
      refused: the compiler's own words where the program does not fit the device; "" where it does.
    """

    figures: Mapping[str, Any]
    collectives: list[dict[str, Any]] | Unknown
    products: Mapping[str, Any] | Unknown
    seconds: float
    refused: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "figures": {name: figure_to_json(value) for name, value in self.figures.items()},
            "collectives": figure_to_json(self.collectives),
            "products": figure_to_json(self.products),
            "seconds": round(self.seconds, 3),
            "refused": self.refused,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Inspection":
        collectives, products = value["collectives"], value["products"]
        return cls(
            figures={name: figure_from_json(figure) for name, figure in value["figures"].items()},
            collectives=collectives if isinstance(collectives, list) else figure_from_json(collectives),
            products=figure_from_json(products) if "unknown" in products else products,
            seconds=value["seconds"],
            refused=value["refused"],
        )


def inspect(
    compile_: Callable[[], jax.stages.Compiled],
    figures_of: Callable[[jax.stages.Compiled], Mapping[str, Any]] = figures,
) -> Inspection:
    """Compiles and reads what came of it. A program that the compiler finds too large for the device is a result.

    Args:
      figures_of: where a backend's `memory_analysis` is not enough.
    Raises:
      jax.errors.JaxRuntimeError: the compiler failed for another reason.
    """
    begun = time.perf_counter()
    try:
        compiled = compile_()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return refusal(str(error), time.perf_counter() - begun)
    seconds = time.perf_counter() - begun
    collectives: list[dict[str, Any]] | Unknown
    products: Mapping[str, Any] | Unknown
    try:
        module = hlo.parse(compiled.as_text() or "")
        collectives = collectives_lib.summary(collectives_lib.collectives(module))
        products = dataclasses.asdict(products_lib.products(module))
    except (ValueError, KeyError, IndexError) as error:  # a spelling of XLA's that we do not know yet
        collectives = products = Unknown(f"the program's text cannot be read: {type(error).__name__}: {error}")
    return Inspection(figures_of(compiled), collectives, products, seconds)


def refusal(message: str, seconds: float) -> Inspection:
    """What a compiler's RESOURCE_EXHAUSTED tells: `peak` is the size that it names, where it names one."""
    told = " ".join(message.split())
    told = told[told.find("RESOURCE_EXHAUSTED") :]
    first = re.split(r"(?<=[a-z).]\.) (?=[A-Z])", told)[0]
    why = Unknown(f"the compiler refused: {first[:200]}")
    found: dict[str, Any] = dict.fromkeys(NAMES, why)
    needs = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available", told) or re.search(r"Used ([\d.]+)([KMGT]?) of", told)
    if needs:
        found["peak"] = int(float(needs[1]) * _UNITS[needs[2]])
    return Inspection(found, why, why, seconds, first[:200])
