"""Moments that XLA's CPU backend copies before the step that replaces them, and what lies in their place meanwhile.

The step's new moment is written into the donated buffer of the old one. Where an update reads the old one after the new
one is made, XLA copies the old one at the beginning of the program: Lion's first moment (its direction and its new
moment mix the gradient in different ways), and every moment in bfloat16 (the update of the weights makes the float32
value again). Until the new one is written, the donated buffer is free, and the buffer assignment puts temporaries into
it: larger ones first, each into the smallest place that holds it.
"""

import bisect
from collections.abc import Iterable, Iterator

from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact.optimizer_slots import SLOTS, held
from jaxllm.ledger.formula.exact.run import FLOAT32, Setting
from jaxllm.ledger.rows import Row


def copied(setting: Setting) -> tuple[int, list[int]]:
    """(bytes of the copies, sizes of the buffers that are free meanwhile); nothing where none is copied."""
    name = setting.config.optimizer.name
    if (name != "lion" and setting.moment == FLOAT32) or setting.config.optimizer.offload != "none":
        return 0, []
    sizes = []
    for slot in SLOTS[name]:
        # A number or two of a factored state is not worth a place in the list.
        sizes += [sum(held(slot, parameter, setting)) * setting.moment for parameter in setting.trained]
    total = sum(sizes)
    if len(SLOTS[name]) == 2:
        # The first array is updated last: its second moment's copy lies where its first moment lay.
        first = sum(held(SLOTS[name][0], setting.trained[0], setting)) * setting.moment
        total -= first
        sizes.remove(first)
    return total, sizes


def rows_of_copies(setting: Setting, phase: str, arrays: Iterable[int]) -> Iterator[Row]:
    """A row of the copies, less what lies in the places of the moments.

    Args:
      arrays: bytes of each temporary of the phase.
    """
    total, free = copied(setting)
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
