"""Quantization of a model with calibration text, layer by layer: GPTQ and AWQ.

Each layer is run on the activations of the calibration tokens, its matrices are quantized, and the quantized layer
computes the activations of the next one, so that each layer is fitted to the inputs that it will get.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.model import transformer
from jaxllm.model.block import block
from jaxllm.model.layers import align
from jaxllm.model.linear import OutputMajor
from jaxllm.quantize import awq, gptq
from jaxllm.quantize import weight as weight_lib
from jaxllm.quantize.formats import QuantFormat

NEAREST, GPTQ, AWQ = METHODS = ("nearest", "gptq", "awq")
# Matrices of a layer, and the tag of the value that they read.
_ATTENTION = {"qkv": "attn_norm", "out": "attn_context"}
_MLP = {"gate_up": "mlp_norm", "up": "mlp_norm", "down": "mlp_hidden"}

Layer = dict[str, Any]
Hessians = dict[str, Float[np.ndarray, "inputs inputs"]]


def quantize(params: Any, model: Architecture, tokens: Int[np.ndarray, "N T"], fmt: QuantFormat, method: str) -> Any:
    """Quantizes the matrices of all layers.

    Args:
      params: Parameter tree in the layout PER_LAYER, not quantized.
      model: Architecture of the model.
      tokens: Calibration text, as N sequences of T tokens.
      fmt: The format.
      method: nearest | gptq | awq.

    Returns:
      The tree with a `QuantizedWeight` for each matrix.

    Raises:
      UserError: The model has experts, or a matrix or its inputs have a NaN or an infinity.
    """
    if model.experts:
        raise UserError(f"{method} does not support models with experts; use --quantize int8 or int4")
    kinds = (*model.pattern * model.repeats, *model.tail)
    layers, positions = list(params["tail"]), jnp.broadcast_to(jnp.arange(tokens.shape[1]), (1, tokens.shape[1]))
    attention_inputs = transformer.attention_inputs(positions, model)
    hidden = [transformer.embed(jnp.asarray(row[None]), positions, params["embed"], model) for row in tokens]

    def run(layer: Layer, kind: str, x: Array) -> Array:
        return block(x, layer, model, kind, attention_inputs, jnp.ones(positions.shape, bool))[0]

    for index, kind in enumerate(kinds):
        layer, name = layers[index], f"layer {index}"
        if method == NEAREST:
            layers[index] = _quantized(layer, {}, fmt, name)
            continue
        hessians = _hessians(functools.partial(run, layer, kind), hidden, model)
        if method == AWQ:
            layer, hessians = _scaled(layer, hessians, model, fmt, name), {}
        layers[index] = layer = _quantized(layer, hessians, fmt, name)
        hidden = [run(layer, kind, x) for x in hidden]
    return {**params, "tail": tuple(layers)}


def _matrices(layer: Layer) -> dict[tuple[str, str], str]:
    """Returns the tag of the input of each matrix, by group and name in the layer."""
    names = {("attn", name): tag for name, tag in _ATTENTION.items()} | {
        ("mlp", name): tag for name, tag in _MLP.items()
    }
    return {(group, name): tag for (group, name), tag in names.items() if name in layer[group]}


def _hessians(run: Callable[[Array], Array], hidden: list[Array], model: Architecture) -> Hessians:
    """Returns the sum of x·xᵀ over all tokens, for the inputs of the matrices, by tag."""
    sums: Hessians = {}
    for x in hidden:
        for tag, value in _tagged(run, x, model).items():
            rows = np.asarray(value, np.float64).reshape(x.shape[0] * x.shape[1], -1)
            sums[tag] = sums.get(tag, 0) + rows.T @ rows
    return sums


def _tagged(run: Callable[[Array], Array], x: Array, model: Architecture) -> Mapping[str, Array]:
    """Runs a layer and returns the values that its matrices read, which the model tags with `checkpoint_name`."""
    traced = jax.make_jaxpr(run)(x)
    wanted = {*_ATTENTION.values(), *_MLP.values()}
    tags = {eqn.params["name"]: eqn.outvars[0] for eqn in traced.jaxpr.eqns if eqn.primitive.name == "name"}
    if model.norm_placement == "post":  # matrices read the residual stream, not its norm
        tags |= {"attn_norm": traced.jaxpr.invars[0], "mlp_norm": tags["resid_mid"]}
    found = {tag: variable for tag, variable in tags.items() if tag in wanted}
    only = traced.jaxpr.replace(outvars=list(found.values()))
    values = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(only, traced.consts))(x)
    return dict(zip(found, values, strict=True))


def _rows(weight: OutputMajor, hessian: Float[np.ndarray, "inputs inputs"]) -> Float[Array, "*outputs inputs"]:
    """Returns a matrix with all its inputs in one dimension."""
    return weight.array.reshape(-1, hessian.shape[0])


def _quantized(layer: Layer, hessians: Hessians, fmt: QuantFormat, name: str) -> Layer:
    """Quantizes the matrices of a layer: by GPTQ where there is a Hessian, else to nearest."""
    made = {group: dict(layer[group]) for group in ("attn", "mlp")}
    for (group, key), tag in _matrices(layer).items():
        array, fan_in = layer[group][key].array, 2 if key == "out" else 1
        matrix = array.reshape(*array.shape[: array.ndim - fan_in], -1)
        where = f"{name}, weight {key},"
        if hessians:
            made[group][key] = gptq.quantize(matrix, hessians[tag], fmt, where)
        else:
            made[group][key] = weight_lib.quantize(matrix, fmt, where)
    return {**layer, **made}


def _scaled(layer: Layer, hessians: Hessians, model: Architecture, fmt: QuantFormat, name: str) -> Layer:
    """Scales the inputs of a layer's matrices by AWQ's factors and folds their inverses into what computes them.

    Inputs of qkv and gate_up come from a norm, and those of down, in a gated MLP, from the rows of up. Attention's
    outputs come from values that several query heads share, and the hidden units of an MLP without gate from an
    activation: these are not scaled.
    """
    attn, mlp = dict(layer["attn"]), dict(layer["mlp"])
    scaled = {**layer, "attn": attn, "mlp": mlp}
    if model.norm_placement != "post":
        into = "gate_up" if model.gated else "up"
        for group, key, norm in ((attn, "qkv", "attn_norm"), (mlp, into, "mlp_norm")):
            factors = awq.search_scales(
                [_rows(group[key], hessians[norm])], hessians[norm], fmt, f"{name}, weight {key},"
            )
            group[key] = _with_scaled_inputs(group[key], factors)
            scaled[norm] = _divided_norm(layer[norm], factors, model)
    if model.gated:
        hessian = hessians["mlp_hidden"]
        factors = awq.search_scales([_rows(mlp["down"], hessian)], hessian, fmt, f"{name}, weight down,")
        mlp["down"] = _with_scaled_inputs(mlp["down"], factors)
        inverse = jnp.stack([jnp.ones(len(factors)), 1 / factors]).astype(mlp["gate_up"].array.dtype)
        mlp["gate_up"] = OutputMajor(mlp["gate_up"].array * inverse[..., None])
        if model.mlp_bias:
            mlp["gate_up_bias"] = mlp["gate_up_bias"] * inverse
    return scaled


def _with_scaled_inputs(weight: OutputMajor, factors: Float[np.ndarray, " inputs"]) -> OutputMajor:
    return OutputMajor(weight.array * align(jnp.asarray(factors, weight.array.dtype), weight.array))


def _divided_norm(norm: dict[str, Array], factors: Float[np.ndarray, " D"], model: Architecture) -> dict[str, Array]:
    """Returns the weights of a norm whose outputs are divided by factors."""
    shift = 1.0 if model.norm == "rmsnorm_plus_one" else 0.0
    divided = {name: x / factors for name, x in norm.items()}
    divided["scale"] = (norm["scale"] + shift) / factors - shift
    return {name: x.astype(norm[name].dtype) for name, x in divided.items()}
