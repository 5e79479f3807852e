"""Loading of a pretrained model's weights in the layout, the format and the sharding of inference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jaxllm.config import Architecture
from jaxllm.decode import sharding, weights
from jaxllm.decode.weights import WeightLayout
from jaxllm.errors import UserError
from jaxllm.interop.pretrained import Pretrained
from jaxllm.quantize import calibrate
from jaxllm.quantize.formats import QuantFormat


@dataclasses.dataclass(frozen=True)
class InferenceWeights:
    """Weights in the layout of inference on this machine, sharded over a mesh if there is one.

    Attributes:
      tree: Parameter tree.
      quantize: Format of the matrices; None if they are not quantized.
    """

    tree: Any
    quantize: QuantFormat | None = None


def load_weights(
    opened: Pretrained,
    dtype: jax.typing.DTypeLike,
    mesh: Mesh | None = None,
    quantize: QuantFormat | None = None,
    method: str = calibrate.NEAREST,
    calibration: Int[np.ndarray, "N T"] | None = None,
) -> InferenceWeights:
    """Loads a model's weights in the layout of inference on this machine.

    At most one array is in memory twice, except that GPTQ and AWQ need the whole model in `dtype` besides the result.
    On a mesh, each device's shard is read from the files and placed on that device.

    Args:
      opened: The model.
      dtype: Dtype of the weights that are not quantized.
      mesh: Device mesh; None for one device.
      quantize: Format of the matrices of layers; None does not quantize.
      method: Method of quantization, one of `calibrate.METHODS`.
      calibration: Tokens of the calibration text, for the methods other than `nearest`.

    Raises:
      UserError: The weights do not match the configuration, or cannot be quantized.
    """
    if mesh is None:
        weights.check_quantization(opened.model, weights.layout_for(jax.default_backend()), quantize)
        if quantize is None or method == calibrate.NEAREST:
            return arrange(opened.load(dtype), opened.model, dtype, release=True, quantize=quantize)
        assert calibration is not None, method
        exact = arrange(opened.load(dtype), opened.model, dtype, release=True).tree
        return InferenceWeights(calibrate.quantize(exact, opened.model, calibration, quantize, method), quantize)
    if quantize is not None:
        raise UserError("--quantize does not support several devices yet; leave out --mesh")
    params = opened.load(dtype, sharding.loaded_params(opened.model, dtype, mesh))
    return arrange(params, opened.model, dtype, mesh, release=True)


def arrange(
    params: Any,
    model: Architecture,
    dtype: jax.typing.DTypeLike,
    mesh: Mesh | None = None,
    release: bool = False,
    layout: WeightLayout | None = None,
    quantize: QuantFormat | None = None,
) -> InferenceWeights:
    """Converts weights to the layout of inference on this machine, and shards them over a mesh if there is one.

    Args:
      params: Parameter tree of `model` in `dtype`, on one device or already sharded as in `sharding.loaded_params`.
      model: Architecture of the model.
      dtype: Dtype of the weights.
      mesh: Device mesh; None for one device.
      release: Whether to delete each source array as soon as it is converted.
      layout: Layout of the result; None for that of this machine.
      quantize: On one device: format of the matrices of layers; None does not quantize.
    """
    layout = layout or weights.layout_for(jax.default_backend())
    if mesh is None:
        return InferenceWeights(weights.arrange(params, model, layout, release, quantize), quantize)
    assert quantize is None, "quantized weights are for one device"
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
