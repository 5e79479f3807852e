"""Compile targets: what XLA needs to compile for a device that is not attached.

XLA takes a GPU as a text of its specifications (`GpuTargetConfigProto`) and a TPU as the name of a slice; neither
needs the device. Values that only a device can report (ECC, links, the driver's own rates) are omitted: XLA has
defaults.
"""

import dataclasses
import math
from typing import Any

from jaxllm.errors import UserError

KIB, MIB = 2**10, 2**20


@dataclasses.dataclass(frozen=True)
class Capability:
    """Limits of one CUDA compute capability.

    Source: CUDA C++ Programming Guide 12.9, "Technical Specifications per Compute Capability" and "Arithmetic
    Instructions" (float32 lanes). All of them have warps of 32 threads, blocks of at most 1,024 threads and 64 Ki
    registers, and 48 KiB of shared memory per block without opt-in. Since Ampere the system reserves 1 KiB of it.

    Attributes:
      major, minor: compute capability.
      threads: maximum resident threads per multiprocessor.
      shared_memory: bytes per multiprocessor.
      shared_memory_per_block: bytes that a block may use with opt-in.
      lanes: float32 operations per clock and multiprocessor.
    """

    major: int
    minor: int
    threads: int
    shared_memory: int
    shared_memory_per_block: int
    lanes: int


VOLTA = Capability(7, 0, 2048, 96 * KIB, 96 * KIB, 64)
AMPERE = Capability(8, 0, 2048, 164 * KIB, 163 * KIB, 64)
AMPERE_RTX = Capability(8, 6, 1536, 100 * KIB, 99 * KIB, 128)
ADA = Capability(8, 9, 1536, 100 * KIB, 99 * KIB, 128)
HOPPER = Capability(9, 0, 2048, 228 * KIB, 227 * KIB, 128)
BLACKWELL = Capability(10, 0, 2048, 228 * KIB, 227 * KIB, 128)
BLACKWELL_RTX = Capability(12, 0, 1536, 100 * KIB, 99 * KIB, 128)

GPUS_PER_HOST = 8
# Minimum versions that `jaxllm[cuda12]` installs: XLA selects algorithms by them.
_CUDA, _CUDNN = "12.9.0", (9, 10)


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """CUDA device specification for XLA's compiler.

    Attributes:
      description: name that the driver reports.
      capability: limits of its compute capability.
      multiprocessors: number on the chip.
      clock_ghz: highest clock, GHz.
      l2_bytes: L2 cache of the chip, bytes.
      memory_bytes: device memory, bytes.
      bandwidth: of the device memory, bytes/s.
      source: of multiprocessors, clock and L2.
    """

    description: str
    capability: Capability
    multiprocessors: int
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    source: str

    platform = "cuda"
    extra = "cuda12"

    def config_text(self) -> str:
        """Returns the GpuTargetConfigProto in text format."""
        cuda = self.capability
        info = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * KIB,
            "shared_memory_per_core": cuda.shared_memory,
            "shared_memory_per_block_optin": cuda.shared_memory_per_block,
            "threads_per_core_limit": cuda.threads,
            "core_count": self.multiprocessors,
            "fpus_per_core": cuda.lanes,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "registers_per_core_limit": 64 * KIB,
            "registers_per_block_limit": 64 * KIB,
            "memory_bandwidth": int(self.bandwidth),
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
        }
        major, minor = _CUDNN
        versions = {
            "driver_version": _CUDA,
            "runtime_version": _CUDA,
            "compile_time_toolkit_version": _CUDA,
            "dnn_version": f"{major}.{minor}.0",
        }
        lines = [f"  {name}: {value}" for name, value in info.items()]
        lines += [f'  {name}: "{value}"' for name, value in versions.items()]
        return "\n".join(
            [
                "gpu_device_info {",
                *lines,
                f"  cuda_compute_capability {{ major: {cuda.major} minor: {cuda.minor} }}",
                "}",
                'platform_name: "CUDA"',
                f"dnn_version_info {{ major: {major} minor: {minor} }}",
                f'device_description_str: "{self.description}"',
                "",
            ]
        )

    def topology(self, count: int) -> dict[str, Any]:
        """Returns arguments of `jax.experimental.topologies.get_topology_desc` for `count` devices, 8 per host.

        Raises:
          UserError: `count` exceeds one host and is not a multiple of 8.
        """
        if count > GPUS_PER_HOST and count % GPUS_PER_HOST:
            low = count // GPUS_PER_HOST * GPUS_PER_HOST
            raise UserError(
                f"{count} GPUs do not fill hosts of {GPUS_PER_HOST}; use {low} or {low + GPUS_PER_HOST} GPUs"
            )
        hosts, gpus = max(count // GPUS_PER_HOST, 1), min(count, GPUS_PER_HOST)
        return {"platform": self.platform, "target_config": self.config_text(), "topology": f"1x{hosts}x{gpus}"}


@dataclasses.dataclass(frozen=True)
class TpuTarget:
    """TPU generation, as named by its compiler.

    Source: Google Cloud TPU documentation, the page of each version ("configurations").

    Attributes:
      generation: v4, v5e, v5p, v6e, tpu7x.
      dimensions: of the torus that connects the chips.
      max_chips: chips of the largest slice whose size is a power of two.
      megacore: True if a chip configuration must be named to join two cores into one device; v5p joins them by default.
      devices_per_chip: as JAX counts them; the two cores of a TPU7x are two devices with separate memory.
    """

    generation: str
    dimensions: int
    max_chips: int
    megacore: bool = False
    devices_per_chip: int = 1

    platform = "tpu"
    extra = "tpu"

    def shape(self, count: int) -> tuple[int, ...]:
        """Returns the chips along each dimension of a slice of `count` devices.

        Sizes are powers of two, as even as possible, ones last: 8 devices are 2x4, or 2x2x2.

        Raises:
          UserError: there is no such slice; the message names the nearest.
        """
        largest = self.max_chips * self.devices_per_chip
        if count < 1 or count & (count - 1) or count > largest:
            below = min(2 ** int(math.log2(max(count, 1))), largest)
            near = f"{below} and {below * 2}" if below < largest else f"{below}"
            raise UserError(
                f"a {self.generation} slice of {count} {'chips' if self.devices_per_chip == 1 else 'devices'} is "
                f"unsupported (supported sizes are powers of two up to {largest}); nearest: {near}"
            )
        doublings = int(math.log2(max(count // self.devices_per_chip, 1)))
        sizes = [2 ** ((doublings + i) // self.dimensions) for i in range(self.dimensions)]
        return (*(size for size in sizes if size > 1), *(1 for size in sizes if size == 1))

    def topology(self, count: int) -> dict[str, Any]:
        """Returns arguments of `jax.experimental.topologies.get_topology_desc` for `count` devices.

        Raises:
          UserError: there is no slice of `count` devices; the message names the nearest.
        """
        shape = self.shape(count)
        arguments: dict[str, Any] = {
            "platform": self.platform,
            "topology_name": f"{self.generation}:{'x'.join(map(str, shape))}",
        }
        if math.prod(shape) < 4:  # smaller than the default host of 2 × 2 chips
            arguments["chips_per_host_bounds"] = [*shape, 1][:3]
        if self.megacore:
            arguments["chip_config_name"] = "megacore"
        return arguments


Target = GpuTarget | TpuTarget
