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
# Storage sharding: the one logical axis that ZeRO never shards, because the loop over layers slices one at a time.
UNSHARDED_AXES = "layers"

Kind = Literal["weights", "gradients", "moments"]
# First ZeRO stage that shards each kind of array over `data`.
_STAGE_OF: dict[Kind, int] = {"moments": 1, "gradients": 2, "weights": 3}


def make_mesh(config: MeshConfig, devices: Any = None) -> Mesh:
    """Builds the device mesh of a run, with axes AXES.

    Args:
      config: Mesh sizes.
      devices: Devices of the mesh, attached or of an absent topology; defaults to all devices of this job.

    Raises:
      UserError: The configuration requires more devices than available, or fewer in a multi-process job.
    """
    shape = axis_sizes(config)
    wanted = math.prod(shape.values())
    devices = np.array(jax.devices() if devices is None else devices).ravel()
    if wanted > devices.size or (wanted < devices.size and jax.process_count() > 1):
        told = " × ".join(f"{axis} {size}" for axis, size in shape.items())
        raise UserError(
            f"config.mesh wants {wanted} devices ({told}) and this job sees {devices.size} "
            f"{devices[0].platform} device(s); change config.mesh so that the product is {devices.size}"
        )
    return Mesh(devices[:wanted].reshape(tuple(shape.values())), AXES)


def require_count(config: MeshConfig, count: int) -> None:
    """Checks that the configured mesh has exactly `count` devices.

    Raises:
      UserError: The mesh has a different number of devices.
    """
    shape = axis_sizes(config)
    wanted = math.prod(shape.values())
    if wanted != count:
        told = " × ".join(f"{axis} {size}" for axis, size in shape.items())
        raise UserError(
            f"--count is {count} and config.mesh takes {wanted} ({told}); change config.mesh so that its product is "
            f"{count}, for instance --config.mesh.data={count}"
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
    return stage >= (1 if kind == "weights" and mixed else _STAGE_OF[kind])


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
        split = placement(path_name(path), spec.shape, spec.axes, mesh, zero=True)
        return dataclasses.replace(placed, shape=split.shape, local_shape=_local_shape(split.shape, placed.axes, mesh))

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
    split = [(target,) if target and mesh[target] > 1 else () for target in targets]
    assert sum(map(len, split)) == len({axis for axes in split for axis in axes}), f"{axes}: two use one mesh axis"
    stored = list(shape)
    for i, axis in enumerate(axes):
        if stored[i] % _num_shards(split[i], mesh):
            if axis != "vocab":
                raise UserError(
                    f"{name}{list(shape)}: {axis} ({shape[i]}) does not divide over {_format_axes(split[i], mesh)}"
                )
            stored[i] = _next_multiple(stored[i], _num_shards(split[i], mesh))
    if not zero or mesh["data"] == 1:
        return Placement(tuple(stored), tuple(split), _local_shape(stored, split, mesh))

    growth = {}
    for i, axis in enumerate(axes):
        if axis != UNSHARDED_AXES:
            padded = _next_multiple(stored[i], _num_shards((*split[i], "data"), mesh))
            # A dimension also sharded over `tensor` would need padding in every shard. The vocabulary is the
            # exception: entries past its end are never read.
            if padded == stored[i] or not split[i] or axis == "vocab":
                growth[i] = padded / stored[i]
    if not growth:
        raise UserError(
            f"{name}{list(shape)} with axes {', '.join(axes)} cannot be split over "
            f"{_format_axes(('tensor', 'data'), mesh)}: no dimension divides; "
            "change config.mesh.data or config.mesh.tensor"
        )
    zero_dim = min(growth, key=lambda i: growth[i])
    gathered = stored[zero_dim] // _num_shards(split[zero_dim], mesh)
    split[zero_dim] = (*split[zero_dim], "data")
    if axes[zero_dim] == "vocab" and len(split[zero_dim]) > 1:
        gathered = _next_multiple(gathered, mesh["data"])
    stored[zero_dim] = _next_multiple(stored[zero_dim], _num_shards(split[zero_dim], mesh))
    return Placement(tuple(stored), tuple(split), _local_shape(stored, split, mesh), zero_dim, gathered)


def _local_shape(shape: Sequence[int], axes: Sequence[tuple[str, ...]], mesh: dict[str, int]) -> tuple[int, ...]:
    return tuple(size // _num_shards(sharded_over, mesh) for size, sharded_over in zip(shape, axes, strict=True))


def _format_axes(axes: tuple[str, ...], mesh: dict[str, int]) -> str:
    return " × ".join(f"mesh axis {axis} ({mesh[axis]})" for axis in axes)


def _next_multiple(size: int, of: int) -> int:
    return size + -size % of


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
