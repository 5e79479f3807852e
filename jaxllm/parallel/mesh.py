"""Device meshes and the sharding of each array: rules that map logical axes to mesh axes.

There are two kinds of sharding. *Compute* sharding applies to a block's weights while it runs, over `tensor` only.
*Storage* sharding applies to weights, gradients and optimizer state between uses, and may also use `data`. The
difference between the two is the ZeRO stage (Rajbhandari et al. 2020); `sharded` defines what each stage shards.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import MeshConfig
from jaxllm.errors import UserError

AXES = ("replica", "data", "tensor")
# Batch rows are sharded over both axes, and weight gradients are summed over both.
BATCH_AXES = ("replica", "data")

# Compute sharding: logical axis -> mesh axis. Axes not listed are unsharded during the computation.
TENSOR_RULES: dict[str, str] = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
# The one logical axis that ZeRO never shards, because the loop over layers slices one at a time.
LAYER_AXIS = "layers"

Kind = Literal["weights", "gradients", "moments"]
# First ZeRO stage that shards each kind of array over `data`.
_FIRST_STAGE: dict[Kind, int] = {"moments": 1, "gradients": 2, "weights": 3}


def make_mesh(config: MeshConfig, devices: Any = None) -> Mesh:
    """Builds the device mesh of a run, with axes AXES.

    Args:
      config: Mesh sizes.
      devices: Devices of the mesh, attached or of an absent topology; defaults to all devices of this job.

    Raises:
      UserError: The configuration requires more devices than available, or fewer in a multi-process job.
    """
    sizes = axis_sizes(config)
    needed = math.prod(sizes.values())
    devices = np.array(jax.devices() if devices is None else devices).ravel()
    if needed > devices.size or (needed < devices.size and jax.process_count() > 1):
        raise UserError(
            f"config.mesh needs {needed} devices ({_format_sizes(sizes)}), but this job has {devices.size} "
            f"{devices[0].platform} device(s); change config.mesh so that the product is {devices.size}"
        )
    return Mesh(devices[:needed].reshape(tuple(sizes.values())), AXES)


def require_count(config: MeshConfig, count: int) -> None:
    """Checks that the configured mesh has exactly `count` devices.

    Raises:
      UserError: The mesh has a different number of devices.
    """
    sizes = axis_sizes(config)
    needed = math.prod(sizes.values())
    if needed != count:
        raise UserError(
            f"--count is {count}, but config.mesh needs {needed} devices ({_format_sizes(sizes)}); change config.mesh "
            f"so that the product is {count}, for example --config.mesh.data={count}"
        )


def axis_sizes(config: MeshConfig) -> dict[str, int]:
    """Returns the number of devices along each mesh axis."""
    return {axis: getattr(config, axis) for axis in AXES}


def sharded(kind: Kind, stage: int, mixed: bool) -> bool:
    """Returns whether a ZeRO stage shards arrays of the given kind over `data`.

    Args:
      kind: Kind of array.
      stage: ZeRO stage, 0 to 3.
      mixed: Whether the stored weights are float32 masters of 16-bit compute weights. ZeRO counts masters as
        optimizer state, so stage 1 shards them and each step makes unsharded 16-bit copies.
    """
    return stage >= (1 if kind == "weights" and mixed else _FIRST_STAGE[kind])


@dataclasses.dataclass(frozen=True)
class Placement:
    """Sharding of one array: its stored shape and the mesh axes of each dimension.

    Attributes:
      shape: Global stored shape, including padding of dimensions that do not divide evenly.
      axes: Mesh axes that shard each dimension.
      local_shape: Shape of the shard on each device.
      zero_dim: The dimension sharded over `data`; None if there is none.
      gathered: Per-device size of `zero_dim` after the all-gather over `data`, without padding.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    local_shape: tuple[int, ...]
    zero_dim: int | None = None
    gathered: int = 0

    @property
    def partition(self) -> PartitionSpec:
        """Mesh axes of each dimension as a `PartitionSpec`."""
        return PartitionSpec(*(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in self.axes))

    @functools.cached_property
    def elements_per_device(self) -> int:
        """Number of elements per device, which is equal on all devices of the mesh."""
        return math.prod(self.local_shape)


def placements(specs: Any, config: MeshConfig, kind: Kind, mixed: bool) -> Any:
    """Returns the `Placement` of each `ParamSpec` of a tree, for a run's weights, gradients or moments.

    Args:
      specs: Tree of `ParamSpec`s.
      config: Mesh sizes and ZeRO stage.
      kind: Kind of array.
      mixed: Whether stored weights are float32 masters; see `sharded`.

    Raises:
      UserError: A dimension cannot be sharded as required; the message names the tensor, the axis and the sizes.
    """
    mesh, zero = axis_sizes(config), sharded(kind, config.zero, mixed)

    def one(path: Any, spec: Any) -> Placement:
        placed = placement(path_name(path), spec.shape, spec.axes, mesh, zero)
        if zero or not config.zero:
            return placed
        # Unsharded, but padded like its sharded moments, because the update combines the two.
        like_moments = placement(path_name(path), spec.shape, spec.axes, mesh, zero=True)
        return dataclasses.replace(
            placed, shape=like_moments.shape, local_shape=_local_shape(like_moments.shape, placed.axes, mesh)
        )

    # `specs` may also be a list or tuple; a node with `axes` is a spec.
    return jax.tree_util.tree_map_with_path(one, specs, is_leaf=lambda node: hasattr(node, "axes"))


