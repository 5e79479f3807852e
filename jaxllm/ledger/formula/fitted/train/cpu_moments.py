"""Copies of old moments that XLA's CPU backend makes at the start of a step, and reuse of the moments' buffers.

The step writes each new moment into the donated buffer of the old one. If an update reads the old moment after it
computes the new one, XLA copies the old one at the start of the program. This applies to Lion's first moment (its
direction and its new moment mix the gradient in different ways) and to every bfloat16 moment (the weight update
recomputes the float32 value). Until the new moment is written, the donated buffer is free, and the buffer assignment
puts temporaries into it: larger ones first, each into the smallest buffer that fits it.
"""

import bisect
from collections.abc import Iterable, Iterator

from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact.optimizer_slots import SLOTS, held
from jaxllm.ledger.formula.exact.run import FLOAT32, TrainingRun
from jaxllm.ledger.rows import Row


def copied(run: TrainingRun) -> tuple[int, list[int]]:
    """Returns (bytes of the copies, sizes of the buffers that are free meanwhile); (0, []) if no moment is copied."""
    name = run.config.optimizer.name
    if (name != "lion" and run.moment_bytes == FLOAT32) or run.config.optimizer.offload != "none":
        return 0, []
    sizes = []
    for slot in SLOTS[name]:
        # The one or two extra elements of a factored state are too few for a separate entry.
        sizes += [sum(held(slot, parameter, run)) * run.moment_bytes for parameter in run.trained]
    total = sum(sizes)
    if len(SLOTS[name]) == 2:
        # The first array is updated last: the copy of its second moment reuses the buffer of its first moment.
        first = sum(held(SLOTS[name][0], run.trained[0], run)) * run.moment_bytes
        total -= first
        sizes.remove(first)
    return total, sizes


def rows_of_copies(run: TrainingRun, phase: str, arrays: Iterable[int]) -> Iterator[Row]:
    """Yields the row of the moment copies, minus the temporaries that reuse the moments' buffers.

    Args:
      arrays: bytes of each temporary of the phase.
    """
    total, free = copied(run)
    if not total:
        return
    places, filled = sorted(free), 0
    for size in sorted(arrays, reverse=True):
        index = bisect.bisect_left(places, size)
        if index < len(places):
            places.pop(index)
            filled += size
    formula = f"{total:,} B − {filled:,} B that lie in their places"
    yield rows.row("copies of old moments", "optimizer", phase, formula, max(total - filled, 0))
