"""Looks up devices by name and detects the device that this process runs on.

The specifications are in `jaxllm.hardware.gpus` and `jaxllm.hardware.tpus`, each with its source.
"""

import dataclasses
import functools
import os
import pathlib
import platform
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from jaxllm.errors import UserError, nearest
from jaxllm.hardware.gpus import GPUS
from jaxllm.hardware.spec import GIB, Device
from jaxllm.hardware.tpus import TPUS

__all__ = ["DEVICES", "Device", "attached", "by_name", "published", "this_machine"]

# Value of `--device` -> (regular expression for JAX's `device_kind`, device).
DEVICES: dict[str, tuple[str, Device]] = {**GPUS, **TPUS}


def by_name(name: str) -> Device:
    """Returns the device that `--device` names: a key of DEVICES, or `auto` for the one this process runs on.

    Raises:
      UserError: there is no such device; the message names the nearest.
    """
    if name == "auto":
        return this_machine()
    if name.lower() not in DEVICES:
        known = ["auto", *DEVICES]
        listed, suggestion = ", ".join(known), nearest(name.lower(), known)
        raise UserError(f"--device {name}: unknown; did you mean {suggestion}? Supported: {listed}")
    return DEVICES[name.lower()][1]


def published(device_kind: str) -> Device | None:
    """Returns the device in the tables that matches JAX's `device_kind`; None if there is none."""
    return next((device for pattern, device in DEVICES.values() if re.search(pattern, device_kind)), None)


@functools.cache
def this_machine() -> Device:
    """Returns the first local device of JAX. A CPU is measured, which takes half a second the first time."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _cpu()
    jax.device_put(0.0, device).block_until_ready()  # before an allocation, the allocator reports no pool
    return attached(device.platform, device.device_kind, device.memory_stats() or {})


def attached(platform_name: str, kind: str, statistics: Mapping[str, Any]) -> Device:
    """Returns an attached accelerator: its published specification, with the memory that this process may use.

    A GPU's allocator reserves its pool at once. If other processes occupy part of the device, the pool is smaller than
    the allocator's limit, and the usable memory is the pool.

    Args:
      platform_name: as JAX names it: gpu | tpu.
      kind: JAX's `device_kind`.
      statistics: its `memory_stats()`, after the first allocation.
    """
    device = published(kind)
    if device is None:
        source = f"{kind} is not in jaxllm's device tables: its peaks, bandwidth and links are unknown"
        device = Device(kind, None, None, {}, source, platform_name)
    limit, pool = statistics.get("bytes_limit"), statistics.get("pool_bytes", 0)
    if limit is None:
        return device
    is_shared = 0 < pool < limit and _preallocates()
    usable = int(pool if is_shared else limit)
    reason = f"all that other processes left of {limit / GIB:.2f} GiB" if is_shared else "the backend's limit"
    return dataclasses.replace(
        device,
        memory_bytes=usable,
        reserved_bytes=max(0, (device.total_bytes or usable) - usable),
        source=f"{device.source}. On this machine: {usable / GIB:.2f} GiB, {reason}",
    )


def _preallocates() -> bool:
    """Returns True if JAX's GPU allocator preallocates its pool, which is the default."""
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    grows = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")
    return allocator in ("default", "bfc") and not grows


def _cpu() -> Device:
    available, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    limit, used = _cgroup_memory()
    if limit is not None:
        total, available = min(total, limit), min(available, max(0, limit - used))
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    flops, bandwidth = _measure_cpu()
    return Device(
        name=f"{platform.machine()} CPU, {cores} cores",
        memory_bytes=available,
        bandwidth=bandwidth,
        peak_flops={"float32": flops},
        source=f"measured on this machine; memory: {available / GIB:.1f} GiB available of {total / GIB:.1f} GiB",
        reserved_bytes=total - available,
    )


def _cgroup_memory(root: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """Returns (memory limit, memory in use) of this process's Linux control group in bytes; (None, 0) without one.

    Inactive file cache counts as free.
    """
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        inactive = re.search(r"^inactive_file (\d+)$", (root / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None, 0
    return (int(limit) if limit.isdigit() else None), used - (int(inactive[1]) if inactive else 0)


def _measure_cpu() -> tuple[float, float]:
    """Returns (FLOP/s of a float32 matmul, bytes/s of a copy) of all cores; the best of several runs."""
    side, elements = 1024, 2**24
    a = jnp.ones((side, side), jnp.float32)
    flat = jnp.ones(elements, jnp.float32)
    flops = 2 * side**3 / _best_seconds(lambda: a @ a)
    bandwidth = 2 * 4 * elements / _best_seconds(lambda: flat + 1.0)  # one read and one write
    return flops, bandwidth


def _best_seconds(run: Callable[[], jax.Array], budget: float = 0.2) -> float:
    run().block_until_ready()  # compiles
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < budget:
        start = time.perf_counter()
        run().block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best
