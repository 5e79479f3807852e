"""Devices: memory, bandwidth and peak FLOP/s, each with its source; and the machine this process runs on.

Peaks are of dense matrix products, as published. A figure that nobody publishes is None or absent, never 0.
"""

import dataclasses
import difflib
import functools
import pathlib
import platform
import re
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import psutil

from jaxllm.errors import UserError
from jaxllm.targets import ADA, AMPERE, BLACKWELL, HOPPER, MIB, Capability, GpuTarget, Target, TpuTarget

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
      platform: as JAX names it: cpu | gpu | tpu.
      compile_target: what a program can be compiled for without the device; None where nobody knows.
    """

    name: str
    memory_bytes: int | None
    bandwidth: float | None
    peak_flops: Mapping[str, float]
    source: str
    platform: str = "cpu"
    compile_target: Target | None = None


@dataclasses.dataclass(frozen=True)
class _Chip:
    """Figures of a GPU for its compiler; see `jaxllm.targets.GpuTarget`."""

    description: str
    capability: Capability
    multiprocessors: int
    clock_ghz: float
    l2_bytes: int
    source: str


def _gpu(name: str, memory: int, bandwidth: float, bf16: float, f32: float, source: str, chip: _Chip) -> Device:
    peaks = {"bfloat16": bf16 * TFLOPS, "float32": f32 * TFLOPS}
    figures = {field.name: getattr(chip, field.name) for field in dataclasses.fields(chip)}
    target = GpuTarget(**figures, memory_bytes=memory * GB, bandwidth=bandwidth * GB)
    told = f"NVIDIA, {source}; bfloat16 without sparsity"
    return Device(name, memory * GB, bandwidth * GB, peaks, told, "gpu", target)


def _tpu(name: str, memory: int, bandwidth: float, bf16: float, target: TpuTarget) -> Device:
    source = f"Google Cloud TPU documentation, {name}; no float32 peak is published"
    return Device(name, memory * GB, bandwidth * GB, {"bfloat16": bf16 * TFLOPS}, source, "tpu", target)


_GA100 = "A100 architecture white paper (2020), table 4"
_GH100 = "H100 architecture white paper (2023), table 3; clock as its driver tells it"
_A100_40 = _Chip("NVIDIA A100-SXM4-40GB", AMPERE, 108, 1.41, 40 * MIB, _GA100)
_A100_80 = dataclasses.replace(_A100_40, description="NVIDIA A100-SXM4-80GB")
_H100_SXM = _Chip("NVIDIA H100 80GB HBM3", HOPPER, 132, 1.98, 50 * MIB, _GH100)
_H100_PCIE = _Chip("NVIDIA H100 PCIe", HOPPER, 114, 1.755, 50 * MIB, _GH100)
_H200 = dataclasses.replace(_H100_SXM, description="NVIDIA H200", source=f"{_GH100}; the H200 has the same chip")
_B200_SOURCE = "as a driver tells them; OpenXLA publishes them (xla/backends/gpu/target_config/specs/b200.txtpb)"
_B200 = _Chip("NVIDIA B200", BLACKWELL, 148, 1.965, 132_644_864, _B200_SOURCE)
_L4 = _Chip("NVIDIA L4", ADA, 58, 2.04, 48 * MIB, "L4 data sheet (2023) and Ada white paper (2022), AD104")
_RTX_4090 = _Chip("NVIDIA GeForce RTX 4090", ADA, 128, 2.52, 72 * MIB, "Ada architecture white paper (2022), table 2")

# The name that `--device` takes -> (JAX's `device_kind` as a pattern, the device). The first pattern that matches
# names an attached device; GB are decimal.
DEVICES: dict[str, tuple[str, Device]] = {
    "h100-pcie": ("H100 PCIe", _gpu("H100 PCIe", 80, 2000, 756, 51, "H100 data sheet (2023)", _H100_PCIE)),
    "h100": (
        "H100",
        _gpu("H100 SXM", 80, 3350, 989.4, 66.9, "H100 data sheet and architecture white paper (2023)", _H100_SXM),
    ),
    "h200": ("H200", _gpu("H200 SXM", 141, 4800, 989.4, 66.9, "H200 data sheet (2024)", _H200)),
    "a100-80gb": ("A100.*80GB", _gpu("A100 80GB", 80, 2039, 312, 19.5, "A100 80GB SXM data sheet (2021)", _A100_80)),
    "a100-40gb": (
        "A100.*40GB",
        _gpu("A100 40GB", 40, 1555, 312, 19.5, "A100 architecture white paper (2020)", _A100_40),
    ),
    "b200": (
        "B200",
        _gpu("B200", 180, 8000, 2250, 75, "HGX and DGX B200 data sheets (2024), an eighth of the system's", _B200),
    ),
    "l4": (r"\bL4\b", _gpu("L4", 24, 300, 121, 30.3, "L4 data sheet (2023)", _L4)),
    "rtx4090": (
        "RTX 4090",
        _gpu("RTX 4090", 24, 1008, 165.2, 82.6, "Ada architecture white paper (2022)", _RTX_4090),
    ),
    "v4": ("TPU v4$", _tpu("TPU v4", 32, 1200, 275, TpuTarget("v4", 3, 4096, megacore=True))),
    "v5e": ("TPU v5 ?(lite|e)", _tpu("TPU v5e", 16, 819, 197, TpuTarget("v5e", 2, 256))),
    "v5p": ("TPU v5p?$", _tpu("TPU v5p", 95, 2765, 459, TpuTarget("v5p", 3, 4096))),
    "v6e": ("TPU v6 ?(lite|e)", _tpu("TPU v6e", 32, 1640, 918, TpuTarget("v6e", 2, 256))),
}


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
    known = published(device.device_kind)
    statistics = device.memory_stats() or {}
    limit = statistics.get("bytes_limit")
    if known is None:
        source = f"memory from the backend; {device.device_kind} is not in the table of jaxllm.hardware"
        return Device(device.device_kind, limit, None, {}, source, device.platform)
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
