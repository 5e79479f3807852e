"""Devices by name, and the machine this process runs on.

The figures stand in `jaxllm.hardware.gpus` and `jaxllm.hardware.tpus`, each with its source.
"""

import dataclasses
import difflib
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

from jaxllm.errors import UserError
from jaxllm.hardware.gpus import GPUS
from jaxllm.hardware.spec import GIB, Device
from jaxllm.hardware.tpus import TPUS

__all__ = ["DEVICES", "Device", "attached", "named", "published", "this_machine"]

# The name that `--device` takes -> (JAX's `device_kind` as a pattern, the device).
DEVICES: dict[str, tuple[str, Device]] = {**GPUS, **TPUS}


def named(name: str) -> Device:
    """The device that `--device` names: a key of DEVICES, or `auto` for what this process runs on.

    Raises:
      UserError: no such device; names the nearest.
    """
    if name == "auto":
        return this_machine()
    if name.lower() not in DEVICES:
        known = ["auto", *DEVICES]
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
        raise UserError(f"--device {name}: no such device; did you mean {near}? Known: {', '.join(known)}")
    return DEVICES[name.lower()][1]


def published(device_kind: str) -> Device | None:
    """The table's device for JAX's `device_kind`; None where it has none."""
    return next((device for pattern, device in DEVICES.values() if re.search(pattern, device_kind)), None)


@functools.cache
def this_machine() -> Device:
    """The first device that JAX uses here; a CPU is measured, which takes half a second the first time."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _host()
    jax.device_put(0.0, device).block_until_ready()  # before it, the allocator has no pool to tell of
    return attached(device.platform, device.device_kind, device.memory_stats() or {})


def attached(platform_name: str, kind: str, statistics: Mapping[str, Any]) -> Device:
    """An accelerator: the table's, with the memory that its backend lets this process have.

    A GPU's allocator takes its pool at once. Where other processes hold part of the device it gets a smaller pool than
    its limit, and the pool is what there is.

    Args:
      kind: JAX's `device_kind`.
      statistics: its `memory_stats()`, after a first allocation.
    """
    known = published(kind)
    if known is None:
        told = f"{kind} is not in the tables of jaxllm: no peak, bandwidth or link of it is known"
        known = Device(kind, None, None, {}, told, platform_name)
    limit, pool = statistics.get("bytes_limit"), statistics.get("pool_bytes", 0)
    if limit is None:
        return known
    crowded = 0 < pool < limit and _takes_its_pool_at_once()
    usable = int(pool if crowded else limit)
    told = f"the pool that other processes left of {limit / GIB:.2f} GiB" if crowded else "its backend's limit"
    return dataclasses.replace(
        known,
        memory_bytes=usable,
        held_back=max(0, (known.total_bytes or usable) - usable),
        source=f"{known.source}. On this machine: {usable / GIB:.2f} GiB, {told}",
    )


def _takes_its_pool_at_once() -> bool:
    """Whether JAX's GPU allocator does, which is its default."""
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    grows = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")
    return allocator in ("default", "bfc") and not grows


def _host() -> Device:
    available, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    limit, used = _control_group()
    if limit is not None:
        total, available = min(total, limit), min(available, max(0, limit - used))
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    flops, bandwidth = _measured()
    return Device(
        name=f"{platform.machine()} CPU, {cores} cores",
        memory_bytes=available,
        bandwidth=bandwidth,
        peak_flops={"float32": flops},
        source=f"measured now; memory: the {available / GIB:.1f} GiB available of {total / GIB:.1f} GiB",
        held_back=total - available,
    )


def _control_group(root: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """(bytes that this process's control group may have, of them in use), where there is one (Linux); what is in use
    only to cache files is free."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        kept = re.search(r"^inactive_file (\d+)$", (root / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None, 0
    return (int(limit) if limit.isdigit() else None), used - (int(kept[1]) if kept else 0)


def _measured() -> tuple[float, float]:
    """(FLOP/s of a float32 matrix product, bytes/s of a copy), the best of a few, of all cores."""
    side, numbers = 1024, 2**24
    a = jnp.ones((side, side), jnp.float32)
    flat = jnp.ones(numbers, jnp.float32)
    flops = 2 * side**3 / _best_seconds(lambda: a @ a)
    bandwidth = 2 * 4 * numbers / _best_seconds(lambda: flat + 1.0)  # read, and written
    return flops, bandwidth


def _best_seconds(run: Callable[[], jax.Array], budget: float = 0.2) -> float:
    run().block_until_ready()  # compiles
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < budget:
        start = time.perf_counter()
        run().block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best
