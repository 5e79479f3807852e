"""Arrays that a training step holds beside the state on every platform, and the pieces that platforms share: exact.

Batch, copies that compute, accumulators, gradients, and what waits for the backward pass. What XLA makes of the rest is
in `workspaces_gpu`, `workspaces_tpu` and `workspaces_cpu`.
"""

import math
from collections.abc import Iterable, Iterator

from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact.activations import rows_between_passes
from jaxllm.ledger.formula.exact.optimizer_slots import largest_state
from jaxllm.ledger.formula.exact.run import FLOAT32, Parameter, Setting
from jaxllm.ledger.formula.exact.shard_sizes import Count
from jaxllm.ledger.rows import Row
from jaxllm.ledger.rows import numbers as numbers
from jaxllm.model.specs import ParamSpec

# tokens, targets, segment_ids, positions: int32; weights: float32.
BATCH_BYTES_PER_TOKEN = 5 * 4


def from_host(setting: Setting, phase: str) -> Iterator[Row]:
    """State of the largest array where it is kept in host memory: brought to the device while the gradients are made.

    Updates go array by array (ZeRO-Offload, Ren et al. 2021), so that no more than a few are there at a time.
    """
    optimizer = setting.config.optimizer
    if optimizer.offload == "none":
        return
    masters = setting.store if optimizer.offload == "all" else 0
    size = largest_state(optimizer.name, setting.layout, setting.moment, masters)
    yield rows.row("state of one array, from host memory", "optimizer", phase, f"{size:,} B", size)


def batch(setting: Setting, phase: str) -> Row:
    size = setting.step_tokens * BATCH_BYTES_PER_TOKEN
    return rows.row("batch", "batch", phase, f"{setting.step_tokens:,} tokens × {BATCH_BYTES_PER_TOKEN} B", size)


def gradient_numbers(setting: Setting, parameters: Iterable[Parameter]) -> Count:
    """Numbers of their gradients on one device while they are taken: whole, or shares from stage 2 on."""
    return setting.count("share" if setting.stage >= 2 else "computing", parameters)


def between_passes(setting: Setting, phase: str, copies: Iterable[Parameter], copy_bytes: int) -> Iterator[Row]:
    """What lives from the forward pass to the end of the backward pass.

    Args:
      copies: arrays whose copies in the compute dtype are there; frozen ones have none, as they are stored in it.
      copy_bytes: in which the platform holds a number of them.
    """
    yield batch(setting, phase)
    if setting.mixed:
        shares = setting.stage == 3
        count = setting.count("weight" if shares else "computing", [p for p in copies if p.trained])
        name = "compute copy of weights, shares" if shares else "compute copy of weights"
        yield numbers(name, "weights", phase, count, copy_bytes)
    elif setting.layout.frozen:  # every B times alpha / rank
        count = gradient_numbers(setting, [p for p in setting.trained if p.name.endswith(".b")])
        yield numbers("adapters, scaled", "weights", phase, count, setting.compute)
    if setting.accumulates:
        count = gradient_numbers(setting, setting.trained)
        yield numbers("accumulated gradients", "gradient accumulator", phase, count, FLOAT32)
    yield from rows_between_passes(setting, phase)


def one_layer(setting: Setting, trained: bool = True) -> int:
    """Numbers of the weights of one layer, as they compute; without those that are trained where that is False."""
    arrays = setting.select("layers") or setting.select("tail")
    arrays = [p for p in arrays if trained or not p.trained]
    layers = len(setting.model.pattern if setting.model.repeats else setting.model.tail)
    return sum(of_one_layer(setting, parameter) for parameter in arrays) // layers


def of_one_layer(setting: Setting, parameter: Parameter) -> int:
    """Numbers of an array, or of one layer of its stack, while it computes."""
    return setting.computing(parameter) // (setting.model.repeats if parameter.group == "layers" else 1)


def gram_numbers(spec: ParamSpec) -> int:
    """Muon's Newton–Schulz steps square each matrix of an array over its shorter side."""
    inputs = math.prod(spec.shape[i] for i in spec.fan_in)
    counted = [i for i, axis in enumerate(spec.axes) if axis in ("layers", "experts") and i < min(spec.fan_in)]
    matrices = math.prod(spec.shape[i] for i in counted)
    return matrices * min(inputs, spec.size // (matrices * inputs)) ** 2
