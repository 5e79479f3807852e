"""What is told of a device: memory, bandwidth, peak FLOP/s and links. The figures stand in `gpus.py` and `tpus.py`.

Peaks are of dense matrix products, without sparsity, as published. Links are per device and direction: half of what is
published for both. A figure that nobody publishes is None or absent, never 0. GB are decimal, as data sheets have them;
GiB are binary, as drivers and compilers tell them.
"""

import dataclasses
import os
from collections.abc import Mapping

from jaxllm.hardware.compile_targets import Target

GB, GIB, MIB, TFLOPS = 10**9, 2**30, 2**20, 10**12
# What JAX reads, and what the commands set where it is not set: the share of a GPU's memory that its allocator takes
# for arrays and programs' temporaries (JAX's own default is 0.75). The rest is for CUDA, its libraries and NCCL.
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
FRACTION = 0.95


def memory_fraction() -> float:
    """The share of a GPU's memory that JAX takes: the environment's, or the commands' own."""
    told = next((os.environ[name] for name in FRACTION_VARIABLES if os.environ.get(name)), "")
    try:
        return float(told or FRACTION)
    except ValueError:  # JAX will say so, once it starts a GPU
        return FRACTION


def claim_memory() -> None:
    """Has JAX take FRACTION of a GPU where the environment says nothing of it. To be called before JAX starts."""
    if not any(os.environ.get(name) for name in FRACTION_VARIABLES):
        os.environ[FRACTION_VARIABLES[0]] = str(FRACTION)


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator as JAX counts them, or a host as a device.

    Attributes:
      name: for people.
      memory_bytes: what a program may use of it; None where that is not known.
      bandwidth: of that memory, bytes/s.
      peak_flops: by dtype of the inputs (float32 tensorfloat32 bfloat16 float16 int8 float8), FLOP/s; a dtype that is
        not there is not known, or not supported.
      source: where the figures come from.
      platform: as JAX names it: cpu | gpu | tpu.
      compile_target: what a program can be compiled for without the device; None where nobody knows.
      held_back: bytes beside `memory_bytes` that a program cannot use: the backend's share, or other processes'.
      interconnect: bytes/s to the devices of its own link domain; None where not known.
      network: bytes/s of its own network card, or its share of one, to other islands; None where not known.
      host_link: bytes/s to its host's memory; None where not known.
      vector_memory: of a TPU's core: bytes that arrays of a program may have there instead of in its memory, as its
        compiler allots them.
      link_domain: devices that the interconnect joins: those of a host, a rack or a TPU slice.
    """

    name: str
    memory_bytes: int | None
    bandwidth: float | None
    peak_flops: Mapping[str, float]
    source: str
    platform: str = "cpu"
    compile_target: Target | None = None
    held_back: int = 0
    interconnect: float | None = None
    network: float | None = None
    host_link: float | None = None
    vector_memory: int = 0
    link_domain: int = 1

    @property
    def total_bytes(self) -> int | None:
        """All of its memory."""
        return None if self.memory_bytes is None else self.memory_bytes + self.held_back

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of products of such inputs in JAX's default precision, in which the programs run.

        There float32 inputs are multiplied as TensorFloat-32 where a GPU has it, and in one bfloat16 pass on a TPU
        (`jax.lax.Precision.DEFAULT`): a peak of float32 units would be exceeded.
        """
        if dtype == "float32":
            quick = "bfloat16" if self.platform == "tpu" else "tensorfloat32"
            return self.peak_flops.get(quick, self.peak_flops.get(dtype))
        return self.peak_flops.get(dtype)

    def memory_of_each(self, count: int) -> int | None:
        """What a program may use on each of `count`: CPUs that JAX pretends to have share their host's memory."""
        shared = self.platform == "cpu" and self.memory_bytes is not None
        return self.memory_bytes // count if shared and self.memory_bytes is not None else self.memory_bytes
