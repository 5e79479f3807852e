"""Devices: memory, bandwidth and peak FLOP/s, each with its source; and the machine this process runs on.

Peaks are of dense matrix products, as published. A figure that nobody publishes is None or absent, never 0.
"""

import dataclasses
import functools
import pathlib
import platform
import re
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import psutil

GB, TB, TFLOPS = 10**9, 10**12, 10**12


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, or a host as a device.

    Attributes:
      name: for people.
      memory_bytes: what a program may use of it; None where that is not known.
      bandwidth: of that memory, bytes/s.
      peak_flops: by dtype of the inputs ("float32", "bfloat16"), FLOP/s; a dtype that is not there is not known.
      source: where the figures come from.
    """

    name: str
    memory_bytes: int | None
    bandwidth: float | None
    peak_flops: Mapping[str, float]
    source: str


def _gpu(name: str, memory: int, bandwidth: float, bf16: float, f32: float, source: str) -> Device:
    peaks = {"bfloat16": bf16 * TFLOPS, "float32": f32 * TFLOPS}
    return Device(name, memory * GB, bandwidth * GB, peaks, f"NVIDIA, {source}; bfloat16 without sparsity")


def _tpu(name: str, memory: int, bandwidth: float, bf16: float) -> Device:
    source = f"Google Cloud TPU documentation, {name}; no float32 peak is published"
    return Device(name, memory * GB, bandwidth * GB, {"bfloat16": bf16 * TFLOPS}, source)


# JAX's `device_kind`, as a pattern -> the device. The first that matches; GB are decimal.
DEVICES: tuple[tuple[str, Device], ...] = (
    ("H100 PCIe", _gpu("H100 PCIe", 80, 2000, 756, 51, "H100 data sheet (2023)")),
    ("H100", _gpu("H100 SXM", 80, 3350, 989.4, 66.9, "H100 data sheet and architecture white paper (2023)")),
    ("H200", _gpu("H200 SXM", 141, 4800, 989.4, 66.9, "H200 data sheet (2024)")),
    ("A100.*80GB", _gpu("A100 80GB", 80, 2039, 312, 19.5, "A100 80GB SXM data sheet (2021)")),
    ("A100.*40GB", _gpu("A100 40GB", 40, 1555, 312, 19.5, "A100 architecture white paper (2020)")),
    ("B200", _gpu("B200", 180, 8000, 2250, 75, "HGX and DGX B200 data sheets (2024), an eighth of the system's")),
    (r"\bL4\b", _gpu("L4", 24, 300, 121, 30.3, "L4 data sheet (2023)")),
    ("RTX 4090", _gpu("RTX 4090", 24, 1008, 165.2, 82.6, "Ada architecture white paper (2022)")),
    ("TPU v4$", _tpu("TPU v4", 32, 1200, 275)),
    ("TPU v5 ?(lite|e)", _tpu("TPU v5e", 16, 819, 197)),
    ("TPU v5p?$", _tpu("TPU v5p", 95, 2765, 459)),
    ("TPU v6 ?(lite|e)", _tpu("TPU v6e", 32, 1640, 918)),
)


def published(device_kind: str) -> Device | None:
    """The table's device for JAX's `device_kind`; None where it has none."""
    return next((device for pattern, device in DEVICES if re.search(pattern, device_kind)), None)


@functools.cache
def this_machine() -> Device:
    """The first device that JAX uses here; a CPU is measured, which takes half a second the first time."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _host()
    known = published(device.device_kind)
    statistics = device.memory_stats() or {}
    limit = statistics.get("bytes_limit")
    if known is None:
        source = f"memory from the backend; {device.device_kind} is not in the table of jaxllm.hardware"
        return Device(device.device_kind, limit, None, {}, source)
    if limit is None:
        return known
    source = f"{known.source}; memory: what the backend lets this process allocate"
    return dataclasses.replace(known, memory_bytes=int(limit), source=source)


def _host() -> Device:
    available, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    limit = _container_limit()
    if limit is not None:
        total, available = min(total, limit), min(available, limit)
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    flops, bandwidth = _measured()
    return Device(
        name=f"{platform.machine()} CPU, {cores} cores",
        memory_bytes=available,
        bandwidth=bandwidth,
        peak_flops={"float32": flops},
        source=f"measured now; memory: the {available / 2**30:.1f} GiB available of {total / 2**30:.1f} GiB",
    )


def _container_limit() -> int | None:
    """Memory limit of the control group, where there is one (Linux)."""
    try:
        text = pathlib.Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


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
