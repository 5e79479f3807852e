"""Meshes, and the table from logical axes to mesh axes."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import MeshConfig
from jaxllm.errors import UserError

# Logical axis of an array -> mesh axis it is split over. What is not named here is whole on every device:
# plain data parallelism, where parameters and optimizer state are replicated.
RULES: dict[str, str] = {"batch": "data"}


def make_mesh(config: MeshConfig) -> Mesh:
    """The device mesh of a run.

    Raises:
      UserError: the configuration wants more devices than there are.
    """
    devices = jax.devices()
    if config.data > len(devices):
        raise UserError(
            f"config.mesh.data is {config.data} and this process sees {len(devices)} {devices[0].platform} "
            f"device(s); set config.mesh.data to at most {len(devices)}"
        )
    return Mesh(np.array(devices[: config.data]), ("data",))


def sharding(mesh: Mesh, axes: tuple[str, ...]) -> NamedSharding:
    """The sharding of an array whose dimensions have these logical axes."""
    return NamedSharding(mesh, PartitionSpec(*(RULES.get(axis) for axis in axes)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())
