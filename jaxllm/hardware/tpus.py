"""Google TPU specifications, each with its source.

Memory is what a TPU's compiler lets a program use, found by compiling ever larger programs (libtpu 0.0.42, to 2 MiB);
the runtime reserves the rest. For a v5p it goes to 95.74 GiB of 96, while the documentation promises 95.

Vector memory (VMEM) is what the compiler allots to a program of many small arrays in its buffer assignment. A v4 has
too little for any. On a v5p, whose two cores make one device, it allots 47 MiB, but none to outputs of matmuls.
"""

import dataclasses

from jaxllm.hardware.compile_targets import TpuTarget
from jaxllm.hardware.spec import GB, GIB, MIB, TFLOPS, Device


@dataclasses.dataclass(frozen=True)
class _TpuSpec:
    """Specification of one TPU device, in GiB, GB/s and TFLOP/s.

    Attributes:
      total, usable: GiB of memory; of them, what a program may use.
      bandwidth: of the memory, GB/s.
      bf16, int8, fp8: peak TFLOP/s; 0 if not published.
      ici, network: GB/s per direction, to chips of the same slice and to other slices; a network of 0 is not published.
      vector: MiB of vector memory (VMEM) for arrays.
    """

    total: float
    usable: float
    bandwidth: float
    bf16: float
    ici: float
    network: float = 0
    int8: float = 0
    fp8: float = 0
    vector: int = 0


def _tpu(name: str, spec: _TpuSpec, target: TpuTarget, source: str = "") -> Device:
    peaks = {"bfloat16": spec.bf16, "int8": spec.int8, "float8": spec.fp8}
    source = source or f"Google Cloud TPU documentation, {name}, key specifications (2025)"
    memory = int(spec.usable * GIB)
    return Device(
        name=name,
        memory_bytes=memory,
        bandwidth=spec.bandwidth * GB,
        peak_flops={dtype: value * TFLOPS for dtype, value in peaks.items() if value},
        source=f"{source}; no float32 peak is published. Memory: {spec.usable} of {spec.total} GiB, the "
        "most that the compiler lets a program use",
        platform="tpu",
        compile_target=target,
        reserved_bytes=int(spec.total * GIB) - memory,
        interconnect=spec.ici * GB,
        network=spec.network * GB or None,
        vector_memory=spec.vector * MIB,
        link_domain=target.max_chips * target.devices_per_chip,
    )


_V4_SOURCE = "Google Cloud TPU documentation, TPU v4 (2025); links: Jouppi et al. 2023, table 4, 6 × 50 GB/s"
_V7X_SOURCE = "Google Cloud TPU documentation, TPU7x (2025), half of a chip's: each of its two cores is a device"

# Value of `--device` -> (regular expression for JAX's `device_kind`, device).
TPUS: dict[str, tuple[str, Device]] = {
    "v4": (
        r"TPU v4$",
        _tpu(
            "TPU v4",
            _TpuSpec(32, 30.74, 1200, 275, ici=300, int8=275),
            TpuTarget("v4", 3, 4096, megacore=True),
            _V4_SOURCE,
        ),
    ),
    "v5e": (
        r"TPU v5 ?(lite|e)$",
        _tpu(
            "TPU v5e",
            _TpuSpec(16, 15.74, 819, 197, ici=200, network=3.125, int8=393, vector=112),
            TpuTarget("v5e", 2, 256),
        ),
    ),
    "v5p": (
        r"TPU v5p?$",
        _tpu("TPU v5p", _TpuSpec(96, 95.74, 2765, 459, ici=600, network=6.25, fp8=459), TpuTarget("v5p", 3, 4096)),
    ),
    "v6e": (
        r"TPU v6 ?(lite|e)$",
        _tpu(
            "TPU v6e",
            _TpuSpec(32, 31.24, 1638, 918, ici=400, network=12.5, int8=1836, fp8=918, vector=94),
            TpuTarget("v6e", 2, 256),
        ),
    ),
    "v7x": (
        r"TPU ?v?7x$",
        _tpu(
            "TPU v7x core",
            _TpuSpec(96, 94.74, 3690, 1153.5, ici=300, network=6.25, fp8=2307, vector=64),
            TpuTarget("tpu7x", 3, 4096, devices_per_chip=2),
            _V7X_SOURCE,
        ),
    ),
}
