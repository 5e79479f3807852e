"""Loading of a pretrained model's weights in the layout and the sharding of inference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import Architecture
from jaxllm.decode import sharding, weights
from jaxllm.decode.weights import WeightLayout
from jaxllm.interop.pretrained import Pretrained


@dataclasses.dataclass(frozen=True)
class InferenceWeights:
    """Weights in the layout of inference on this machine, sharded over a mesh if there is one."""

    tree: Any


def load_weights(opened: Pretrained, dtype: jax.typing.DTypeLike, mesh: Mesh | None = None) -> InferenceWeights:
    """Loads a model's weights in the layout of inference on this machine, with at most one array in memory twice.

    On a mesh, each device's shard is read from the files and placed on that device.

    Raises:
      UserError: The weights do not match the configuration.
    """
    if mesh is None:
        return arrange(opened.load(dtype), opened.model, dtype, release=True)
    params = opened.load(dtype, sharding.loaded_params(opened.model, dtype, mesh))
    return arrange(params, opened.model, dtype, mesh, release=True)


def arrange(
    params: Any,
    model: Architecture,
    dtype: jax.typing.DTypeLike,
    mesh: Mesh | None = None,
    release: bool = False,
    layout: WeightLayout | None = None,
) -> InferenceWeights:
    """Converts weights to the layout of inference on this machine, and shards them over a mesh if there is one.

    Args:
      params: Parameter tree of `model` in `dtype`, on one device or already sharded as in `sharding.loaded_params`.
      model: Architecture of the model.
      dtype: Dtype of the weights.
      mesh: Device mesh; None for one device.
      release: Whether to delete each source array as soon as it is converted.
      layout: Layout of the result; None for that of this machine.
    """
    layout = layout or weights.layout_for(jax.default_backend())
    if mesh is None:
        return InferenceWeights(weights.arrange(params, model, layout, release))
    stored = sharding.size_of(mesh).stored_model(model)
    params = jax.tree.map(_shard, params, sharding.loaded_params(model, dtype, mesh))
    params = weights.repeat_kv_heads(params, model, stored.kv_heads, release)
    params = weights.arrange(params, stored, layout, release)
    wanted = sharding.abstract_params(model, dtype, layout, mesh)
    # XLA's partitioner has sharded each converted array like its source; this makes sure.
    return InferenceWeights(sharding.place(params, wanted))


def _shard(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Shards an array, zero-padded to the shape of `like`; an array that is sharded already is returned as it is."""
    if x.shape != like.shape:
        x = jnp.pad(x, [(0, n - m) for n, m in zip(like.shape, x.shape, strict=True)])
    return jax.device_put(x, like.sharding)
