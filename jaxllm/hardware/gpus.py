"""NVIDIA GPU specifications, each with its source.

Memory is what a driver reports to a program: less than the data sheet's if error correction takes some (L4, L40S),
more if "80 GB" are gibibytes. "XLA" is xla/backends/gpu/target_config/specs of OpenXLA, which publishes values that
drivers report. "PyTorch" is the total capacity in public out-of-memory messages, the lowest of them.
"""

import dataclasses
from collections.abc import Mapping

from jaxllm.hardware.compile_targets import (
    ADA,
    AMPERE,
    AMPERE_RTX,
    BLACKWELL,
    BLACKWELL_RTX,
    GPUS_PER_HOST,
    HOPPER,
    MIB,
    VOLTA,
    Capability,
    GpuTarget,
)
from jaxllm.hardware.spec import GB, GIB, TFLOPS, Device, memory_fraction

# GB/s of 16 lanes of PCIe per direction, by generation, net of encoding (PCI Express Base Specification).
_PCIE = {3: 15.75, 4: 31.5, 5: 63.0}


def _peaks(
    f32: float, half: float, tf32: float = 0, int8: float = 0, fp8: float = 0, bf16: bool = True
) -> dict[str, float]:
    """Returns peak FLOP/s by dtype from TFLOP/s; bfloat16 is as fast as float16, or unsupported."""
    peaks = {"float32": f32, "tensorfloat32": tf32, "float16": half, "int8": int8, "float8": fp8}
    return {dtype: value * TFLOPS for dtype, value in (peaks | {"bfloat16": half * bf16}).items() if value}


@dataclasses.dataclass(frozen=True)
class _Memory:
    bytes: int
    source: str


def _pytorch(gib: float) -> _Memory:
    return _Memory(int(gib * GIB), "PyTorch")


@dataclasses.dataclass(frozen=True)
class _ChipSpec:
    """GPU specification for the compiler; see `jaxllm.hardware.compile_targets.GpuTarget`."""

    description: str
    capability: Capability
    multiprocessors: int
    clock_ghz: float
    l2_bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class _Links:
    """Link bandwidths of one GPU in GB/s per direction, and the PCIe generation.

    Without NVLink (0), PCIe connects a GPU to its neighbours. Without `host` (0), PCIe also connects it to its host.
    """

    pcie: int
    source: str
    nvlink: float = 0
    network: float = 0
    link_domain: int = GPUS_PER_HOST
    host: float = 0


def _gpu(
    name: str,
    memory: _Memory,
    bandwidth: float,
    peaks: Mapping[str, float],
    source: str,
    chip: _ChipSpec,
    links: _Links,
) -> Device:
    """Returns the specification of a GPU.

    Args:
      bandwidth: of the device memory, GB/s.
      source: of bandwidth and peaks.
    """
    chip_fields = {field.name: getattr(chip, field.name) for field in dataclasses.fields(chip)}
    fraction, pcie = memory_fraction(), _PCIE[links.pcie]
    usable = int(memory.bytes * fraction)
    source = (
        f"NVIDIA, {source}; without sparsity. Memory: {fraction:.0%} of the {memory.bytes / GIB:.2f} GiB that the "
        f"driver reports ({memory.source}); {(memory.bytes - usable) / GIB:.2f} GiB are reserved for CUDA, its "
        f"libraries and NCCL. Links: {links.source}"
    )
    return Device(
        name=name,
        memory_bytes=usable,
        bandwidth=bandwidth * GB,
        peak_flops=peaks,
        source=source,
        platform="gpu",
        compile_target=GpuTarget(**chip_fields, memory_bytes=memory.bytes, bandwidth=bandwidth * GB),
        reserved_bytes=memory.bytes - usable,
        interconnect=(links.nvlink or pcie) * GB,
        network=links.network * GB or None,
        host_link=(links.host or pcie) * GB,
        link_domain=links.link_domain,
    )


