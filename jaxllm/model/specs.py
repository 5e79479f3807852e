"""The one declaration of parameters and of the KV cache.

Initial values, abstract shapes, shardings, parameter counts and ledger rows are all derived from these
trees; nothing lists the parameters a second time.

A parameter tree is `{"embed": …, "layers": (…), "tail": (…), "final_norm": …, ["head": …]}`. `layers` has one
entry for each kind in the layer pattern, stacked over the pattern's repeats (the scan's length); `tail` has
the layers after the last whole pattern, not stacked. A KV cache has the same two groups.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxllm.config import Architecture

Role = Literal["matrix", "embedding", "head", "bias", "norm", "cache", "cache scale"]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One array: its shape, a logical name for each dimension, and how it starts.

    Attributes:
      shape: of the whole array, over all devices.
      axes: a logical axis for each dimension (`jaxllm.parallel.mesh` maps them to mesh axes).
      role: what the array is to the model; decides weight decay and Muon's choice of matrices.
      init: "normal" | "zeros" | "ones".
      scale: standard deviation, where init is "normal".
      fan_in: the dimensions that a product with this array sums over; Muon's reduction axes.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    role: Role
    init: Literal["normal", "zeros", "ones"]
    scale: float = 0.0
    fan_in: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay belongs on what is multiplied with activations, not on biases and norms."""
        return self.role in ("matrix", "embedding", "head")


def is_spec(node: Any) -> bool:
    return isinstance(node, ParamSpec)


def map_specs(function: Callable[[ParamSpec], Any], specs: Any) -> Any:
    """`jax.tree.map` with a ParamSpec as the leaf."""
    return jax.tree.map(function, specs, is_leaf=is_spec)


def _norm_specs(model: Architecture, width: int, axis: str) -> dict[str, ParamSpec]:
    # A "1 + w" norm starts as the identity at w = 0.
    init: Literal["zeros", "ones"] = "zeros" if model.norm == "rmsnorm_plus_one" else "ones"
    specs = {"scale": ParamSpec((width,), (axis,), "norm", init)}
    if model.norm == "layernorm":
        specs["bias"] = ParamSpec((width,), (axis,), "bias", "zeros")
    return specs


def _attention_specs(model: Architecture) -> dict[str, Any]:
    D, N, K, H = model.width, model.heads, model.kv_heads, model.head_dim
    std, out_std = model.init_std, model.init_std / math.sqrt(2 * model.layers)
    specs: dict[str, Any] = {
        "q": ParamSpec((D, N, H), ("embed", "heads", "head_dim"), "matrix", "normal", std, (0,)),
        "k": ParamSpec((D, K, H), ("embed", "kv_heads", "head_dim"), "matrix", "normal", std, (0,)),
        "v": ParamSpec((D, K, H), ("embed", "kv_heads", "head_dim"), "matrix", "normal", std, (0,)),
        "out": ParamSpec((N, H, D), ("heads", "head_dim", "embed"), "matrix", "normal", out_std, (0, 1)),
    }
    if model.qkv_bias:
        specs["q_bias"] = ParamSpec((N, H), ("heads", "head_dim"), "bias", "zeros")
        specs["k_bias"] = ParamSpec((K, H), ("kv_heads", "head_dim"), "bias", "zeros")
        specs["v_bias"] = ParamSpec((K, H), ("kv_heads", "head_dim"), "bias", "zeros")
    if model.out_bias:
        specs["out_bias"] = ParamSpec((D,), ("embed",), "bias", "zeros")
    if model.qk_norm:
        for name, heads in (("q", N), ("k", K)):
            scale = _norm_specs(model, H, "head_dim")["scale"]  # an RMSNorm, which has no bias
            if model.qk_norm_over == "projection":
                axes = specs[name].axes[1:]
                scale = dataclasses.replace(scale, shape=(heads, H), axes=axes)
            specs[f"{name}_norm"] = {"scale": scale}
    return specs


def _mlp_specs(model: Architecture) -> dict[str, Any]:
    D, F, E = model.width, model.mlp_width, model.experts
    std, out_std = model.init_std, model.init_std / math.sqrt(2 * model.layers)
    # An expert's matrices are a dense MLP's with one more dimension in front.
    lead, lead_axes, shift = ((E,), ("experts",), 1) if E else ((), (), 0)
    specs: dict[str, Any] = {}
    if E:
        specs["router"] = ParamSpec((D, E), ("embed", "experts"), "matrix", "normal", std, (0,))
    if model.gated:
        specs["gate"] = ParamSpec((*lead, D, F), (*lead_axes, "embed", "mlp"), "matrix", "normal", std, (shift,))
    specs["up"] = ParamSpec((*lead, D, F), (*lead_axes, "embed", "mlp"), "matrix", "normal", std, (shift,))
    specs["down"] = ParamSpec((*lead, F, D), (*lead_axes, "mlp", "embed"), "matrix", "normal", out_std, (shift,))
    if model.mlp_bias:
        if model.gated:
            specs["gate_bias"] = ParamSpec((*lead, F), (*lead_axes, "mlp"), "bias", "zeros")
        specs["up_bias"] = ParamSpec((*lead, F), (*lead_axes, "mlp"), "bias", "zeros")
        specs["down_bias"] = ParamSpec((*lead, D), (*lead_axes, "embed"), "bias", "zeros")
    return specs


