"""Copies of old moments that XLA's CPU backend makes at the start of a step, and reuse of the moments' buffers.

The step writes each new moment into the donated buffer of the old one. If an update reads the old moment after it
computes the new one, XLA copies the old one at the start of the program. This applies to Lion's first moment (its
direction and its new moment mix the gradient in different ways) and to every bfloat16 moment (the weight update
recomputes the float32 value). Until the new moment is written, the donated buffer is free, and the buffer assignment
puts temporaries into it: larger ones first, each into the smallest buffer that fits it.
"""

import bisect
from collections.abc import Iterable, Iterator

from jaxllm.config.optimizers import OPTIMIZERS
from jaxllm.ledger.formula.exact.optimizer_slots import slot_elements
from jaxllm.ledger.formula.exact.run import FLOAT32, TrainingRun
from jaxllm.ledger.rows import Row


def copied(run: TrainingRun) -> tuple[int, list[int]]:
    """Returns (bytes of the copies, sizes of the buffers that are free meanwhile); (0, []) if no moment is copied."""
    optimizer = run.config.optimizer
    rereads = OPTIMIZERS[optimizer.name].rereads_moment or run.moment_bytes != FLOAT32
    if not rereads or optimizer.offload != "none":
        return 0, []
    slots = [[elements * run.moment_bytes for elements in slot] for slot in slot_elements(run)]
    # The one or two extra elements of a factored state are too few for a separate entry.
    sizes = [size for slot in slots for size in slot]
    total = sum(sizes)
    if len(slots) == 2:
        # The first array is updated last: the copy of its second moment reuses the buffer of its first moment.
        total -= slots[0][0]
        sizes.remove(slots[0][0])
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
    formula = f"{total:,} B − {filled:,} B that reuse their buffers"
    yield Row("copies of old moments", "optimizer", phase, max(total - filled, 0), formula)
