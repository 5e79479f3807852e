"""The one declaration of low-rank adapters (LoRA, Hu et al. 2021): y = x·W + (alpha / rank) · (x·A)·B, W frozen.

They are declared from the specs of the weights that they stand beside, so that shapes, shardings, initial values,
counts and ledger rows follow. Their tree has the two groups of layers of the parameter tree:

    {"layers": ({"attn": {"q": {"a": [repeats, *inputs, rank], "b": [repeats, rank, *outputs]}, …}, …}, …), "tail": (…)}
"""

import dataclasses
import math
from typing import Any

from jaxllm.config import LORA_TARGETS, Architecture, LoraConfig
from jaxllm.model.specs import ParamSpec, param_specs

GROUPS = ("layers", "tail")


def adapter_specs(model: Architecture, lora: LoraConfig) -> dict[str, Any] | None:
    """The tree of all adapters, as specs; None where there are none (rank 0)."""
    if not lora.rank:
        return None
    base = param_specs(model)
    return {group: tuple(_of_layer(layer, lora) for layer in base[group]) for group in GROUPS}


def trained_specs(model: Architecture, lora: LoraConfig) -> dict[str, Any]:
    """What a run trains: the adapters, or without them all of the parameters."""
    return adapter_specs(model, lora) or param_specs(model)


def frozen_specs(model: Architecture, lora: LoraConfig) -> dict[str, Any] | None:
    """What a run holds beside them and never changes; None where that is nothing."""
    return param_specs(model) if lora.rank else None


def _of_layer(layer: dict[str, Any], lora: LoraConfig) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for target in lora.targets:
        part = LORA_TARGETS[target]
        parts.setdefault(part, {})[target] = _pair(layer[part][target], lora.rank)
    return parts


def _pair(weight: ParamSpec, rank: int) -> dict[str, ParamSpec]:
    """A and B beside a weight, stacked as it is.

    A has normal random numbers (the paper, section 4.1), of the standard deviation that PEFT's uniform ones have:
    1 / √(3 · inputs). B has zeros, so that training starts from the model as it was.
    """
    first, end = min(weight.fan_in), max(weight.fan_in) + 1
    inputs = math.prod(weight.shape[first:end])
    return {
        "a": dataclasses.replace(
            weight,
            shape=(*weight.shape[:end], rank),
            axes=(*weight.axes[:end], "rank"),
            init="normal",
            scale=1 / math.sqrt(3 * inputs),
        ),
        "b": dataclasses.replace(
            weight,
            shape=(*weight.shape[:first], rank, *weight.shape[end:]),
            axes=(*weight.axes[:first], "rank", *weight.axes[end:]),
            init="zeros",
            scale=0.0,
            fan_in=(first,),
        ),
    }
