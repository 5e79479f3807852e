"""Searches for changes that make a run fit, and lists those of a training run that has started.

`first_fitting` and `largest_fitting` are the two searches; each user lists its candidate changes. `training_remedy` is
for a run whose batch and checkpoints must stay as they are, so that it can resume. It tries one change, then two at a
time, in order of their cost:

| change | cost |
|---|---|
| smaller `loss_chunk`, `attention_chunk` | a longer loop over the same matmuls |
| smaller micro-batches, more of them | matmuls with fewer rows, and a float32 gradient accumulator |
| remat `dots`, then `full` | recomputes attention; then the whole forward pass: 4/3 of the FLOPs (Chen et al. 2016) |
| a higher ZeRO stage | only latency up to stage 2; 1.5 times the traffic at stage 3 (Rajbhandari et al. 2020) |
| moments in bfloat16 | precision of the moments |
| moments, then all state in host memory | host link traffic, twice per step (ZeRO-Offload, Ren et al. 2021) |
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from jaxllm.config import Architecture, Config, validate
from jaxllm.config import attention as attention_choice
from jaxllm.config.overrides import field_paths
from jaxllm.errors import UserError
from jaxllm.hardware.detect import Device
from jaxllm.ledger.formula import training_memory
from jaxllm.ledger.rows import format_bytes
from jaxllm.step.precision import policy_for

_MIN_CHUNK = 128  # tokens; matmuls with fewer rows underuse the device

RunT = TypeVar("RunT")
Overrides = dict[str, int | str]  # dotted configuration path -> new value


@dataclasses.dataclass(frozen=True)
class Change(Generic[RunT]):
    """Candidate change to a run that does not fit.

    Attributes:
      description: The change in words; "" if the flags say it all.
      flags: Command-line flags that make the change, separated by spaces.
      run: The changed run, as the `peak` function of `first_fitting` takes it.
      budget: Bytes that the changed run may use on one device.
    """

    description: str
    flags: str
    run: RunT
    budget: int


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Change that makes a run fit.

    Attributes:
      description, flags: As in `Change`.
      peak_bytes: Peak bytes on one device with the change.
    """

    description: str
    flags: str
    peak_bytes: int

    def __str__(self) -> str:
        change = f"{self.description}: {self.flags}" if self.description else self.flags
        return f"{change} (needs {format_bytes(self.peak_bytes)})"


def first_fitting(changes: Iterable[Change[RunT]], peak: Callable[[RunT], int | None]) -> Remedy | None:
    """Returns the first change with a peak within its budget, or None; later changes are not evaluated.

    Args:
      changes: Candidates in order of preference.
      peak: Returns the peak bytes of a run on one device; None if the run is not valid.
    """
    for change in changes:
        needed = peak(change.run)
        if needed is not None and needed <= change.budget:
            return Remedy(change.description, change.flags, needed)
    return None


def largest_fitting(fits: Callable[[int], bool], at_most: int | None = None) -> int:
    """Returns the largest positive integer, up to `at_most`, that fits, or 0 if 1 does not; `fits` must be monotone."""
    low, high = 0, 1  # low fits; high is the next candidate
    while (at_most is None or high <= at_most) and fits(high):
        low, high = high, 2 * high
    high = high if at_most is None else min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def training_remedy(config: Config, model: Architecture, device: Device, available_bytes: int) -> Remedy | None:
    """Returns the first single change, else the first pair of changes, with a peak within `available_bytes`.

    Returns None if there is none: the run needs larger devices, more devices or a smaller model.
    """
    families = [list(family) for family in _families(config, model, device)]

    def change(overrides: Overrides) -> Change[Overrides]:
        flags = " ".join(f"--config.{path}={value}" for path, value in overrides.items())
        return Change("", flags, overrides, available_bytes)

    def peak(overrides: Overrides) -> int | None:
        return _peak(config, model, device, overrides)

    def changes() -> Iterator[Change[Overrides]]:
        yield from map(change, itertools.chain.from_iterable(families))
        for a, b in itertools.combinations(families, 2):
            # No pair fits unless the strongest changes of both families together do.
            if a and b and first_fitting([change({**a[-1], **b[-1]})], peak):
                yield from (change({**one, **other}) for one, other in itertools.product(a, b))

    return first_fitting(changes(), peak)


def _families(config: Config, model: Architecture, device: Device) -> Iterator[Iterator[Overrides]]:
    """Yields the families of changes, cheapest first; each yields its smallest change first."""
    yield _loss_chunks(config)
    # Attention kernels do not materialize scores, so there is nothing to chunk.
    yield _attention_chunks(config) if _has_scores(config, model, device) else iter(())
    yield _micro_batches(config)
    policies, policy = ("none", "dots", "full"), config.remat.policy
    # A policy that lists tags saves more than `full`.
    stronger = policies[policies.index(policy) + 1 :] if policy in policies else ("full",)
    yield ({"remat.policy": name} for name in stronger)
    stages = range(config.mesh.zero + 1, 4) if config.mesh.data > 1 else ()
    yield ({"mesh.zero": stage} for stage in stages)
    if config.optimizer.moment_dtype != "bfloat16":
        yield iter([{"optimizer.moment_dtype": "bfloat16"}])
    places = ("none", "moments", "all")
    yield ({"optimizer.offload": place} for place in places[places.index(config.optimizer.offload) + 1 :])


def _loss_chunks(config: Config) -> Iterator[Overrides]:
    tokens = config.train.batch_size * config.data.sequence_length
    tokens //= config.train.accumulate * config.mesh.replica * config.mesh.data
    chunk = min(config.train.loss_chunk, tokens)
    while (chunk := _half(chunk)) >= _MIN_CHUNK:
        yield {"train.loss_chunk": chunk}


def _half(chunk: int) -> int:
    """Returns the largest power of two below `chunk`; 0 if there is none."""
    return 1 << (chunk - 1).bit_length() - 1 if chunk > 1 else 0


def _has_scores(config: Config, model: Architecture, device: Device) -> bool:
    dtype = policy_for(config.precision.policy, device.platform).compute_dtype.name
    return attention_choice.resolve(config, model, device.platform, dtype).implementation == "xla"


def _attention_chunks(config: Config) -> Iterator[Overrides]:
    length = config.data.sequence_length
    chunk = config.train.attention_chunk or length
    while (chunk := _half(chunk)) >= _MIN_CHUNK:
        if length % chunk == 0:
            yield {"train.attention_chunk": chunk}


def _micro_batches(config: Config) -> Iterator[Overrides]:
    accumulate, rows = config.train.accumulate, config.mesh.replica * config.mesh.data
    while config.train.batch_size % ((accumulate := 2 * accumulate) * rows) == 0:
        yield {"train.accumulate": accumulate}


def _peak(config: Config, model: Architecture, device: Device, overrides: Overrides) -> int | None:
    """Returns the peak bytes on one device with overrides; None if they are not valid."""
    if device.platform == "cpu" and "optimizer.offload" in overrides:
        return None  # on a CPU, device memory is host memory
    changed = copy.deepcopy(config)
    for path, value in overrides.items():
        section, name = path.split(".")
        assert path in field_paths(config), path
        setattr(getattr(changed, section), name, value)
    try:
        validate.check(changed, model)
        policy = policy_for(changed.precision.policy, device.platform)
        return training_memory.training(model, changed, policy.name, device.platform).peak_bytes
    except UserError:
        return None
