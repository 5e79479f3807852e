"""Meshes, and where each array lies on them: the tables from logical axes to mesh axes.

Two kinds of table. *Compute*: how a block's weights are split while it runs, over `tensor` only. *Storage*: how
they, their gradients and their optimizer state are kept, which may be split over `data` too. The difference
between the two is the ZeRO stage (Rajbhandari et al. 2020), and `sharded` says in one place what each stage
shards.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import MeshConfig
from jaxllm.errors import UserError

AXES = ("replica", "data", "tensor")
# The rows of a batch are split over both; a weight's gradient is summed over both.
BATCH_AXES = ("replica", "data")

# Compute: logical axis -> mesh axis. What is not here is whole on every device while it computes.
COMPUTE: dict[str, str] = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
# Storage: the one logical axis that ZeRO does not split over `data`. The loop over layers takes one at a time.
NEVER_SPLIT = "layers"

Kind = Literal["weights", "gradients", "moments"]
# What each ZeRO stage splits over `data`, beside what the stages before it do.
_STAGE_OF: dict[Kind, int] = {"moments": 1, "gradients": 2, "weights": 3}


def make_mesh(config: MeshConfig, devices: Any = None) -> Mesh:
    """The device mesh of a run, axes AXES.

    Args:
      devices: to lay it over (an attached or absent topology's); by default those of this job.
    Raises:
      UserError: the configuration wants another number of devices than there are.
    """
    shape = sizes(config)
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
    """The mesh of a configuration takes exactly so many devices.

    Raises:
      UserError: it takes another number.
    """
    shape = sizes(config)
    wanted = math.prod(shape.values())
    if wanted != count:
        told = " × ".join(f"{axis} {size}" for axis, size in shape.items())
        raise UserError(
            f"--count is {count} and config.mesh takes {wanted} ({told}); change config.mesh so that its product is "
            f"{count}, for instance --config.mesh.data={count}"
        )


def sizes(config: MeshConfig) -> dict[str, int]:
    """Mesh axis -> devices along it."""
    return {axis: getattr(config, axis) for axis in AXES}


def sharded(kind: Kind, stage: int, mixed: bool) -> bool:
    """Whether a ZeRO stage splits arrays of a kind over `data`.

    Args:
      mixed: whether the stored weights are float32 masters of 16-bit ones that compute. Masters are optimizer
        state in ZeRO's count, so that stage 1 splits them, and 16-bit whole copies are made at each step.
    """
    return stage >= (1 if kind == "weights" and mixed else _STAGE_OF[kind])


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one array lies.

    Attributes:
      shape: as stored, over all devices: padded where a dimension does not divide.
      axes: mesh axes that each dimension is split over.
      zero_dim: the dimension that is split over `data`; None where none is.
      gathered: size of that dimension on a device once its shares are put together, without padding.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    zero_dim: int | None
    gathered: int = 0

    @property
    def partition(self) -> PartitionSpec:
        return PartitionSpec(*(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in self.axes))

    def numbers_per_device(self, mesh: dict[str, int]) -> int:
        """Numbers of the array on each device of a mesh of these sizes; every device has as many."""
        return math.prod(self.shape) // math.prod(mesh[axis] for axes in self.axes for axis in axes)


def placements(specs: Any, config: MeshConfig, kind: Kind, mixed: bool) -> Any:
    """A `Placement` for each `ParamSpec` of a tree: where weights, gradients or moments of a run lie.

    Raises:
      UserError: a dimension that cannot be split as it must; names the tensor, the axis and the sizes.
    """
    mesh, zero = sizes(config), sharded(kind, config.zero, mixed)

    def one(path: Any, spec: Any) -> Placement:
        placed = placement(path_name(path), spec.shape, spec.axes, mesh, zero)
        if zero or not config.zero:
            return placed
        # Whole, but with the padding of its moments, which are split: an update adds the one to the other.
        split = placement(path_name(path), spec.shape, spec.axes, mesh, zero=True)
        return dataclasses.replace(placed, shape=split.shape)

    # A tree, a list or a tuple of specs; what has `axes` is a spec.
    return jax.tree_util.tree_map_with_path(one, specs, is_leaf=lambda node: hasattr(node, "axes"))


def path_name(path: Any) -> str:
    """A parameter's name in messages: layers.0.attn.q."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def placement(name: str, shape: tuple[int, ...], axes: tuple[str, ...], mesh: dict[str, int], zero: bool) -> Placement:
    """Where an array with these logical axes lies.

    The dimension that ZeRO splits is the first whose share on a device divides by `data`, so that shares are put
    together as runs of memory; if there is none, the one that takes the fewest zeros is padded with them. The
    vocabulary is padded to divide over `tensor`.

    Args:
      name: for messages.
      mesh: sizes of its axes.
      zero: whether the array is split over `data`.
    Raises:
      UserError: no dimension divides, and none can be padded.
    """
    targets = [COMPUTE.get(axis) for axis in axes]
    split = [(target,) if target and mesh[target] > 1 else () for target in targets]
    assert sum(map(len, split)) == len({axis for axes in split for axis in axes}), f"{axes}: two use one mesh axis"
    stored = list(shape)
    for i, axis in enumerate(axes):
        if stored[i] % _ways(split[i], mesh):
            if axis != "vocab":
                raise UserError(
                    f"{name}{list(shape)}: {axis} ({shape[i]}) does not divide over {_told(split[i], mesh)}"
                )
            stored[i] = _next_multiple(stored[i], _ways(split[i], mesh))
    if not zero or mesh["data"] == 1:
        return Placement(tuple(stored), tuple(split), None)

    growth = {}
    for i, axis in enumerate(axes):
        if axis != NEVER_SPLIT:
            padded = _next_multiple(stored[i], _ways((*split[i], "data"), mesh))
            # Shares of a dimension that is split over `tensor` too would each need padding of their own. The
            # vocabulary does not: whatever stands beyond its end is never looked at.
            if padded == stored[i] or not split[i] or axis == "vocab":
                growth[i] = padded / stored[i]
    if not growth:
        raise UserError(
            f"{name}{list(shape)} with axes {', '.join(axes)} cannot be split over {_told(('tensor', 'data'), mesh)}: "
            "no dimension divides; change config.mesh.data or config.mesh.tensor"
        )
    zero_dim = min(growth, key=lambda i: growth[i])
    gathered = stored[zero_dim] // _ways(split[zero_dim], mesh)
    split[zero_dim] = (*split[zero_dim], "data")
    if axes[zero_dim] == "vocab" and len(split[zero_dim]) > 1:
        gathered = _next_multiple(gathered, mesh["data"])
    stored[zero_dim] = _next_multiple(stored[zero_dim], _ways(split[zero_dim], mesh))
    return Placement(tuple(stored), tuple(split), zero_dim, gathered)


def _told(axes: tuple[str, ...], mesh: dict[str, int]) -> str:
    return " × ".join(f"mesh axis {axis} ({mesh[axis]})" for axis in axes)


def _next_multiple(size: int, of: int) -> int:
    return size + -size % of


def _ways(axes: tuple[str, ...], mesh: dict[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of a batch's arrays [B, T]: rows over the batch axes, each row whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, None))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place(mesh: Mesh, placement: Placement, memory: str | None = None) -> NamedSharding:
    """The sharding of an array so placed.

    Args:
      memory: "device" or "pinned_host"; None is the backend's default.
    """
    return NamedSharding(mesh, placement.partition, memory_kind=memory)
