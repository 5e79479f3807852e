"""Specs of all parameters and of the KV cache: the single source of shapes, logical axes and initialization.

Initial values, abstract shapes, shardings, parameter counts and ledger rows are all derived from these trees.

A parameter tree is `{"embed": …, "layers": (…), "tail": (…), "final_norm": …, ["head": …]}`. `layers` has one entry
per kind in the layer pattern, stacked over the repeats of the pattern (the length of the scan). `tail` has the layers
after the last whole pattern, not stacked. A KV cache has the same two groups.
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
    """Specification of one array: shape, logical axes and initialization.

    Attributes:
      shape: Global shape, over all devices.
      axes: Logical axis of each dimension; `jaxllm.parallel.mesh` maps them to mesh axes.
      role: Function of the array in the model; selects the arrays for weight decay and the matrices for Muon.
      init: "normal" | "zeros" | "ones".
      scale: Standard deviation if `init` is "normal".
      fan_in: Dimensions that a matmul with this array contracts; also Muon's reduction axes.
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
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stacked(self) -> tuple[int, ...]:
        """Dimensions that stack independent matrices: layers and experts. Experts are outputs of the router."""
        return tuple(
            dim
            for dim, axis in enumerate(self.axes)
            if axis == "layers" or (axis == "experts" and dim < min(self.fan_in))
        )

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(number of matrices, their inputs, their outputs) of an array with role "matrix"."""
        count = math.prod(self.shape[dim] for dim in self.stacked)
        inputs = math.prod(self.shape[dim] for dim in self.fan_in)
        return count, inputs, self.size // (count * inputs)

    @property
    def decays(self) -> bool:
        """True for weights that get weight decay: matrices, embeddings and head, but not biases and norms."""
        return self.role in ("matrix", "embedding", "head")


def is_spec(node: Any) -> bool:
    """Returns whether a tree node is a `ParamSpec`, which is a leaf of a tree of specs."""
    return isinstance(node, ParamSpec)


def map_specs(function: Callable[[ParamSpec], Any], specs: Any) -> Any:
    """Applies `jax.tree.map` with each `ParamSpec` as a leaf."""
    return jax.tree.map(function, specs, is_leaf=is_spec)


def leaves(specs: Any) -> list[ParamSpec]:
    """Returns the specs of a tree in order."""
    return jax.tree.leaves(specs, is_leaf=is_spec)


def _norm_specs(model: Architecture, width: int, axis: str) -> dict[str, ParamSpec]:
    # A norm with scale 1 + w is the identity at w = 0.
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
            scale = _norm_specs(model, H, "head_dim")["scale"]  # always an RMSNorm, without bias
            if model.qk_norm_over == "projection":
                axes = specs[name].axes[1:]
                scale = dataclasses.replace(scale, shape=(heads, H), axes=axes)
            specs[f"{name}_norm"] = {"scale": scale}
    return specs


def _mlp_specs(model: Architecture) -> dict[str, Any]:
    D, F, E = model.width, model.mlp_width, model.experts
    std, out_std = model.init_std, model.init_std / math.sqrt(2 * model.layers)
    # Expert weights are those of a dense MLP with a leading expert dimension.
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
    """Prepends the scanned dimension to every array."""

    def stack(spec: ParamSpec) -> ParamSpec:
        return dataclasses.replace(
            spec,
            shape=(repeats, *spec.shape),
            axes=("layers", *spec.axes),
            fan_in=tuple(axis + 1 for axis in spec.fan_in),
        )

    return map_specs(stack, specs)


def param_specs(model: Architecture) -> dict[str, Any]:
    """Returns the specs of a model's parameters; the module docstring describes the tree."""
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
    """Returns the number of parameters; tied embeddings count once."""
    return sum(spec.size for spec in leaves(param_specs(model)))


def cache_slots(model: Architecture, kind: str, capacity: int) -> int:
    """Returns a layer's number of cache slots: `capacity`, or at most `window` in a sliding layer (a ring buffer)."""
    return min(model.window, capacity) if kind == "sliding" else capacity


def cache_specs(model: Architecture, batch: int, capacity: int, scaled: bool = False) -> dict[str, Any]:
    """Returns the specs of a KV cache for `batch` sequences of up to `capacity` tokens.

    Each layer kind has `{"k", "v"}` of shape `[repeats, B, K, S, H]` (no `repeats` in the tail), where S is the result
    of `cache_slots`. K precedes S so that the keys of one head are contiguous.

    Args:
      model: Architecture of the model.
      batch: Number of sequences.
      capacity: Maximum tokens per sequence.
      scaled: Whether the cache is 8-bit; it then also has `{"k_scale", "v_scale"}`, one element per vector.
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
    """Returns the tree of `jax.ShapeDtypeStruct`s with the specs' shapes and the given dtype."""
    return map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)


def initialize(specs: Any, key: jax.Array, dtype: jax.typing.DTypeLike) -> Any:
    """Initializes the arrays of a tree of specs.

    The random values of an array depend only on `key` and on the path of the array in the tree. Adding another array or
    using another mesh does not change them.
    """

    def init(path: Any, spec: ParamSpec) -> jax.Array:
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, dtype)
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        leaf_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return (spec.scale * jax.random.normal(leaf_key, spec.shape, jnp.float32)).astype(dtype)

    return jax.tree_util.tree_map_with_path(init, specs, is_leaf=is_spec)
