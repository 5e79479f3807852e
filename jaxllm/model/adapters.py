"""Low-rank adapters in a model: joining the adapter tree with the weights, scaling it, and merging it into them.

The adapter tree is declared in `jaxllm.model.adapter_specs`. In a joined tree, each part of a layer has its adapters
under the key ADAPTERS: {"q": W, …, "lora": {"q": {"a", "b"}}}. The model computes (x·A)·B with B already multiplied by
alpha / rank.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import Architecture, LoraConfig
from jaxllm.model.adapter_specs import GROUPS
from jaxllm.model.specs import ParamSpec, param_specs

ADAPTERS = "lora"  # key of the adapters in a joined tree, and remat tag of x·A


def scale_of(lora: LoraConfig) -> float:
    """Returns the scale of the adapters' output, alpha / rank; 0 if there are no adapters."""
    return lora.alpha / lora.rank if lora.rank else 0.0


def scaled(adapters: Any, scale: float) -> Any:
    """Returns the adapters with every B multiplied by `scale`, so the model applies no scale to activations."""

    def visit(node: Any) -> Any:
        if isinstance(node, tuple):
            return tuple(map(visit, node))
        if "b" in node:
            return {"a": node["a"], "b": jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype), node["b"])}
        return {name: visit(part) for name, part in node.items()}

    return visit(adapters)


def joined(weights: dict[str, Any], adapters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the parameter tree with the adapters inserted; leaves may be arrays, specs or placements.

    Args:
      weights: Tree with the structure of `param_specs`.
      adapters: Tree with the structure of `adapter_specs`; None returns the weights unchanged.
    """
    if adapters is None:
        return weights

    def join_layer(layer: dict[str, Any], pairs: dict[str, Any]) -> dict[str, Any]:
        return {name: {**tree, ADAPTERS: pairs[name]} if name in pairs else tree for name, tree in layer.items()}

    groups = {group: tuple(map(join_layer, weights[group], adapters[group])) for group in GROUPS}
    return {name: groups.get(name, tree) for name, tree in weights.items()}


def merged(
    model: Architecture, weights: dict[str, Any], adapters: dict[str, Any], scale: float, dtype: jax.typing.DTypeLike
) -> dict[str, Any]:
    """Merges adapters into the weights, W + scale · A·B, for an equivalent model without adapters.

    The sum is computed in float32.

    Args:
      model: Architecture of the model.
      weights: Parameter tree, padded or not; weights without an adapter are returned unchanged.
      adapters: Tree with the structure of `adapter_specs`.
      scale: alpha / rank.
      dtype: Dtype of the merged weights.
    """
    specs = param_specs(model)

    def add(weight: jax.Array, pair: dict[str, jax.Array], spec: ParamSpec) -> jax.Array:
        lead = spec.shape[: min(spec.fan_in)]
        a, b = (x.astype(jnp.float32) for x in (pair["a"], pair["b"]))
        rank = a.shape[-1]
        product = jnp.matmul(
            a.reshape(*lead, -1, rank), b.reshape(*lead, rank, -1), precision=jax.lax.Precision.HIGHEST
        )
        padding = [(0, stored - size) for stored, size in zip(weight.shape, spec.shape, strict=True)]
        return (weight.astype(jnp.float32) + scale * jnp.pad(product.reshape(spec.shape), padding)).astype(dtype)

    def merge_layer(layer: Any, adapters: Any, specs: Any) -> Any:
        merged = {
            name: {target: add(layer[name][target], pair, specs[name][target]) for target, pair in pairs.items()}
            for name, pairs in adapters.items()
        }
        return {name: {**tree, **merged[name]} if name in merged else tree for name, tree in layer.items()}

    groups = {group: tuple(map(merge_layer, weights[group], adapters[group], specs[group])) for group in GROUPS}
    return {name: groups.get(name, tree) for name, tree in weights.items()}
