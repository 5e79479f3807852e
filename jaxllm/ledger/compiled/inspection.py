"""Compiles the programs of a task and reads memory, FLOPs and collectives from XLA's analyses and the HLO text."""

import dataclasses
import pathlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxllm import programs
from jaxllm.config import Architecture, Config
from jaxllm.config.inference_mesh import ONE_DEVICE, InferenceMesh
from jaxllm.decode import cache as cache_lib
from jaxllm.decode import weights
from jaxllm.ledger.compiled import collectives as collectives_lib
from jaxllm.ledger.compiled import hlo, matmuls
from jaxllm.ledger.formula.exact.formats import AUTO
from jaxllm.ledger.rows import Unknown, figure_from_json, figure_to_json
from jaxllm.programs import Program
from jaxllm.quantize import formats as quantize_formats
from jaxllm.step.precision import policy_for

# Fields for device memory. The host memory fields are separate and not included in them.
_FIELDS = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliases": "alias_size_in_bytes",
    "temps": "temp_size_in_bytes",
}
_HOST_FIELDS = {f"host_{name}": f"host_{field}" for name, field in _FIELDS.items()}
NAMES = (*_FIELDS, *_HOST_FIELDS, "peak", "flops")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TPU_TOTAL = re.compile(r"Memory Space: default \(color=0\)\s+Total bytes: (\d+)")
# A donated argument shares its allocation with an output: `allocation 1: size 512, parameter 0, … maybe-live-out:`.
_TPU_ARGUMENT = re.compile(r"^allocation \d+: size (\d+), parameter (?!.*\bcolor\b)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class SamplingSpec:
    """Sizes, cache format and mesh of inference.

    Attributes:
      batch: Number of sequences decoded together, over all devices; a multiple of the mesh's `data`.
      context: Maximum tokens per sequence, prompt included.
      chunk: Prompt tokens per sequence that one prefill call processes.
      steps: Maximum tokens per sequence that one decode call generates.
      cache: Format of keys and values: int8, or any other for the compute dtype.
      mesh: Number of devices along each mesh axis.
      weights: Format of the weights: a name of `quantize.formats`, or any other for the compute dtype.
    """

    batch: int
    context: int
    chunk: int
    steps: int
    cache: str = AUTO
    mesh: InferenceMesh = ONE_DEVICE
    weights: str = AUTO


def task_programs(
    config: Config, model: Architecture, platform: str, mesh: Mesh | AbstractMesh, sampling: SamplingSpec | None
) -> dict[str, Program]:
    """Returns the programs that a task runs, by name: `train_step` for training, `prefill` and `decode` for sampling.

    Args:
      config: Configuration of the run.
      model: Architecture of the model.
      platform: Platform that the programs run on: cpu | gpu | tpu.
      mesh: Mesh of the run's devices; for sampling on one device it is not used.
      sampling: Sizes of a sampling run; None for training.
    """
    if sampling is None:
        step_spec = programs.make_step_spec(config, model, platform)
        return {"train_step": programs.train_step(config, step_spec, mesh)}  # type: ignore[arg-type]
    dtype = policy_for("auto", platform).compute_dtype
    layout = weights.layout_for(platform)
    quantize = quantize_formats.from_name(sampling.weights)
    over = mesh if sampling.mesh.count > 1 else None
    cache_spec = (sampling.context, dtype, cache_lib.dtype_of(sampling.cache, dtype), layout, over, quantize)
    return {
        "prefill": programs.prefill(model, sampling.batch, sampling.chunk, *cache_spec),
        "decode": programs.decode(model, sampling.batch, sampling.steps, *cache_spec),
    }


def figures(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Returns XLA's memory figures, in bytes on one device, and FLOPs of a compiled program.

    Returns:
      {"arguments", "outputs", "aliases", "temps", the same four with the prefix "host_", "peak", "flops"}: each a
      number or Unknown. `peak` is arguments + outputs + temps − aliases, since an output that aliases an argument
      shares its buffer. It is not the backend's `peak_memory_in_bytes`, which omits temporaries on some backends.
      Buffers in host memory are in the "host_" figures only.
    """
    return parse_analyses(compiled.memory_analysis(), compiled.cost_analysis())


def parse_analyses(memory: Any, cost: Any) -> dict[str, Any]:
    """Returns `figures` from XLA's memory and cost analyses; either may be None or lack fields."""
    sizes: dict[str, Any] = {}
    for name, field in (_FIELDS | _HOST_FIELDS).items():
        value = getattr(memory, field, None)
        why = "this backend gives no memory analysis" if memory is None else f"its memory analysis has no {field}"
        sizes[name] = Unknown(why) if value is None else int(value)
    missing = [name for name in _FIELDS if isinstance(sizes[name], Unknown)]
    if missing:
        sizes["peak"] = Unknown(f"{', '.join(missing)}: {sizes[missing[0]].why}")
    else:
        sizes["peak"] = sizes["arguments"] + sizes["outputs"] + sizes["temps"] - sizes["aliases"]
    cost = cost[0] if isinstance(cost, (list, tuple)) and cost else cost
    flops = cost.get("flops") if isinstance(cost, dict) else None
    # XLA reports a negative number, or none, if the FLOPs are unknown.
    sizes["flops"] = int(flops) if flops is not None and flops >= 0 else Unknown("its cost analysis has no flops")
    return sizes


def tpu_figures(folder: pathlib.Path) -> dict[str, Any]:
    """Returns {"temps", "peak"} in bytes of main memory on one TPU, from the compiler's dump; {} if it has no report.

    For programs with donated arguments, the `memory_analysis` of an absent TPU is unusable: it counts donated arguments
    as temporaries in some programs and not in others. Example (libtpu of JAX 0.10.2): for a 16,384² matmul with one
    argument of 256 MiB and 1,024 MiB of temporaries, it reports 1,280 MiB of temporaries, and 768 MiB if nothing is
    donated. The report written with `xla_dump_to` has the total of the buffer assignment per memory space.

    Args:
      folder: Value of `xla_dump_to`. If it has several modules, the one with the highest peak is the program.
    """
    best: dict[str, Any] = {}
    for report in folder.glob("*after_optimizations-memory-usage-report.txt"):
        assignment = report.with_name(report.name.replace("memory-usage-report", "buffer-assignment"))
        total = _TPU_TOTAL.search(report.read_text())
        if total is None or not assignment.exists():
            continue
        peak = int(total[1])
        arguments = sum(int(size) for size in _TPU_ARGUMENT.findall(assignment.read_text()))
        if peak >= best.get("peak", 0):
            best = {"temps": peak - arguments, "peak": peak}
    return best


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Result of compiling a program: memory figures, collectives and matmuls, or the compiler's out-of-memory error.

    Attributes:
      figures: Result of `figures`; all Unknown after an out-of-memory error, except a peak that the error names.
      collectives: Result of `collectives.summary`; Unknown if the HLO text cannot be parsed.
      matmul_counts: Fields of `matmuls.Matmuls`; Unknown if the HLO text cannot be parsed.
      seconds: Compile time.
      oom_message: The compiler's message if the program does not fit the device, else "".
    """

    figures: Mapping[str, Any]
    collectives: list[dict[str, Any]] | Unknown
    matmul_counts: Mapping[str, Any] | Unknown
    seconds: float
    oom_message: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "figures": {name: figure_to_json(value) for name, value in self.figures.items()},
            "collectives": figure_to_json(self.collectives),
            "products": figure_to_json(self.matmul_counts),
            "seconds": round(self.seconds, 3),
            "refused": self.oom_message,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Inspection":
        collectives, matmul_counts = value["collectives"], value["products"]
        return cls(
            figures={name: figure_from_json(figure) for name, figure in value["figures"].items()},
            collectives=collectives if isinstance(collectives, list) else figure_from_json(collectives),
            matmul_counts=figure_from_json(matmul_counts) if "unknown" in matmul_counts else matmul_counts,
            seconds=value["seconds"],
            oom_message=value["refused"],
        )


def inspect(
    compile_: Callable[[], jax.stages.Compiled],
    figures_of: Callable[[jax.stages.Compiled], Mapping[str, Any]] = figures,
) -> Inspection:
    """Compiles a program and inspects it; a compiler's out-of-memory error is returned, not raised.

    Args:
      compile_: Function that compiles the program.
      figures_of: Replaces `figures` for backends whose `memory_analysis` is not enough.
    Raises:
      jax.errors.JaxRuntimeError: Compilation failed for another reason.
    """
    begun = time.perf_counter()
    try:
        compiled = compile_()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return oom_inspection(str(error), time.perf_counter() - begun)
    seconds = time.perf_counter() - begun
    collectives: list[dict[str, Any]] | Unknown
    matmul_counts: Mapping[str, Any] | Unknown
    try:
        module = hlo.parse(compiled.as_text() or "")
        collectives = collectives_lib.summary(collectives_lib.collectives(module))
        matmul_counts = dataclasses.asdict(matmuls.count_matmuls(module))
    except (ValueError, KeyError, IndexError) as error:  # HLO syntax that the parser does not support
        collectives = matmul_counts = Unknown(f"the HLO text cannot be parsed: {type(error).__name__}: {error}")
    return Inspection(figures_of(compiled), collectives, matmul_counts, seconds)


def oom_inspection(message: str, seconds: float) -> Inspection:
    """Builds the Inspection of a RESOURCE_EXHAUSTED error; `peak` is the size in its message, else Unknown."""
    text = " ".join(message.split())
    text = text[text.find("RESOURCE_EXHAUSTED") :]
    first = re.split(r"(?<=[a-z).]\.) (?=[A-Z])", text)[0]
    why = Unknown(f"out of memory: {first[:200]}")
    sizes: dict[str, Any] = dict.fromkeys(NAMES, why)
    needs = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available", text) or re.search(r"Used ([\d.]+)([KMGT]?) of", text)
    if needs:
        sizes["peak"] = int(float(needs[1]) * _UNITS[needs[2]])
    return Inspection(sizes, why, why, seconds, first[:200])
