"""Device column: memory of a running device, used by this process or by other processes."""

import resource
from typing import Any

import jax
import psutil

from jaxllm.hardware.detect import Device
from jaxllm.ledger.rows import Figure, Unknown


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of a tree's arrays on the device with the most; abstract arrays count in full."""
    by_device: dict[Any, int] = {}
    for array in jax.tree.leaves(tree):
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            for shard in array.addressable_shards:
                by_device[shard.device] = by_device.get(shard.device, 0) + shard.data.nbytes
        else:
            by_device[None] = by_device.get(None, 0) + array.size * array.dtype.itemsize
    abstract = by_device.pop(None, 0)
    return abstract + max(by_device.values(), default=0)


def live_bytes(device: jax.Device | None = None) -> int:
    """Returns the bytes of this process's live arrays on a device (default: the first local one)."""
    device = device or jax.local_devices()[0]
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    # Count arrays that share a buffer once.
    sizes = {_address(shard.data): shard.data.nbytes for shard in shards if shard.device == device}
    return sum(sizes.values())


def _address(array: jax.Array) -> Any:
    try:
        return array.unsafe_buffer_pointer() or id(array)
    except (ValueError, RuntimeError, NotImplementedError):  # a backend without addresses
        return id(array)


def peak_bytes(device: jax.Device | None = None) -> Figure:
    """Returns the peak bytes allocated on a device since the process started."""
    return _statistic("peak_bytes_in_use", device)


def capacity_bytes(device: jax.Device | None = None) -> Figure:
    """Returns the bytes that the process may allocate on a device."""
    return _statistic("bytes_limit", device)


def used_by_others(device: jax.Device | None = None) -> Figure:
    """Returns the bytes in use on a device that are not arrays of this process.

    An accelerator's allocator reports its own process only, so these are programs and library allocations. On a CPU
    they are the host memory used by other processes.
    """
    device = device or jax.local_devices()[0]
    if device.platform == "cpu":
        memory = psutil.virtual_memory()
        return max(0, memory.total - memory.available - psutil.Process().memory_info().rss)
    used = _statistic("bytes_in_use", device)
    return used if isinstance(used, Unknown) else max(0, used - live_bytes(device))


def available_bytes(device: jax.Device | None = None) -> Figure:
    """Returns the total bytes that this process's arrays may use on a device, its live arrays included.

    Simulated CPU devices share the host's memory; all of it is returned for each of them.
    """
    device = device or jax.local_devices()[0]
    if device.platform == "cpu":
        return _free_host_bytes() + sum(map(live_bytes, jax.local_devices(backend="cpu")))
    capacity, others = capacity_bytes(device), used_by_others(device)
    if isinstance(capacity, Unknown):
        return capacity
    return others if isinstance(others, Unknown) else max(0, capacity - others)


def available_to_task(device: Device, others: Figure, count: int = 1) -> Figure:
    """Returns the bytes per device that other processes leave to a task on `count` devices.

    A CPU's `memory_bytes` is already the free host memory; simulated CPU devices divide it equally.

    Args:
      device: Device specification.
      others: Result of `used_by_others`.
      count: Number of devices that the task uses.
    """
    if device.memory_bytes is None:
        return Unknown(f"{device.name}: {device.source}")
    if device.platform == "cpu":
        return device.memory_bytes // count
    return device.memory_bytes if isinstance(others, Unknown) else max(0, device.memory_bytes - others)


def _free_host_bytes() -> int:
    """Returns the bytes this process may still allocate: free host memory or the rest of `ulimit -v`, if less."""
    process = psutil.Process().memory_info()
    free = [psutil.virtual_memory().available]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free.append(limit - process.vms)
    return max(0, min(free))


def _statistic(name: str, device: jax.Device | None) -> Figure:
    device = device or jax.local_devices()[0]
    statistics = device.memory_stats()
    if statistics is None:
        return Unknown(f"the {device.platform.upper()} backend has no memory_stats")
    if name not in statistics:
        return Unknown(f"the memory_stats of {device.device_kind} have no {name}")
    return int(statistics[name])
