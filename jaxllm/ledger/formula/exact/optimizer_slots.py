"""Optimizer state that persists between steps, in bytes: exact.

A slot is one more array for each parameter, or for some; `jaxllm.config.optimizers` declares those of each optimizer.
The tests compare all of it with the state that the trainer creates.
"""

import functools

from jaxllm.config.optimizers import OPTIMIZERS
from jaxllm.ledger.formula.exact.layout import Layout
from jaxllm.ledger.formula.exact.run import TrainingRun
from jaxllm.ledger.formula.exact.shard_sizes import Shard, count, without_padding
from jaxllm.ledger.rows import HOST, PERSISTENT, Row, array_row


@functools.lru_cache(maxsize=4096)
def _shards(name: str, layout: Layout) -> dict[str, tuple[Shard, ...]]:
    """Returns slot name -> a device's shard of the slot of each trained parameter, in the order of `layout.trained`.

    A slot with its parameter's shape is sharded as ZeRO shards moments. A factored slot, or its placeholder, is
    replicated on every device.
    """
    return {
        slot.name: tuple(
            p.shard("moment", layout.mesh) if slot.shape(p.spec) == p.spec.shape else Shard(slot.elements(p.spec), 0, 1)
            for p in layout.trained
        )
        for slot in OPTIMIZERS[name].slots
    }


def slot_elements(run: TrainingRun) -> list[list[int]]:
    """Returns, for each slot, its elements on one device for each trained parameter, padding included."""
    shards = _shards(run.config.optimizer.name, run.layout).values()
    return [[shard.elements_per_device for shard in slot] for slot in shards]


@functools.lru_cache(maxsize=4096)
def largest_state(name: str, layout: Layout, moment: int, master: int) -> int:
    """Returns the bytes of the largest per-array state: optimizer slots and master weights of one array.

    Args:
      moment, master: Bytes per element of a moment and of a master weight.
    """
    slots = _shards(name, layout).values()
    return max(
        moment * sum(slot[i].elements_per_device for slot in slots) + master * parameter.weight.elements_per_device
        for i, parameter in enumerate(layout.trained)
    )


@functools.lru_cache(maxsize=4096)
def total_elements(name: str, layout: Layout) -> int:
    """Returns the elements of all slots of an optimizer on one device, padding included."""
    return sum(shard.elements_per_device for slot in _shards(name, layout).values() for shard in slot)


@functools.lru_cache(maxsize=4096)
def _counted(name: str, layout: Layout) -> tuple[tuple[str, int, int], ...]:
    """Returns (slot name, elements of the model, padding elements) on one device for each slot of an optimizer."""
    counted = []
    for slot, shards in _shards(name, layout).items():
        stored = count(shard for shard in shards if shard.elements)
        own = without_padding(stored)
        counted.append((slot, own, stored - own))
    return tuple(counted)


def slot_rows(run: TrainingRun) -> list[Row]:
    """Returns one row per slot, one for padding and one for counters; slots may be in host memory."""
    optimizer = run.config.optimizer
    phase = HOST if optimizer.offload != "none" else PERSISTENT
    counted, size = _counted(optimizer.name, run.layout), run.moment_bytes
    made = [array_row(slot, "optimizer", phase, own, size) for slot, own, _ in counted]
    padding = sum(padding for _, _, padding in counted)
    if padding:
        made.append(array_row("padding of moments", "optimizer", phase, padding, size))
    counters = OPTIMIZERS[optimizer.name].counter_bytes
    if counters:
        made.append(Row("counters", "optimizer", PERSISTENT, counters, f"{counters} B"))
    return made
