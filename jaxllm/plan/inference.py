"""Search for the fastest way to sample from a model on given devices, with the closed-form formulas."""

import dataclasses
import functools
import itertools
import time
from typing import Any

from jaxllm.config import Architecture
from jaxllm.config.inference_mesh import ONE_DEVICE, InferenceMesh
from jaxllm.decode.generate import PREFILL_CHUNK
from jaxllm.hardware.detect import Device
from jaxllm.ledger import bill
from jaxllm.ledger.advice.remedies import largest_fitting
from jaxllm.ledger.formula import inference_memory, roofline
from jaxllm.ledger.formula.exact import formats as formats_lib
from jaxllm.ledger.rows import Ledger, Unknown
from jaxllm.plan.request import SearchResult
from jaxllm.quantize import formats as quantize_formats
from jaxllm.step.precision import policy_for

# Formats narrower than the compute format, in the order in which a plan tries them.
NARROW_WEIGHTS = (formats_lib.INT8, "int4")
NARROW_CACHES = (formats_lib.INT8,)


@dataclasses.dataclass(frozen=True)
class InferenceChoice:
    """Sampling setup: formats of weights and KV cache, batch size, context length and mesh.

    Attributes:
      weights, cache: formats, as named in `jaxllm.ledger.formula.exact.formats`.
      batch: number of concurrent sequences, over all devices.
      context: maximum tokens per sequence, prompt and generated text together.
      mesh: number of devices along each mesh axis.
    """

    weights: str
    cache: str
    batch: int
    context: int
    mesh: InferenceMesh = ONE_DEVICE

    @property
    def summary(self) -> str:
        """Describes the setup in one line."""
        over = f", mesh {self.mesh}" if self.mesh.count > 1 else ""
        return f"weights {self.weights}, KV cache {self.cache}, {self.batch} × {self.context:,} tokens{over}"

    @property
    def fields(self) -> dict[str, Any]:
        """The setup as flags of `jaxllm.ledger`, name -> value."""
        return dataclasses.asdict(self) | {"mesh": str(self.mesh)}


