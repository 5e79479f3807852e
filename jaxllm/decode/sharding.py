"""Shapes and shardings of inference on a mesh of several devices.

A dimension is sharded over an axis if it is smaller on one device than on all of them: `config.inference_mesh` gives
one device's shard of a model as an architecture, and each sharding follows from comparing the two trees of shapes. So
there is no second list of which dimension of which array has the heads.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxllm.config import Architecture
from jaxllm.config.inference_mesh import ONE_DEVICE, InferenceMesh
from jaxllm.decode import state as state_lib
from jaxllm.decode import weights
from jaxllm.decode.weights import WeightLayout
from jaxllm.model import specs
from jaxllm.parallel.collectives import Collectives
from jaxllm.quantize.formats import QuantFormat

AnyMesh = Mesh | AbstractMesh


def size_of(mesh: AnyMesh | None) -> InferenceMesh:
    """Returns the sizes of a device mesh; None is one device."""
    return ONE_DEVICE if mesh is None else InferenceMesh(mesh.shape["data"], mesh.shape["tensor"])


def collectives(mesh: AnyMesh | None) -> Collectives:
    """Returns the collectives of inference on a mesh."""
    sizes = size_of(mesh)
    return Collectives(tensor=sizes.tensor, batch=sizes.data, sequence_parallel=False)


def _dimensions(whole: Any, shard: Any, size: int) -> Any:
    """Returns, per array, the dimension that is `size` times as large in `whole` as in `shard`; -1 if there is none."""

    def one(whole: Any, shard: Any) -> int:
        smaller = [i for i, (n, m) in enumerate(zip(whole.shape, shard.shape, strict=True)) if n != m]
        assert len(smaller) <= 1, (whole, shard)
        assert all(whole.shape[i] == size * shard.shape[i] for i in smaller), (whole, shard)
        return smaller[0] if smaller else -1

    return jax.tree.map(one, whole, shard)


def _partition(ndim: int, **dimensions: int) -> PartitionSpec:
    """Returns the partition of an array, given the dimension that each axis shards; -1 if none."""
    axes: list[str | None] = [None] * ndim
    for axis, i in dimensions.items():
        if i >= 0:
            axes[i] = axis
    return PartitionSpec(*axes)


def loaded_params(model: Architecture, dtype: jax.typing.DTypeLike, mesh: AnyMesh) -> Any:
    """Returns the abstract parameters, in the layout of training, in which weights are read from files to a mesh.

    The vocabulary is padded to a multiple of the devices. Key/value heads that do not divide over them are replicated,
    and repeated after they are read (`weights.repeat_kv_heads`).
    """
    sizes = size_of(mesh)
    whole, shard = sizes.stored_model(model), sizes.shard(model)
    whole = dataclasses.replace(whole, kv_heads=model.kv_heads)
    if model.kv_heads % sizes.tensor:
        shard = dataclasses.replace(shard, kv_heads=model.kv_heads)
    arrays, local = (specs.abstract(specs.param_specs(each), dtype) for each in (whole, shard))
    return _place(arrays, _dimensions(arrays, local, sizes.tensor), mesh)


def abstract_params(
    model: Architecture,
    dtype: jax.typing.DTypeLike,
    layout: WeightLayout,
    mesh: AnyMesh | None = None,
    quantize: QuantFormat | None = None,
) -> Any:
    """Returns the abstract parameters of the programs of inference, with shardings if there is a mesh.

    Args:
      model: Architecture of the model.
      dtype: Dtype of the parameters: the compute dtype, without float32 master copies.
      layout: Layout of the parameters.
      mesh: Device mesh; None for one device.
      quantize: Format of the matrices of layers; None does not quantize.
    """

    def arranged(model: Architecture) -> Any:
        params = specs.abstract(specs.param_specs(model), dtype)
        return jax.eval_shape(lambda params: weights.arrange(params, model, layout, quantize=quantize), params)

    if mesh is None:
        return arranged(model)
    sizes = size_of(mesh)
    whole, shard = arranged(sizes.stored_model(model)), arranged(sizes.shard(model))
    return _place(whole, _dimensions(whole, shard, sizes.tensor), mesh)


def abstract_state(
    model: Architecture,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
    layout: WeightLayout,
    mesh: AnyMesh | None = None,
    with_cache: bool = True,
) -> Any:
    """Returns the abstract decoding state, with shardings if there is a mesh.

    Args:
      model: Architecture of the model.
      batch: Rows, over all devices; a multiple of the mesh's `data`.
      capacity: Maximum tokens per row.
      dtype: Dtype of the cache.
      layout: Layout of the cache.
      mesh: Device mesh; None for one device.
      with_cache: Whether there is a KV cache; without one, the state has the tokens.
    """

    def state(rows: int, kv_heads: int) -> Any:
        declared = weights.model_in(dataclasses.replace(model, kv_heads=kv_heads), layout)
        return state_lib.abstract(declared, rows, capacity, dtype, with_cache)

    if mesh is None:
        return state(batch, model.kv_heads)
    sizes = size_of(mesh)
    heads = sizes.stored_model(model).kv_heads
    whole = state(batch, heads)
    over_data = _dimensions(whole, state(sizes.rows(batch), heads), sizes.data)
    over_tensor = _dimensions(whole, state(batch, heads // sizes.tensor), sizes.tensor)
    return _place(whole, over_tensor, mesh, over_data)


def _place(arrays: Any, over_tensor: Any, mesh: AnyMesh, over_data: Any = None) -> Any:
    if over_data is None:
        over_data = jax.tree.map(lambda _: -1, over_tensor)

    def one(x: Any, tensor: int, data: int) -> Any:
        return x.update(sharding=NamedSharding(mesh, _partition(len(x.shape), tensor=tensor, data=data)))

    return jax.tree.map(one, arrays, over_tensor, over_data)


def partitions(arrays: Any) -> Any:
    """Returns the `PartitionSpec` of each abstract array of a tree."""
    return jax.tree.map(lambda x: x.sharding.spec, arrays)


def place(arrays: Any, like: Any) -> Any:
    """Places arrays on the devices of the abstract arrays `like`; arrays that are there already are not copied."""
    return jax.tree.map(lambda x, abstract: jax.device_put(x, abstract.sharding), arrays, like)
