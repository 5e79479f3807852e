"""Layouts of the weights for inference, and the conversion to them.

Decoding one token reads every weight once, so its speed is the memory bandwidth. The layout of training, stacks
[repeats, *inputs, *outputs] that a scan slices, makes XLA copy weights before it multiplies. Each platform has a layout
that it reads in place:

    CPU, GPU  Every layer has arrays of its own: a matmul cannot read a slice of a stack in place, and copies it. The
              projections of queries, keys and values are one weight, and so are gate and up. Weights are stored with
              the outputs first (`model.linear.OutputMajor`): XLA computes small matrix–vector products as reductions
              over rows, and copies weights whose rows are the inputs.
    TPU       Stacks, which a TPU slices without a copy and which compile in a tenth of the time. Registers are tiles
              of 8 × 128 elements of the last two dimensions, so the projections [D, heads, H] are stored as
              [heads, H, D]; otherwise XLA copies those of all layers in every call.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.model.linear import OutputMajor
from jaxllm.quantize import formats
from jaxllm.quantize.formats import QuantFormat
from jaxllm.quantize.weight import QuantizedWeight
from jaxllm.quantize.weight import quantize as quantize_matrix

_PROJECTIONS = ("q", "k", "v")


class WeightLayout(enum.Enum):
    """Layout of the weights of a program.

    Attributes:
      TRAINING: The tree of `specs.param_specs`.
      PER_LAYER: Layers in `tail`, none stacked; fused projections; outputs first.
      TPU: Stacked; Q, K and V projections transposed to [heads, H, D].
    """

    TRAINING = "training"
    PER_LAYER = "per layer"
    TPU = "tpu"


def layout_for(platform: str) -> WeightLayout:
    """Returns the layout for inference on a platform: cpu | gpu | tpu."""
    return WeightLayout.TPU if platform == "tpu" else WeightLayout.PER_LAYER


def model_in(model: Architecture, layout: WeightLayout) -> Architecture:
    """Returns the architecture that declares the weights and the cache in a layout before they are fused.

    PER_LAYER repeats the kinds of layers in a pattern that is longer than the model, so that every layer is in `tail`.
    """
    if layout is not WeightLayout.PER_LAYER:
        return model
    kinds = (*model.pattern * model.repeats, *model.tail)
    return dataclasses.replace(model, pattern=(*kinds, kinds[0]))


def check_quantization(model: Architecture, layout: WeightLayout, quantize: QuantFormat | None) -> None:
    """Checks, before any weight is read, that the weights of a model can be quantized in a layout.

    Raises:
      UserError: The layout is not PER_LAYER, or the groups do not divide the inputs of a matrix.
    """
    if quantize is None:
        return
    if layout is not WeightLayout.PER_LAYER:
        raise UserError(f"quantized weights are not supported in the layout {layout.value}; omit --quantize")
    formats.check(model, quantize)


def arrange(
    params: Any,
    model: Architecture,
    layout: WeightLayout,
    release: bool = False,
    quantize: QuantFormat | None = None,
) -> Any:
    """Converts weights from the layout of training to another one.

    Args:
      params: Parameter tree of `model`, or of `model_in(model, layout)`.
      model: Architecture of the model.
      layout: The layout.
      release: Whether to delete each source array as soon as it is converted, so that at most one array (one stack, if
        `params` has stacks) exists twice.
      quantize: Format of the matrices of layers, each of which is quantized as soon as it is fused; None keeps them.

    Raises:
      UserError: The weights cannot be quantized in the layout, or a matrix has a NaN or an infinity.
    """
    check_quantization(model, layout, quantize)
    if layout is WeightLayout.TRAINING:
        return params
    if layout is WeightLayout.TPU:
        return _move_axis(params, -3, -1, release)
    if params["layers"]:
        params = _unstack(params, model, release)
    layers = []
    for index, layer in enumerate(params["tail"]):
        fused = _fuse(layer, model, _Storage(quantize, f"layer {index}"))
        layers.append(fused)
        for group in ("attn", "mlp") if release else ():
            for name, x in layer[group].items():
                if fused[group].get(name) is not x:
                    _delete(x)
    return {**params, "tail": tuple(layers)}


def repeat_kv_heads(params: Any, model: Architecture, kv_heads: int, release: bool = False) -> Any:
    """Repeats each key/value head of a tree in the layout of training, so that there are `kv_heads` of them.

    Queries need no change: query heads i·N/K to (i + 1)·N/K of the model read head i, and devices that store copies of
    that head have consecutive parts of these query heads.

    Args:
      params: Parameter tree of `model`.
      model: Architecture of the model.
      kv_heads: A multiple of the model's key/value heads.
      release: Whether to delete each source array as soon as it is repeated.
    """
    if kv_heads == model.kv_heads:
        return params

    def repeat(path: Any, x: jax.Array) -> jax.Array:
        names = [str(getattr(key, "key", "")) for key in path]
        has_heads = names[-1] in ("k", "v", "k_bias", "v_bias")
        if not has_heads and not (model.qk_norm_over == "projection" and "k_norm" in names):
            return x
        repeated = jnp.repeat(x, kv_heads // model.kv_heads, axis=-2)
        if release:
            _delete(x)
        return repeated

    return jax.tree_util.tree_map_with_path(repeat, params)


def restore(params: Any, layout: WeightLayout) -> Any:
    """Returns weights in a layout that model code reads. For use inside a jitted program, where this is free."""
    return _move_axis(params, -1, -3) if layout is WeightLayout.TPU else params


def _move_axis(params: Any, source: int, destination: int, release: bool = False) -> Any:
    def move(path: Any, x: jax.Array) -> jax.Array:
        if path[-1].key not in _PROJECTIONS:
            return x
        moved = jnp.moveaxis(x, source, destination)
        if release:
            _delete(x)
        return moved

    return jax.tree_util.tree_map_with_path(move, params)


def _delete(x: Any) -> None:
    if isinstance(x, jax.Array):  # and not one of NumPy, which a loader may return
        x.delete()


def _unstack(params: Any, model: Architecture, release: bool) -> Any:
    """Moves all layers of the tree to `tail`, in the order of the model."""
    positions = []
    for stacked in params["layers"]:
        leaves, tree = jax.tree.flatten(stacked)
        slices = []
        for leaf in leaves:
            slices.append([leaf[i] for i in range(model.repeats)])
            if release:
                _delete(leaf)
        positions.append([jax.tree.unflatten(tree, layer) for layer in zip(*slices, strict=True)])
    layers = [layer for repeat in zip(*positions, strict=True) for layer in repeat]
    return {**params, "layers": (), "tail": (*layers, *params["tail"])}


@dataclasses.dataclass(frozen=True)
class _Storage:
    """Storage of the matrices of a layer: outputs first, quantized or not.

    Attributes:
      quantize: Format; None stores arrays as they are.
      layer: Name of the layer, for messages.
    """

    quantize: QuantFormat | None
    layer: str

    def __call__(self, x: jax.Array, name: str, lead: int = 0, inputs: int = 1) -> OutputMajor | QuantizedWeight:
        """Moves the input dimensions, which follow `lead` dimensions, to the end, and quantizes."""
        moved = jnp.moveaxis(x, range(lead, lead + inputs), range(-inputs, 0))
        if self.quantize is None:
            return OutputMajor(moved)
        return quantize_matrix(
            moved.reshape(*moved.shape[:-inputs], -1), self.quantize, f"{self.layer}, weight {name},"
        )


def _fuse(layer: dict[str, Any], model: Architecture, store: _Storage) -> dict[str, Any]:
    """Fuses the projections of a layer and stores its matrices with the outputs first."""
    groups = model.heads // model.kv_heads

    def grouped(name: str, x: jax.Array) -> jax.Array:
        """Returns [.., heads, H] as [.., K, heads / K, H]."""
        return x.reshape(*x.shape[:-2], model.kv_heads, groups if name == "q" else 1, x.shape[-1])

    attn, mlp = dict(layer["attn"]), dict(layer["mlp"])
    attn["qkv"] = store(jnp.concatenate([grouped(n, attn.pop(n)) for n in _PROJECTIONS], -2), "qkv")
    if model.qkv_bias:
        attn["qkv_bias"] = jnp.concatenate([grouped(n, attn.pop(f"{n}_bias")) for n in _PROJECTIONS], -2)
    attn["out"] = store(attn["out"], "out", inputs=2)
    experts = 1 if model.experts else 0
    if model.gated:
        mlp["gate_up"] = store(jnp.stack([mlp.pop("gate"), mlp.pop("up")], -2), "gate_up", experts)
        if model.mlp_bias:
            mlp["gate_up_bias"] = jnp.stack([mlp.pop("gate_bias"), mlp.pop("up_bias")], -2)
    else:
        mlp["up"] = store(mlp["up"], "up", experts)
    mlp["down"] = store(mlp["down"], "down", experts)
    return {**layer, "attn": attn, "mlp": mlp}
