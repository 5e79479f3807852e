"""Device specification: memory, bandwidth, peak FLOP/s and links. The values are in `gpus.py` and `tpus.py`.

Peaks are for dense matmuls without sparsity, as published. Link bandwidths are per device and direction: half of a
published bidirectional figure. An unpublished value is None or absent, never 0. GB are decimal, as in data sheets;
GiB are binary, as drivers and compilers report them.
"""

import dataclasses
import os
from collections.abc import Mapping

from jaxllm.hardware.compile_targets import Target

GB, GIB, MIB, TFLOPS = 10**9, 2**30, 2**20, 10**12
# Variables that JAX reads; the commands set the first if none is set. The value is the fraction of a GPU's memory that
# the allocator reserves for arrays and temporaries (JAX's default is 0.75). CUDA, its libraries and NCCL use the rest.
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
FRACTION = 0.95


def memory_fraction() -> float:
    """Returns the fraction of a GPU's memory that JAX allocates: the environment's, or FRACTION if it sets none."""
    value = next((os.environ[name] for name in FRACTION_VARIABLES if os.environ.get(name)), "")
    try:
        return float(value or FRACTION)
    except ValueError:  # JAX reports the error when it initializes a GPU
        return FRACTION


def set_memory_fraction() -> None:
    """Sets the environment so that JAX allocates FRACTION of a GPU's memory, unless it is set already.

    Must be called before JAX initializes its backends.
    """
    if not any(os.environ.get(name) for name in FRACTION_VARIABLES):
        os.environ[FRACTION_VARIABLES[0]] = str(FRACTION)


@dataclasses.dataclass(frozen=True)
class Device:
    """Device specification: one accelerator as JAX counts them, or a host CPU.

    Attributes:
      name: for messages.
      memory_bytes: bytes that a program may use; None if unknown.
      bandwidth: of that memory, bytes/s; None if unknown.
      peak_flops: FLOP/s by dtype of the inputs (float32 tensorfloat32 bfloat16 float16 int8 float8); a missing dtype is
        unknown or not supported.
      source: where the values come from.
      platform: as JAX names it: cpu | gpu | tpu.
      compile_target: what programs can be compiled for without the device; None if unknown.
      reserved_bytes: bytes beyond `memory_bytes` that the backend or other processes reserve.
      interconnect: bytes/s to the devices of the same link domain; None if unknown.
      network: bytes/s to other link domains, through the device's network card or its fraction of one; None if unknown.
      host_link: bytes/s to the host's memory; None if unknown.
      vector_memory: bytes of a TPU core's vector memory (VMEM) that the compiler allots to arrays of a program in place
        of device memory.
      link_domain: number of devices that the interconnect joins: those of a host, a rack or a TPU slice.
    """

    name: str
    memory_bytes: int | None
    bandwidth: float | None
    peak_flops: Mapping[str, float]
    source: str
    platform: str = "cpu"
    compile_target: Target | None = None
    reserved_bytes: int = 0
    interconnect: float | None = None
    network: float | None = None
    host_link: float | None = None
    vector_memory: int = 0
    link_domain: int = 1

    @property
    def total_bytes(self) -> int | None:
        """Total memory of the device in bytes, usable or not; None if unknown."""
        return None if self.memory_bytes is None else self.memory_bytes + self.reserved_bytes

    def peak(self, dtype: str) -> float | None:
        """Returns the peak FLOP/s of matmuls with inputs of a dtype, in JAX's default precision; None if unknown.

        In that precision (`jax.lax.Precision.DEFAULT`, which the programs use), float32 inputs are multiplied in
        TensorFloat-32 on GPUs that support it, and in one bfloat16 pass on a TPU. Programs would exceed the peak of the
        float32 units.
        """
        if dtype == "float32":
            multiplied = "bfloat16" if self.platform == "tpu" else "tensorfloat32"
            return self.peak_flops.get(multiplied, self.peak_flops.get(dtype))
        return self.peak_flops.get(dtype)

    def memory_of_each(self, count: int) -> int | None:
        """Returns the bytes usable on each of `count` devices: simulated CPU devices share their host's memory."""
        shared = self.platform == "cpu" and self.memory_bytes is not None
        return self.memory_bytes // count if shared and self.memory_bytes is not None else self.memory_bytes
