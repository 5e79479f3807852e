"""Changes that would make a training run fit if nothing does: one change at a time, each found by searching."""

import copy
import dataclasses
from collections.abc import Iterator

from jaxllm.config import Config, validate
from jaxllm.errors import UserError
from jaxllm.hardware.detect import DEVICES, Device
from jaxllm.ledger.rows import format_bytes
from jaxllm.plan.space import FRUGAL_REMATS, SearchSpace
from jaxllm.plan.training import Search, smallest_peak

MAX_DEVICES = 65_536
MIN_LENGTH = 128  # tokens per sequence
_SMALLER_STATE = ("lion", "adafactor", "momentum", "sgd")


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Single change that makes a run fit.

    Attributes:
      what: description for messages.
      flags: the planner's flags that make the change.
      peak_bytes: peak memory of one device after the change.
    """

    what: str
    flags: str
    peak_bytes: int

    def __str__(self) -> str:
        return f"{self.what}: {self.flags} (needs {format_bytes(self.peak_bytes)})"


def remedies(found: Search, margin: float, is_file: bool) -> list[Remedy]:
    """Returns the changes that make the run fit: the smallest of each kind, if there is one.

    Considers only the choices that need least memory: the search has found that none of them fits without a change.

    Args:
      found: a search in which nothing fits.
      margin: fraction of a larger device's memory to leave free.
      is_file: True if the run comes from a config file, False if it is built from a model's name; their flags differ.
    """
    space, budget = found.space, found.budget
    kinds = (
        _more_devices(space, budget),
        _larger_device(space, found.device, margin),
        _shorter(space, budget, is_file),
        _moments(space, budget),
        _pure(space, budget),
        _optimizers(space, budget, is_file),
    )
    return [first for first in (next(kind, None) for kind in kinds) if first is not None]


def _needs(space: SearchSpace, budget: int) -> int | None:
    """Returns the smallest peak of a space in bytes; None if it exceeds the budget or the run is invalid."""
    try:
        validate.check(space.base, space.model)
    except UserError:
        return None
    frugal = dataclasses.replace(space, remats=FRUGAL_REMATS, smallest_only=True)
    peak = smallest_peak(frugal)
    return peak if peak is not None and peak <= budget else None


def _more_devices(space: SearchSpace, budget: int) -> Iterator[Remedy]:
    for count in _counts(space):
        peak = _needs(dataclasses.replace(space, count=count), budget)
        if peak is not None:
            yield Remedy("more devices", f"--count={count}", peak)


def _counts(space: SearchSpace) -> list[int]:
    """Returns the device counts above the current one over which the batch can be divided, ascending."""
    batch, tensors = space.base.train.batch_size, space.tensors
    rows = [rows for rows in range(1, min(batch, MAX_DEVICES) + 1) if batch % rows == 0]
    return sorted({a * b for a in rows for b in tensors if space.count < a * b <= MAX_DEVICES})


def _larger_device(space: SearchSpace, device: Device, margin: float) -> Iterator[Remedy]:
    larger = [(other.memory_bytes or 0, name, other) for name, (_, other) in DEVICES.items()]
    for memory, name, other in sorted(larger, key=lambda entry: entry[:2]):
        if memory > (device.memory_bytes or 0):
            peak = _needs(dataclasses.replace(space, platform=other.platform), int(memory * (1 - margin)))
            if peak is not None:
                yield Remedy(f"a larger device, {other.name}", f"--device={name}", peak)


def _shorter(space: SearchSpace, budget: int, is_file: bool) -> Iterator[Remedy]:
    """Yields runs with 1/2, 1/4, … of the sequence length and the same tokens per step."""
    base, length, factor = space.base, space.length, 2
    while length % factor == 0 and length // factor >= MIN_LENGTH:
        shorter = copy.deepcopy(base)
        shorter.data.sequence_length, shorter.train.batch_size = length // factor, base.train.batch_size * factor
        peak = _needs(_with(space, shorter), budget)
        if peak is not None:
            flags = f"--sequence_length={length // factor}"
            if is_file:
                more = f"--config.train.batch_size={shorter.train.batch_size}"
                flags = f"--config.data.sequence_length={length // factor} {more}"
            yield Remedy("shorter sequences", flags, peak)
        factor *= 2


def _moments(space: SearchSpace, budget: int) -> Iterator[Remedy]:
    if "bfloat16" not in space.moments:
        peak = _needs(dataclasses.replace(space, moments=("bfloat16",)), budget)
        if peak is not None:
            yield Remedy("moments in bfloat16", "--moment_dtype=bfloat16", peak)


def _pure(space: SearchSpace, budget: int) -> Iterator[Remedy]:
    if space.platform != "cpu" and "bf16_pure" not in space.precisions:
        peak = _needs(dataclasses.replace(space, precisions=("bf16_pure",)), budget)
        if peak is not None:
            yield Remedy("weights in bfloat16, without float32 masters", "--precision=bf16_pure", peak)


def _optimizers(space: SearchSpace, budget: int, is_file: bool) -> Iterator[Remedy]:
    for name in _SMALLER_STATE:
        if name != space.base.optimizer.name:
            other = copy.deepcopy(space.base)
            other.optimizer.name = name
            peak = _needs(_with(space, other), budget)
            if peak is not None:
                flags = f"--config.optimizer.name={name}" if is_file else f"--optimizer={name}"
                yield Remedy("an optimizer with less state", flags, peak)


def _with(space: SearchSpace, base: Config) -> SearchSpace:
    return dataclasses.replace(space, base=base)
