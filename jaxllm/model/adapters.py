"""Low-rank adapters in a model: their tree (`jaxllm.model.adapter_specs`) beside the weights', or in it.

Joined with the weights, a layer's part has its adapters under ADAPTERS: {"q": W, …, "lora": {"q": {"a", "b"}}}. The
model's functions multiply x with A and the result with B, which comes to them times alpha / rank.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import Architecture, LoraConfig
from jaxllm.model.adapter_specs import GROUPS
from jaxllm.model.specs import ParamSpec, param_specs

ADAPTERS = "lora"  # their name in a layer's part of the joined tree, and the tag of x·A


def scale_of(lora: LoraConfig) -> float:
    """Of what adapters add; 0 where there are none."""
    return lora.alpha / lora.rank if lora.rank else 0.0


def scaled(adapters: Any, scale: float) -> Any:
    """The adapters with every B times `scale`: their products then need no scale of their own."""

    def visit(node: Any) -> Any:
        if isinstance(node, tuple):
            return tuple(map(visit, node))
        if "b" in node:
            return {"a": node["a"], "b": jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype), node["b"])}
        return {name: visit(part) for name, part in node.items()}

    return visit(adapters)


def joined(weights: dict[str, Any], adapters: dict[str, Any] | None) -> dict[str, Any]:
    """The parameter tree with the adapters in it. Trees of anything: arrays, specs, placements.

    Args:
      weights: a tree like `param_specs`.
      adapters: a tree like `adapter_specs`; None leaves the weights as they are.
    """
    if adapters is None:
        return weights

    def layer(part: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        return {name: {**tree, ADAPTERS: beside[name]} if name in beside else tree for name, tree in part.items()}

    groups = {group: tuple(map(layer, weights[group], adapters[group])) for group in GROUPS}
    return {name: groups.get(name, tree) for name, tree in weights.items()}


def merged(
    model: Architecture, weights: dict[str, Any], adapters: dict[str, Any], scale: float, dtype: jax.typing.DTypeLike
) -> dict[str, Any]:
    """The parameter tree of a plain model that computes the same: W + scale · A·B, added in float32.

    Args:
      weights: of the model, padded or not; those without an adapter stay as they are.
      dtype: of the sums.
    """
    specs = param_specs(model)

    def add(weight: jax.Array, pair: dict[str, jax.Array], spec: ParamSpec) -> jax.Array:
        lead = spec.shape[: min(spec.fan_in)]
        a, b = (x.astype(jnp.float32) for x in (pair["a"], pair["b"]))
        rank = a.shape[-1]
        change = jnp.matmul(a.reshape(*lead, -1, rank), b.reshape(*lead, rank, -1), precision=jax.lax.Precision.HIGHEST)
        padding = [(0, stored - size) for stored, size in zip(weight.shape, spec.shape, strict=True)]
        return (weight.astype(jnp.float32) + scale * jnp.pad(change.reshape(spec.shape), padding)).astype(dtype)

    def layer(part: Any, beside: Any, spec: Any) -> Any:
        changed = {
            name: {target: add(part[name][target], pair, spec[name][target]) for target, pair in pairs.items()}
            for name, pairs in beside.items()
        }
        return {name: {**tree, **changed[name]} if name in changed else tree for name, tree in part.items()}

    groups = {group: tuple(map(layer, weights[group], adapters[group], specs[group])) for group in GROUPS}
    return {name: groups.get(name, tree) for name, tree in weights.items()}
