"""What each optimizer keeps between steps, in bytes: exact.

A slot is one more array for each parameter, or for some. The rules are optax's, stated again here from its
papers and its documented behaviour: the tests hold them against the state that the trainer really makes.
"""

import dataclasses
from collections.abc import Callable

from jaxllm.ledger import rows
from jaxllm.ledger.rows import Row
from jaxllm.model.specs import ParamSpec

FLOAT32 = 4
# optax.scale_by_factored_rms factors the two largest dimensions where both have at least this size.
FACTORED_FROM = 128
# Unused places of a factored state hold one number.
PLACEHOLDER = 1


@dataclasses.dataclass(frozen=True)
class Slot:
    """Attributes:
    name: of the slot.
    numbers: float32 numbers that it keeps for one array of parameters.
    """

    name: str
    numbers: Callable[[ParamSpec], int]


def _every(spec: ParamSpec) -> int:
    return spec.size


def _factored(spec: ParamSpec) -> tuple[int, int, int]:
    """(row, column, whole) numbers of Adafactor's second moment of one array."""
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

# Step counters (int32); Muon has one for each of its two rules, and the coefficients of its polynomial.
_COUNTER_BYTES = {"sgd": 0, "momentum": 0, "adam": 4, "adamw": 4, "lion": 4, "adafactor": 4, "muon": 4 + 4 + 3 * 4}
# The train state's own: step (int32) and the key of its randomness (2 × uint32).
_STATE_BYTES = 4 + 8


def slot_rows(optimizer: str, specs: list[ParamSpec]) -> list[Row]:
    """A row a slot, and one for the counters beside them."""
    made = []
    for slot in SLOTS[optimizer]:
        count = sum(slot.numbers(spec) for spec in specs)
        made.append(rows.row(slot.name, "optimizer", rows.PERSISTENT, f"{count:,} × 4 B", count * FLOAT32))
    counters = _COUNTER_BYTES[optimizer]
    if counters:
        made.append(rows.row("counters", "optimizer", rows.PERSISTENT, f"{counters} B", counters))
    made.append(rows.row("step and key", "state", rows.PERSISTENT, "4 B + 2 × 4 B", _STATE_BYTES))
    return made
