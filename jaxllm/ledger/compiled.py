"""The compiled column: what XLA's own buffer assignment says of a program."""

from typing import Any

import jax

from jaxllm.ledger.rows import Unknown

_FIELDS = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliases": "alias_size_in_bytes",
    "temps": "temp_size_in_bytes",
}


def figures(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Bytes on one device, and FLOPs.

    Returns:
      {"arguments", "outputs", "aliases", "temps", "peak", "flops"}: a number or Unknown each. `peak` is
      arguments + outputs + temps − aliases: an output that takes over an argument's buffer is one buffer. It is
      not the backend's own `peak_memory_in_bytes`, which leaves temporaries out on some.
    """
    return read(compiled.memory_analysis(), compiled.cost_analysis())


def read(memory: Any, cost: Any) -> dict[str, Any]:
    """The same from XLA's two analyses; either may be None or lack fields."""
    found: dict[str, Any] = {}
    for name, field in _FIELDS.items():
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