_VOLTA = "V100 architecture white paper (2017); clock and L2 as reported by the driver (XLA)"
_GA100 = "A100 architecture white paper (2020), table 4"
_GH100 = "H100 architecture white paper (2023), table 3; clock as reported by the driver"
_GB100 = "as reported by the driver (XLA)"
_GA102 = "GA102 architecture white paper (2021), table of the GeForce RTX 3090"
_AD102 = "Ada architecture white paper (2022), table 2"
_V100_16 = _ChipSpec("Tesla V100-SXM2-16GB", VOLTA, 80, 1.53, 6 * MIB, _VOLTA)
_V100_32 = dataclasses.replace(_V100_16, description="Tesla V100-SXM2-32GB")
_A100_40 = _ChipSpec("NVIDIA A100-SXM4-40GB", AMPERE, 108, 1.41, 40 * MIB, _GA100)
_A100_80 = dataclasses.replace(_A100_40, description="NVIDIA A100-SXM4-80GB")
_H100_SXM = _ChipSpec("NVIDIA H100 80GB HBM3", HOPPER, 132, 1.98, 50 * MIB, _GH100)
_H100_PCIE = _ChipSpec("NVIDIA H100 PCIe", HOPPER, 114, 1.755, 50 * MIB, _GH100)
_H100_NVL = _ChipSpec("NVIDIA H100 NVL", HOPPER, 132, 1.785, 50 * MIB, "H100 NVL product brief (2024): boost clock")
_H200 = dataclasses.replace(_H100_SXM, description="NVIDIA H200", source=f"{_GH100}; the H200 has the same chip")
_B200 = _ChipSpec("NVIDIA B200", BLACKWELL, 148, 1.965, 132_644_864, _GB100)
_GB200 = _ChipSpec("NVIDIA GB200", BLACKWELL, 152, 2.062, 135_528_448, _GB100)
_L4 = _ChipSpec("NVIDIA L4", ADA, 58, 2.04, 48 * MIB, "L4 data sheet (2023) and Ada white paper (2022), AD104")
_L40S = _ChipSpec("NVIDIA L40S", ADA, 142, 2.52, 96 * MIB, "L40S data sheet (2023) and Ada white paper (2022), AD102")
_RTX_3090 = _ChipSpec("NVIDIA GeForce RTX 3090", AMPERE_RTX, 82, 1.695, 6 * MIB, _GA102)
_RTX_4090 = _ChipSpec("NVIDIA GeForce RTX 4090", ADA, 128, 2.52, 72 * MIB, _AD102)
_BLACKWELL_RTX = "RTX Blackwell architecture white paper (2025), table of the GeForce RTX 5090"
_RTX_5090 = _ChipSpec("NVIDIA GeForce RTX 5090", BLACKWELL_RTX, 170, 2.407, 96 * MIB, _BLACKWELL_RTX)

_DGX_1 = _Links(3, "NVLink 2 and PCIe 3; DGX-1 data sheet (2017): 4 × 100 Gb/s for 8", 150, 6.25)
_DGX_A100 = _Links(4, "NVLink 3 and PCIe 4; DGX A100 data sheet (2020): 200 Gb/s each", 300, 25)
_DGX_H100 = _Links(5, "NVLink 4 and PCIe 5; DGX H100 and H200 data sheets (2023, 2024): 400 Gb/s each", 450, 50)
_DGX_B200 = _Links(5, "NVLink 5 and PCIe 5; DGX B200 data sheet (2024): 400 Gb/s each", 900, 50)
_NVL72_SOURCE = "NVLink 5 over 72; half a Grace's NVLink-C2C; GB200 NVL72 and DGX data sheets (2024): 400 Gb/s each"
_NVL72 = _Links(5, _NVL72_SOURCE, 900, 50, link_domain=72, host=225)
_NO_NETWORK = "no network included"
_PAIRS = _Links(5, f"PCIe 5, because NVLink bridges join only two; {_NO_NETWORK}")
_PCIE_3090 = _Links(4, f"PCIe 4, because NVLink bridges join only two; {_NO_NETWORK}")
_PCIE_4 = _Links(4, f"PCIe 4; {_NO_NETWORK}")
_PCIE_5 = _Links(5, f"PCIe 5; {_NO_NETWORK}")

_V100_PEAKS = _peaks(15.7, 125, bf16=False)
_A100_PEAKS = _peaks(19.5, 312, tf32=156, int8=624)
_H100_PEAKS = _peaks(66.9, 989.4, tf32=494.7, int8=1978.9, fp8=1978.9)
_H100_PCIE_PEAKS = _peaks(51.2, 756, tf32=378, int8=1513, fp8=1513)
_H100_NVL_PEAKS = _peaks(60, 835.5, tf32=417.5, int8=1670.5, fp8=1670.5)
_B200_PEAKS = _peaks(75, 2250, tf32=1125, int8=4500, fp8=4500)
_GB200_PEAKS = _peaks(80, 2500, tf32=1250, int8=5000, fp8=5000)
_L4_PEAKS = _peaks(30.3, 121, tf32=60, int8=242.5, fp8=242.5)
_L40S_PEAKS = _peaks(91.6, 362.05, tf32=183, int8=733, fp8=733)
_RTX_3090_PEAKS = _peaks(35.6, 71, tf32=35.6, int8=284)
_RTX_4090_PEAKS = _peaks(82.6, 165.2, tf32=82.6, int8=660.6, fp8=330.3)
_RTX_5090_PEAKS = _peaks(104.8, 209.5, tf32=104.8, int8=838, fp8=419)
_H100_SOURCE = "H100 architecture white paper and data sheet (2023), tables of specifications"
_V100_SOURCE = "V100 architecture white paper (2017), comparison of Tesla accelerators; no bfloat16"
_GB200_SOURCE = "GB200 NVL72 data sheet (2024), a 72nd of the rack's"
_H100_MEMORY = _Memory(84_942_979_072, "XLA")
_HGX_B200 = "HGX and DGX B200 data sheets (2024), an eighth of the system's"

