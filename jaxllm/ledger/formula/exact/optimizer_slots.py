"""Optimizer state that persists between steps, in bytes: exact.

A slot is one more array for each parameter, or for some. The rules are those of optax, written here independently from
its papers and documented behaviour: the tests compare them with the state that the trainer creates.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact.layout import Layout, Parameter
from jaxllm.ledger.formula.exact.run import TrainingRun
from jaxllm.ledger.formula.exact.shard_sizes import Count, Shard, count, without_padding
from jaxllm.ledger.rows import Row
from jaxllm.model.specs import ParamSpec

# optax.scale_by_factored_rms factors the two largest dimensions if both have at least this size.
FACTORED_FROM = 128
# Elements of an unused array of a factored state.
PLACEHOLDER = 1


@dataclasses.dataclass(frozen=True)
class Slot:
    """One optimizer slot, such as Adam's first moment.

    Attributes:
      name: Name of the slot.
      numbers: Returns the elements that the slot stores for one parameter array.
    """

    name: str
    elements: Callable[[ParamSpec], int]


def _every(spec: ParamSpec) -> int:
    return spec.size


def _factored(spec: ParamSpec) -> tuple[int, int, int]:
    """Returns the elements of Adafactor's second moment of one array, as (row, column, unfactored)."""
    by_size = sorted(spec.shape)
    if len(by_size) < 2 or by_size[-2] < FACTORED_FROM:
        return PLACEHOLDER, PLACEHOLDER, spec.size
    return spec.size // by_size[-1], spec.size // by_size[-2], PLACEHOLDER


def _matrices(spec: ParamSpec) -> int:
    return spec.size if spec.role == "matrix" else 0


def _not_matrices(spec: ParamSpec) -> int:
    return 0 if spec.role == "matrix" else spec.size


_ADAM = (Slot("m, first moment", _every), Slot("v, second moment", _every))

SLOTS: dict[str, tuple[Slot, ...]] = {
    "sgd": (),
    "momentum": (Slot("momentum", _every),),
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": (Slot("m, first moment", _every),),
    "adafactor": (
        Slot("v, by row", lambda spec: _factored(spec)[0]),
        Slot("v, by column", lambda spec: _factored(spec)[1]),
        Slot("v, not factored", lambda spec: _factored(spec)[2]),
    ),
    "muon": (
        Slot("momentum of matrices", _matrices),
        Slot("m of what is no matrix", _not_matrices),
        Slot("v of what is no matrix", _not_matrices),
    ),
}

# Step counters (int32). Muon has one for each of its two update rules, and three polynomial coefficients.
_COUNTER_BYTES = {"sgd": 0, "momentum": 0, "adam": 4, "adamw": 4, "lion": 4, "adafactor": 4, "muon": 4 + 4 + 3 * 4}


def held(slot: Slot, parameter: Parameter, run: TrainingRun) -> tuple[int, int]:
    """Returns the elements of a slot on one device, as (elements of the model, padding elements).

    A slot with its parameter's shape is sharded as ZeRO shards moments. A factored slot, or its placeholder, is
    replicated on every device.
    """
    return _held(run.config.optimizer.name, run.layout)[slot.name, parameter.name]


@functools.lru_cache(maxsize=4096)
def _held(name: str, layout: Layout) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns (slot name, parameter name) -> the result of `held`, for all slots of an optimizer."""
    found = {}
    for slot in SLOTS[name]:
        for parameter in layout.trained:
            elements, spec = slot.elements(parameter.spec), parameter.spec
            if elements != spec.size:
                found[slot.name, parameter.name] = elements, 0
                continue
            stored = layout.per_device(parameter.moment)
            own = elements * stored // math.prod(parameter.moment.shape)
            found[slot.name, parameter.name] = own, stored - own
    return found


@functools.lru_cache(maxsize=4096)
def largest_state(name: str, layout: Layout, moment: int, master: int) -> int:
    """Returns the bytes of the largest per-array state: optimizer slots and master weights of one array.

    Args:
      moment, master: Bytes per element of a moment and of a master weight.
    """
    return max(
        moment * sum(sum(_held(name, layout)[slot.name, parameter.name]) for slot in SLOTS[name])
        + master * layout.per_device(parameter.weight)
        for parameter in layout.trained
    )


@functools.lru_cache(maxsize=4096)
def _counted(name: str, layout: Layout) -> list[tuple[str, Count, int]]:
    """Returns (name, elements of the model, padding elements) on one device for each slot of an optimizer."""
    counted = []
    for slot in SLOTS[name]:
        parts = []
        for parameter in layout.trained:
            elements = slot.elements(parameter.spec)
            # A slot without its parameter's shape is replicated on every device.
            whole = elements != parameter.spec.size
            parts.append(Shard(elements, 0, 1) if whole else layout.shard_of("moment", parameter))
        stored = count(part for part in parts if part.elements)
        own = without_padding(stored)
        counted.append((slot.name, own, stored - own))
    return counted


def elements_held(run: TrainingRun) -> int:
    """Returns the elements of all slots on one device, padding included."""
    return sum(own + padding for _, own, padding in _counted(run.config.optimizer.name, run.layout))


def slot_rows(run: TrainingRun) -> list[Row]:
    """Returns one row per slot, one for padding and one for counters; slots may be in host memory."""
    optimizer = run.config.optimizer
    phase = rows.HOST if optimizer.offload != "none" else rows.PERSISTENT
    made, padding, size = [], 0, run.moment_bytes
    for name, own, beside in _counted(optimizer.name, run.layout):
        padding += beside
        made.append(rows.array_row(name, "optimizer", phase, own, size))
    if padding:
        made.append(rows.array_row("padding of moments", "optimizer", phase, padding, size))
    counters = _COUNTER_BYTES[optimizer.name]
    if counters:
        made.append(rows.row("counters", "optimizer", rows.PERSISTENT, f"{counters} B", counters))
    return made