@dataclasses.dataclass(frozen=True)
class InferenceSpace:
    """Sampling setups among which the planner chooses.

    Attributes:
      name: model name for messages.
      model: the model.
      context: maximum tokens per sequence.
      weights, caches: formats to choose among.
      batch: number of concurrent sequences; None to search for it.
      count: number of devices.
      max_batch: largest number of concurrent sequences per data-parallel group that a search tries.
    """

    name: str
    model: Architecture
    context: int
    weights: tuple[str, ...]
    caches: tuple[str, ...]
    batch: int | None = None
    count: int = 1
    max_batch: int = 4096

    @property
    def meshes(self) -> tuple[InferenceMesh, ...]:
        """Every mesh of these devices that can shard the model; never empty."""
        sizes = [n for n in range(1, self.count + 1) if self.count % n == 0]
        meshes = (InferenceMesh(self.count // tensor, tensor) for tensor in sizes)
        return tuple(mesh for mesh in meshes if mesh.supports(self.model))


@dataclasses.dataclass(frozen=True)
class InferenceEstimate:
    """Closed-form estimate of a sampling setup that fits.

    Attributes:
      choice: the setup.
      peak_bytes: peak memory of the device.
      seconds: lower bound on the time to decode one token for every sequence at full context; infinite if unknown.
      bound: the resource that sets `seconds`.
      prefill_seconds: lower bound on the time to prefill full-context prompts for all sequences; infinite if unknown.
      unknown: the rate that is unknown; "" if all are known.
    """

    choice: InferenceChoice
    peak_bytes: int
    seconds: float
    bound: str
    prefill_seconds: float
    unknown: str

    @property
    def tokens_per_second(self) -> float:
        """Upper bound on the tokens per second of all sequences together."""
        return self.choice.batch / self.seconds

    @property
    def rank(self) -> tuple[float, tuple[int, int], int]:
        """Sort key, smaller is better: most tokens per second, then wider formats, then the smaller peak.

        Wider formats come first because narrower ones change the model slightly.
        """
        bits = (-formats_lib.by_name(self.choice.weights).bits, -formats_lib.by_name(self.choice.cache).bits)
        return -self.tokens_per_second, bits, self.peak_bytes


InferenceResult = SearchResult[InferenceSpace, InferenceChoice, InferenceEstimate]


def has_program(choice: InferenceChoice, device: Device, model: Architecture) -> bool:
    """Returns True if the decoder supports weights and cache in these formats."""
    compute_format = bill.compute_format(device.platform)
    quantized = quantize_formats.from_name(choice.weights)
    one = choice.mesh.count == 1 and device.platform != "tpu"
    weights = choice.weights == compute_format or (
        quantized is not None and one and quantize_formats.divides(model, quantized)
    )
    return weights and choice.cache in (compute_format, formats_lib.INT8)


def weight_formats(device: Device) -> tuple[str, ...]:
    """Returns the weight formats to choose among on a device, widest first."""
    return bill.compute_format(device.platform), *NARROW_WEIGHTS


def cache_formats(device: Device) -> tuple[str, ...]:
    """Returns the KV cache formats to choose among on a device, widest first."""
    return bill.compute_format(device.platform), *NARROW_CACHES


def ledger_of(space: InferenceSpace, device: Device, choice: InferenceChoice) -> Ledger:
    """Returns the bill of a setup: memory only, without capacity and compute."""
    chunk = min(PREFILL_CHUNK, choice.context)
    sizes = (choice.batch, choice.context, chunk, choice.weights, choice.cache)
    return inference_memory.inference(
        space.model, *sizes, space.name, device.platform, vector_memory=device.vector_memory, mesh=choice.mesh
    )


def search(space: InferenceSpace, device: Device, budget: int) -> InferenceResult:
    """Evaluates every combination of formats, each up to the largest batch size that fits.

    Args:
      budget: bytes that may be used.
    """
    begun = time.perf_counter()
    peaks: dict[InferenceChoice, int] = {}

    def fits(weights: str, cache: str, mesh: InferenceMesh, rows: int) -> bool:
        choice = InferenceChoice(weights, cache, space.batch or rows * mesh.data, space.context, mesh)
        peaks[choice] = ledger_of(space, device, choice).peak_bytes
        return peaks[choice] <= budget

    for setup in itertools.product(space.weights, space.caches, space.meshes):
        if space.batch:
            fits(*setup, setup[2].rows(space.batch))
        else:  # every batch size that the bisection evaluates is a candidate
            largest_fitting(functools.partial(fits, *setup), space.max_batch)
    fitting = [estimate(space.model, device, choice, peak) for choice, peak in peaks.items() if peak <= budget]
    fitting.sort(key=lambda found: found.rank)
    closest = None if fitting else min(peaks.items(), key=lambda item: item[1])
    return SearchResult(space, device, budget, len(peaks), tuple(fitting), closest, time.perf_counter() - begun)


def largest_batches(result: InferenceResult, choice: InferenceChoice) -> dict[int, int]:
    """Returns the number of sequences of several lengths that fit with a choice's formats and mesh, context -> batch.

    Contexts are a quarter of the choice's to the model's context length, in steps of four; those of which not one
    sequence fits are left out.
    """
    space, mesh = result.space, choice.mesh
    contexts = [choice.context // 4, choice.context]
    while 4 * contexts[-1] <= space.model.context_length:
        contexts.append(4 * contexts[-1])

    def fits(context: int, rows: int) -> bool:
        setup = dataclasses.replace(choice, batch=rows * mesh.data, context=context)
        return ledger_of(space, result.device, setup).peak_bytes <= result.budget

    batches = {each: largest_fitting(functools.partial(fits, each), space.max_batch) * mesh.data for each in contexts}
    return {context: batch for context, batch in batches.items() if batch}


def estimate(model: Architecture, device: Device, choice: InferenceChoice, peak_bytes: int) -> InferenceEstimate:
    """Returns the estimate of a setup whose peak is already computed."""
    dtype = policy_for("auto", device.platform).compute_dtype.name
    work = (model, choice.batch, choice.context, choice.weights, choice.cache, device, dtype, choice.mesh)
    token, prompt = roofline.decode_token(*work), roofline.prefill(*work)
    seconds, bound, prefill_seconds = token.seconds, token.bound, prompt.seconds
    if isinstance(seconds, Unknown) or isinstance(bound, Unknown) or isinstance(prefill_seconds, Unknown):
        return InferenceEstimate(choice, peak_bytes, float("inf"), "unknown", float("inf"), token.unknown)
    return InferenceEstimate(choice, peak_bytes, seconds, bound, prefill_seconds, "")