# Value of `--device` -> (regular expression for JAX's `device_kind`, device).
GPUS: dict[str, tuple[str, Device]] = {
    "v100-16gb": (
        r"V100-SXM2-16GB$",
        _gpu("V100 16GB", _Memory(16_935_682_048, "XLA"), 900, _V100_PEAKS, _V100_SOURCE, _V100_16, _DGX_1),
    ),
    "v100-32gb": (
        r"V100-SXM[23]-32GB$",
        _gpu("V100 32GB", _pytorch(31.74), 900, _V100_PEAKS, _V100_SOURCE, _V100_32, _DGX_1),
    ),
    "a100-40gb": (
        r"\bA100-(SXM4|PCIE)-40GB$",
        _gpu("A100 40GB", _Memory(42_298_834_944, "XLA"), 1555, _A100_PEAKS, _GA100, _A100_40, _DGX_A100),
    ),
    "a100-80gb": (
        r"\bA100(-SXM4-80GB| 80GB PCIe)$",
        _gpu("A100 80GB", _pytorch(79.14), 2039, _A100_PEAKS, "A100 80GB SXM data sheet (2021)", _A100_80, _DGX_A100),
    ),
    "h100": (
        r"\bH100 80GB HBM3$",
        _gpu("H100 SXM", _H100_MEMORY, 3350, _H100_PEAKS, _H100_SOURCE, _H100_SXM, _DGX_H100),
    ),
    "h100-pcie": (
        r"\bH100 PCIe$",
        _gpu("H100 PCIe", _H100_MEMORY, 2039, _H100_PCIE_PEAKS, _H100_SOURCE, _H100_PCIE, _PAIRS),
    ),
    "h100-nvl": (
        r"\bH100 NVL$",
        _gpu(
            "H100 NVL",
            _pytorch(93.0),
            3938,
            _H100_NVL_PEAKS,
            "H100 data sheet and NVL product brief (2024)",
            _H100_NVL,
            _PAIRS,
        ),
    ),
    "h200": (
        r"\bH200( 141GB HBM3e)?$",
        _gpu("H200 SXM", _pytorch(139.72), 4800, _H100_PEAKS, "H200 data sheet (2024)", _H200, _DGX_H100),
    ),
    "b200": (
        r"\bB200$",
        _gpu("B200", _Memory(191_514_411_008, "XLA"), 8000, _B200_PEAKS, _HGX_B200, _B200, _DGX_B200),
    ),
    "gb200": (
        r"\bGB200$",
        _gpu("GB200", _Memory(197_897_748_480, "XLA"), 8000, _GB200_PEAKS, _GB200_SOURCE, _GB200, _NVL72),
    ),
    "l4": (
        r"\bL4$",
        _gpu("L4", _pytorch(22.03), 300, _L4_PEAKS, "L4 data sheet (2023)", _L4, _PCIE_4),
    ),
    "l40s": (
        r"\bL40S$",
        _gpu("L40S", _pytorch(44.39), 864, _L40S_PEAKS, "L40S data sheet (2023)", _L40S, _PCIE_4),
    ),
    "rtx3090": (
        r"RTX 3090$",
        _gpu("RTX 3090", _pytorch(23.68), 936, _RTX_3090_PEAKS, _GA102, _RTX_3090, _PCIE_3090),
    ),
    "rtx4090": (
        r"RTX 4090$",
        _gpu("RTX 4090", _pytorch(23.52), 1008, _RTX_4090_PEAKS, _AD102, _RTX_4090, _PCIE_4),
    ),
    "rtx5090": (
        r"RTX 5090$",
        _gpu("RTX 5090", _pytorch(31.34), 1792, _RTX_5090_PEAKS, _BLACKWELL_RTX, _RTX_5090, _PCIE_5),
    ),
}
