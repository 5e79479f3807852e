"""The device column: what really lies on a running device."""

from typing import Any

import jax

from jaxllm.ledger.rows import Figure, Unknown


def tree_bytes(tree: Any) -> int:
    """Bytes of the arrays of a tree on one device, the fullest one; abstract arrays count whole."""
    by_device: dict[Any, int] = {}
    for array in jax.tree.leaves(tree):
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            for shard in array.addressable_shards:
                by_device[shard.device] = by_device.get(shard.device, 0) + shard.data.nbytes
        else:
            by_device[None] = by_device.get(None, 0) + array.size * array.dtype.itemsize
    whole = by_device.pop(None, 0)
    return whole + max(by_device.values(), default=0)


def live_bytes(device: jax.Device | None = None) -> int:
    """Bytes of all arrays that this process holds on a device (the first by default)."""
    device = device or jax.local_devices()[0]
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    # Arrays that share one buffer are counted once.
    sizes = {_address(shard.data): shard.data.nbytes for shard in shards if shard.device == device}
    return sum(sizes.values())


def _address(array: jax.Array) -> Any:
    try:
        return array.unsafe_buffer_pointer() or id(array)
    except (ValueError, RuntimeError, NotImplementedError):  # a backend without addresses
        return id(array)


def peak_bytes(device: jax.Device | None = None) -> Figure:
    """The most that was allocated on a device since the process began."""
    return _statistic("peak_bytes_in_use", device)


def capacity_bytes(device: jax.Device | None = None) -> Figure:
    """What the process may allocate on a device."""
    return _statistic("bytes_limit", device)


def _statistic(name: str, device: jax.Device | None) -> Figure:
    device = device or jax.local_devices()[0]
    statistics = device.memory_stats()
    if statistics is None:
        return Unknown(f"the {device.platform.upper()} backend keeps no memory_stats")
    if name not in statistics:
        return Unknown(f"the memory_stats of {device.device_kind} have no {name}")
    return int(statistics[name])