def _layer_specs(model: Architecture) -> dict[str, Any]:
    norms = []
    if model.norm_placement in ("pre", "sandwich"):
        norms += ["attn_norm", "mlp_norm"]
    if model.norm_placement in ("post", "sandwich"):
        norms += ["attn_post_norm", "mlp_post_norm"]
    return {
        "attn": _attention_specs(model),
        "mlp": _mlp_specs(model),
        **{name: _norm_specs(model, model.width, "embed") for name in norms},
    }


def _stack(specs: Any, repeats: int) -> Any:
    """Adds the scanned dimension in front of every array."""

    def stack(spec: ParamSpec) -> ParamSpec:
        return dataclasses.replace(
            spec,
            shape=(repeats, *spec.shape),
            axes=("layers", *spec.axes),
            fan_in=tuple(axis + 1 for axis in spec.fan_in),
        )

    return map_specs(stack, specs)


def param_specs(model: Architecture) -> dict[str, Any]:
    """The parameter tree of a model, as specs. See the module's docstring for its layout."""
    D, V = model.width, model.vocab_size
    embed = {"tokens": ParamSpec((V, D), ("vocab", "embed"), "embedding", "normal", model.init_std)}
    if model.positions == "learned":
        embed["positions"] = ParamSpec(
            (model.context_length, D), ("positions", "embed"), "embedding", "normal", model.init_std
        )
    layer = _layer_specs(model)
    specs: dict[str, Any] = {
        "embed": embed,
        "layers": tuple(_stack(layer, model.repeats) for _ in model.pattern) if model.repeats else (),
        "tail": tuple(layer for _ in model.tail),
        "final_norm": _norm_specs(model, D, "embed"),
    }
    if not model.tied_embeddings:
        specs["head"] = ParamSpec((V, D), ("vocab", "embed"), "head", "normal", model.init_std, (1,))
    return specs


def parameter_count(model: Architecture) -> int:
    """Parameters of the model; tied embeddings count once."""
    return sum(spec.size for spec in jax.tree.leaves(param_specs(model), is_leaf=is_spec))


def cache_slots(model: Architecture, kind: str, capacity: int) -> int:
    """Positions one layer keeps: all of them, or the last `window` where the layer slides (a ring)."""
    return min(model.window, capacity) if kind == "sliding" else capacity


def cache_specs(model: Architecture, batch: int, capacity: int, scaled: bool = False) -> dict[str, Any]:
    """Keys and values of `batch` sequences of up to `capacity` tokens, declared like the parameters.

    Each layer kind has `{"k", "v"}` of shape `[repeats, B, K, S, H]` (no `repeats` in the tail), S from
    `cache_slots`: the heads stand outside the slots so that one head's keys are contiguous.

    Args:
      scaled: of a cache in 8 bits: with `{"k_scale", "v_scale"}` beside, a number for each vector.
    """

    def layer(kind: str) -> dict[str, ParamSpec]:
        shape = (batch, model.kv_heads, cache_slots(model, kind, capacity), model.head_dim)
        spec = ParamSpec(shape, ("batch", "kv_heads", "slots", "head_dim"), "cache", "zeros")
        scale = ParamSpec(shape[:-1], spec.axes[:-1], "cache scale", "zeros")
        return {"k": spec, "v": spec} | ({"k_scale": scale, "v_scale": scale} if scaled else {})

    return {
        "layers": tuple(_stack(layer(kind), model.repeats) for kind in model.pattern) if model.repeats else (),
        "tail": tuple(layer(kind) for kind in model.tail),
    }


def abstract(specs: Any, dtype: jax.typing.DTypeLike) -> Any:
    """The tree as `jax.ShapeDtypeStruct`s."""
    return map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)


def initialize(specs: Any, key: jax.Array, dtype: jax.typing.DTypeLike) -> Any:
    """Initial values.

    Each array's random numbers depend on `key` and on the array's place in the tree only, so adding an
    array, or laying the tree over another mesh, changes no other.
    """

    def init(path: Any, spec: ParamSpec) -> jax.Array:
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, dtype)
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        leaf_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return (spec.scale * jax.random.normal(leaf_key, spec.shape, jnp.float32)).astype(dtype)

    return jax.tree_util.tree_map_with_path(init, specs, is_leaf=is_spec)
