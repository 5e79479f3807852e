"""Specs of low-rank adapters (LoRA, Hu et al. 2021): y = x·W + (alpha / rank) · (x·A)·B, with W frozen.

Each adapter's specs are derived from the spec of its weight. Shapes, shardings, initial values, counts and ledger rows
all follow from them. The adapter tree has the two layer groups of the parameter tree:

    {"layers": ({"attn": {"q": {"a": [repeats, *inputs, rank], "b": [repeats, rank, *outputs]}, …}, …}, …), "tail": (…)}
"""

import dataclasses
import math
from typing import Any

from jaxllm.config import LORA_TARGETS, Architecture, LoraConfig
from jaxllm.model.specs import ParamSpec, param_specs

GROUPS = ("layers", "tail")


def adapter_specs(model: Architecture, lora: LoraConfig) -> dict[str, Any] | None:
    """Returns the specs of all adapters, or None if the rank is 0."""
    if not lora.rank:
        return None
    base = param_specs(model)
    return {group: tuple(_layer_adapter_specs(layer, lora) for layer in base[group]) for group in GROUPS}


def trained_specs(model: Architecture, lora: LoraConfig) -> dict[str, Any]:
    """Returns the specs of the trained arrays: the adapters if there are any, otherwise all parameters."""
    return adapter_specs(model, lora) or param_specs(model)


def frozen_specs(model: Architecture, lora: LoraConfig) -> dict[str, Any] | None:
    """Returns the specs of the frozen weights under the adapters, or None if all parameters are trained."""
    return param_specs(model) if lora.rank else None


def _layer_adapter_specs(layer: dict[str, Any], lora: LoraConfig) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for target in lora.targets:
        part = LORA_TARGETS[target]
        parts.setdefault(part, {})[target] = _adapter_pair(layer[part][target], lora.rank)
    return parts


def _adapter_pair(weight: ParamSpec, rank: int) -> dict[str, ParamSpec]:
    """Returns the specs of a weight's A and B, with the same stacked dimensions as the weight.

    A is initialized from a normal distribution (section 4.1 of the paper) with the standard deviation of PEFT's uniform
    initialization, 1 / √(3 · inputs). B is initialized to zeros, so training starts from the unchanged model.
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
