"""Search for the fastest way to sample from a model on one device, with the closed-form formulas."""

import bisect
import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence

from jaxllm.config import Architecture
from jaxllm.engine import generator
from jaxllm.hardware.detect import DEVICES, Device
from jaxllm.ledger import bill
from jaxllm.ledger.formula import inference_memory, roofline
from jaxllm.ledger.formula.exact import formats as formats_lib
from jaxllm.ledger.rows import Ledger, Unknown
from jaxllm.plan.remedies import Remedy
from jaxllm.step.precision import policy_for

MAX_SEQUENCES = 4096
MIN_CONTEXT = 64
# Narrower formats that a plan tries. The KV cache uses the first at most: int4 is for weights only.
INTEGERS = ("int8", "int4")


@dataclasses.dataclass(frozen=True)
class Serving:
    """Sampling setup: formats of weights and KV cache, batch size and context length.

    Attributes:
      weights, cache: formats, as named in `jaxllm.ledger.formula.exact.formats`.
      batch: number of concurrent sequences.
      context: maximum tokens per sequence, prompt and generated text together.
    """

    weights: str
    cache: str
    batch: int
    context: int

    @property
    def summary(self) -> str:
        """Describes the setup in one line."""
        return f"weights {self.weights}, KV cache {self.cache}, {self.batch} × {self.context:,} tokens"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Closed-form estimate for one sampling setup that fits.

    Attributes:
      choice: the setup.
      peak_bytes: peak memory of the device.
      seconds: lower bound on the time to decode one token for every sequence at full context; infinite if unknown.
      bound: the resource that sets `seconds`.
      prefill_seconds: lower bound on the time to prefill full-context prompts for all sequences; infinite if unknown.
      unknown: the rate that is unknown; "" if all are known.
    """

    choice: Serving
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
    def rank(self) -> tuple[float, tuple[int, ...], int]:
        """Sort key, smaller is better: most tokens per second, then the wider formats, then the smaller peak."""
        formats = (_width(self.choice.weights), _width(self.choice.cache))
        return -self.tokens_per_second, formats, self.peak_bytes


def _width(name: str) -> int:
    """Returns the negated bits of a format: wider formats sort first, as narrower ones change the model slightly."""
    return -formats_lib.by_name(name).bits


@dataclasses.dataclass(frozen=True)
class Search:
    """Result of a search over sampling setups.

    Attributes:
      name: model name for messages.
      budget: bytes that may be used.
      judged: number of setups evaluated.
      fitting: verdicts of the setups that fit, best first.
      closest: the setup with the smallest peak, and that peak in bytes, if nothing fits; else None.
      seconds: duration of the search.
    """

    name: str
    model: Architecture
    device: Device
    budget: int
    judged: int
    fitting: tuple[Verdict, ...]
    closest: tuple[Serving, int] | None
    seconds: float


def plain(device: Device) -> str:
    """Returns the format in which programs store and compute with weights and cache on a device."""
    return bill.compute_format(device.platform)


def has_program(choice: Serving, device: Device) -> bool:
    """Returns True if the decoder supports weights and cache in these formats."""
    return choice.weights == plain(device) and choice.cache in (plain(device), formats_lib.INT8)


def formats(device: Device, wanted: str = "search", of: str = "weights") -> tuple[str, ...]:
    """Returns the formats to choose among on a device, widest first.

    Args:
      wanted: one format, or `search` for all.
      of: weights | cache.
    """
    if wanted != "search":
        return (wanted,)
    return (plain(device), *(INTEGERS if of == "weights" else INTEGERS[:1]))


def ledger_of(name: str, model: Architecture, device: Device, choice: Serving) -> Ledger:
    """Returns the bill of a setup: memory only, without capacity and compute."""
    chunk = min(generator.CHUNK, choice.context)
    return inference_memory.inference(
        *(model, choice.batch, choice.context, chunk, choice.weights, choice.cache, name, device.platform),
        vector_memory=device.vector_memory,
    )


def search(
    name: str,
    model: Architecture,
    device: Device,
    budget: int,
    contexts: Sequence[int],
    batches: Sequence[int],
    weights: Sequence[str],
    caches: Sequence[str],
) -> Search:
    """Evaluates every combination of contexts, formats and batch sizes.

    Memory grows with the batch size. Each combination of context and formats therefore stops at the first batch size
    that does not fit, then a bisection finds the largest one below it that does.

    Args:
      budget: bytes that may be used.
      contexts: tokens per sequence to try.
      batches: numbers of concurrent sequences to try, ascending.
      weights, caches: formats to try.
    """
    begun = time.perf_counter()
    peaks: dict[Serving, int] = {}

    def fits(choice: Serving) -> bool:
        if choice not in peaks:
            peaks[choice] = ledger_of(name, model, device, choice).peak_bytes
        return peaks[choice] <= budget

    for context, weight, cache in itertools.product(contexts, weights, caches):
        one = functools.partial(Serving, weight, cache, context=context)
        fitting = list(itertools.takewhile(lambda batch, one=one: fits(one(batch=batch)), batches))  # type: ignore[misc]
        if fitting and len(fitting) < len(batches):  # `fits` records what the bisection probes
            low, high = fitting[-1], batches[len(fitting)]
            bisect.bisect_left(range(low + 1, high), True, key=lambda batch, one=one: not fits(one(batch=batch)))  # type: ignore[misc]
    found = [verdict(model, device, choice, peak) for choice, peak in peaks.items() if peak <= budget]
    found.sort(key=lambda one: one.rank)
    closest = None if found else min(peaks.items(), key=lambda item: item[1])
    return Search(name, model, device, budget, len(peaks), tuple(found), closest, time.perf_counter() - begun)


def verdict(model: Architecture, device: Device, choice: Serving, peak_bytes: int) -> Verdict:
    """Returns the verdict of a setup whose peak is already computed."""
    dtype = policy_for("auto", device.platform).compute_dtype.name
    how = (choice.weights, choice.cache, device, dtype)
    token = roofline.decode_token(model, choice.batch, choice.context, *how)
    prompt = roofline.prefill(model, choice.batch, choice.context, *how)
    seconds, bound, first = token.seconds, token.bound, prompt.seconds
    if isinstance(seconds, Unknown) or isinstance(bound, Unknown) or isinstance(first, Unknown):
        return Verdict(choice, peak_bytes, float("inf"), "unknown", float("inf"), token.unknown)
    return Verdict(choice, peak_bytes, seconds, bound, first, "")


def batches_up_to(most: int = MAX_SEQUENCES) -> tuple[int, ...]:
    """Returns the powers of two up to `most`."""
    return tuple(2**power for power in range(most.bit_length()))


def remedies(found: Search, margin: float) -> list[Remedy]:
    """Returns single changes to the closest setup that make it fit: the smallest of each kind, if there is one.

    Args:
      found: a search in which nothing fits.
      margin: fraction of a larger device's memory to leave free.
    """
    assert found.closest is not None
    choice = found.closest[0]
    made: list[Remedy] = []

    def peak(device: Device, other: Serving) -> int:
        return ledger_of(found.name, found.model, device, other).peak_bytes

    def first(what: str, flag: str, values: Sequence[int | str], field: str) -> None:
        for value in values:
            needs = peak(found.device, dataclasses.replace(choice, **{field: value}))  # type: ignore[arg-type]
            if needs <= found.budget:
                made.append(Remedy(what, f"--{flag}={value}", needs))
                return

    first("fewer sequences at a time", "batch", range(choice.batch - 1, 0, -1), "batch")
    halves = [choice.context >> times for times in range(1, choice.context.bit_length())]
    first("a shorter context", "context", [half for half in halves if half >= MIN_CONTEXT], "context")
    first("smaller weights", "weights", [f for f in formats(found.device) if f != choice.weights], "weights")
    first("a smaller KV cache", "cache", [f for f in formats(found.device, of="cache") if f != choice.cache], "cache")
    larger = [(other.memory_bytes or 0, name, other) for name, (_, other) in DEVICES.items()]
    for memory, name, other in sorted(larger, key=lambda entry: entry[:2]):
        if memory > (found.device.memory_bytes or 0) and (needs := peak(other, choice)) <= int(memory * (1 - margin)):
            made.append(Remedy(f"a larger device, {other.name}", f"--device={name}", needs))
            break
    return made