def path_name(path: Any) -> str:
    """Returns a parameter's dotted name for messages, for example layers.0.attn.q."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def placement(name: str, shape: tuple[int, ...], axes: tuple[str, ...], mesh: dict[str, int], zero: bool) -> Placement:
    """Returns the placement of an array with the given logical axes.

    ZeRO shards the first dimension whose per-device size is divisible by `data`, so the all-gather concatenates
    contiguous memory. If there is none, it zero-pads the dimension that needs the least padding. The vocabulary is
    padded to divide over `tensor`.

    Args:
      name: Parameter name for messages.
      shape: Shape without padding.
      axes: Logical axis of each dimension.
      mesh: Size of each mesh axis.
      zero: Whether the array is sharded over `data`.

    Raises:
      UserError: A dimension does not divide over `tensor`, or none can be sharded or padded over `data`.
    """
    targets = [TENSOR_RULES.get(axis) for axis in axes]
    dim_axes = [(target,) if target and mesh[target] > 1 else () for target in targets]
    assert sum(map(len, dim_axes)) == len({axis for axes in dim_axes for axis in axes}), (
        f"{axes}: two use one mesh axis"
    )
    stored = list(shape)
    for i, axis in enumerate(axes):
        if stored[i] % _num_shards(dim_axes[i], mesh):
            if axis != "vocab":
                raise UserError(
                    f"{name}{list(shape)}: {axis} ({shape[i]}) does not divide over {_format_axes(dim_axes[i], mesh)}"
                )
            stored[i] = _next_multiple(stored[i], _num_shards(dim_axes[i], mesh))
    if not zero or mesh["data"] == 1:
        return Placement(tuple(stored), tuple(dim_axes), _local_shape(stored, dim_axes, mesh))

    growth = {}
    for i, axis in enumerate(axes):
        if axis != LAYER_AXIS:
            padded = _next_multiple(stored[i], _num_shards((*dim_axes[i], "data"), mesh))
            # A dimension also sharded over `tensor` would need padding in every shard. The vocabulary is the
            # exception: entries past its end are never read.
            if padded == stored[i] or not dim_axes[i] or axis == "vocab":
                growth[i] = padded / stored[i]
    if not growth:
        raise UserError(
            f"{name}{list(shape)} with axes {', '.join(axes)} cannot be sharded over "
            f"{_format_axes(('tensor', 'data'), mesh)}: no dimension divides; "
            "change config.mesh.data or config.mesh.tensor"
        )
    zero_dim = min(growth, key=lambda i: growth[i])
    gathered = stored[zero_dim] // _num_shards(dim_axes[zero_dim], mesh)
    dim_axes[zero_dim] = (*dim_axes[zero_dim], "data")
    if axes[zero_dim] == "vocab" and len(dim_axes[zero_dim]) > 1:
        gathered = _next_multiple(gathered, mesh["data"])
    stored[zero_dim] = _next_multiple(stored[zero_dim], _num_shards(dim_axes[zero_dim], mesh))
    return Placement(tuple(stored), tuple(dim_axes), _local_shape(stored, dim_axes, mesh), zero_dim, gathered)


def _local_shape(shape: Sequence[int], axes: Sequence[tuple[str, ...]], mesh: dict[str, int]) -> tuple[int, ...]:
    return tuple(size // _num_shards(sharded_over, mesh) for size, sharded_over in zip(shape, axes, strict=True))


def _format_sizes(sizes: dict[str, int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items())


def _format_axes(axes: tuple[str, ...], mesh: dict[str, int]) -> str:
    return " × ".join(f"mesh axis {axis} ({mesh[axis]})" for axis in axes)


def _next_multiple(size: int, divisor: int) -> int:
    return size + -size % divisor


def _num_shards(axes: tuple[str, ...], mesh: dict[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of batch arrays [B, T]: rows over the batch axes, tokens unsharded."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, None))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that replicates an array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def named_sharding(mesh: Mesh, placement: Placement, memory: str | None = None) -> NamedSharding:
    """Returns the `NamedSharding` of a placement.

    Args:
      mesh: Device mesh.
      placement: Placement of the array.
      memory: Memory kind, "device" or "pinned_host"; None means the backend's default.
    """
    return NamedSharding(mesh, placement.partition, memory_kind=memory)
