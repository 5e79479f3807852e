"""Search for the fastest training run that fits in memory, with the closed-form formulas."""

import dataclasses
import time
from collections.abc import Iterable

from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.hardware.detect import Device
from jaxllm.ledger.formula import roofline, training_memory
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact.run import TrainingRun
from jaxllm.ledger.formula.exact.state import state_rows
from jaxllm.ledger.rows import PERSISTENT, Ledger, Unknown
from jaxllm.plan.space import Choice, SearchSpace

# Significant digits of a step time when ranking: the closed forms are no more precise.
_DIGITS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Closed-form estimate for one training choice that fits.

    Attributes:
      choice: the choice.
      peak_bytes: peak memory of one device.
      seconds: lower bound on the step time, counting only resources whose rate is known.
      busy: sum of the times of all resources: the step time if nothing overlaps.
      bound: the resource that sets `seconds`.
      unknown: the rate that is unknown; "" if all are known.
    """

    choice: Choice
    peak_bytes: int
    seconds: float
    busy: float
    bound: str
    unknown: str = ""

    @property
    def rank(self) -> tuple[bool, float, tuple[int, ...], float, int]:
        """Sort key, smaller is better: known time, least time, fewer moving parts, less total work, smaller peak."""
        seconds = float(f"{self.seconds:.{_DIGITS}g}")
        return bool(self.unknown), seconds, self.choice.moving_parts, self.busy, self.peak_bytes


@dataclasses.dataclass(frozen=True)
class Search:
    """Result of a search over training runs.

    Attributes:
      space: the space that was searched.
      device: the device; `space.count` of them.
      budget: bytes that a run may use on one device.
      judged: number of choices evaluated, including those rejected because of their state alone.
      fitting: verdicts of the choices that fit, best first.
      closest: the choice with the smallest peak, and that peak in bytes, if nothing fits; else None.
      seconds: duration of the search.
    """

    space: SearchSpace
    device: Device
    budget: int
    judged: int
    fitting: tuple[Verdict, ...]
    closest: tuple[Choice, int] | None
    seconds: float


def training_run_of(space: SearchSpace, choice: Choice) -> TrainingRun:
    """Returns the training run of a choice, as the memory and compute formulas take it.

    Raises:
      UserError: an array cannot be sharded over the mesh.
    """
    return run_lib.make(space.model, space.configured(choice), choice.precision, space.platform)


def ledger_of(space: SearchSpace, choice: Choice) -> Ledger:
    """Returns the bill of a choice: memory only, without capacity and compute."""
    return training_memory.training(space.model, space.configured(choice), choice.precision, space.platform)


def verdict(space: SearchSpace, device: Device, choice: Choice, peak_bytes: int) -> Verdict:
    """Returns the verdict of a choice whose peak is already computed."""
    least = roofline.train_step(training_run_of(space, choice), device)
    seconds, bound = least.seconds, least.bound
    known = dict(least.seconds_of) or {"nothing that is known": float("inf")}
    if isinstance(seconds, Unknown) or isinstance(bound, Unknown):
        seconds, bound = max(known.values()), max(known, key=known.__getitem__)
    return Verdict(choice, peak_bytes, seconds, sum(known.values()), bound, least.unknown)


def search(space: SearchSpace, device: Device, budget: int) -> Search:
    """Evaluates every choice that could be the best overall.

    Skips the rest of a family once one of its choices fits: earlier choices are simpler and at least as fast.
    """
    begun = time.perf_counter()
    judge = _Judge(space, device, budget)
    for family in space.families():
        judge.judge(family)
    fitting = tuple(sorted(judge.fitting, key=lambda found: found.rank))
    closest = None if fitting else judge.closest
    return Search(space, device, budget, judge.judged, fitting, closest, time.perf_counter() - begun)


def smallest_peak(space: SearchSpace) -> int | None:
    """Returns the smallest peak of all choices in a space, in bytes; None if no choice is possible."""
    judge = _Judge(space, None, -1)
    for family in space.families():
        judge.judge(family)
    return judge.closest[1] if judge.closest else None


class _Judge:
    """Evaluates families of choices; counts them and collects those that fit and the closest one."""

    def __init__(self, space: SearchSpace, device: Device | None, budget: int):
        self._space, self._device, self._budget = space, device, budget
        self._states: dict[tuple[int | str, ...], int] = {}
        self.judged = 0
        self.fitting: list[Verdict] = []
        self.closest: tuple[Choice, int] | None = None

    def judge(self, family: Iterable[Choice]) -> None:
        """Evaluates the choices of a family up to the first that fits."""
        besides: dict[int, int] = {}
        for choice in family:
            self.judged += 1
            try:
                peak = self._peak(choice, besides.get(choice.loss_chunk, 0))
            except UserError:  # an array cannot be sharded over this mesh
                return
            if peak is None:
                continue
            besides.setdefault(choice.loss_chunk, peak - self._state(choice))
            if self.closest is None or peak < self.closest[1]:
                self.closest = choice, peak
            if peak <= self._budget:
                assert self._device is not None
                self.fitting.append(verdict(self._space, self._device, choice, peak))
                return

    def _peak(self, choice: Choice, beside: int) -> int | None:
        """Returns the peak in bytes; None if a lower bound exceeds both the budget and the smallest peak so far.

        Args:
          beside: known bytes live beside the state in the peak phase. Within a family, a choice with the same chunks
            that offloads more of its state needs at least as much, plus the buffers for what it fetches from the host.
        """
        if self.closest is not None and self._state(choice) + beside > max(self._budget, self.closest[1]):
            return None
        return ledger_of(self._space, choice).peak_bytes

    def _state(self, choice: Choice) -> int:
        """Returns the persistent bytes of a device; cached, because they depend on a few fields of a choice only."""
        mesh = (choice.replica, choice.data, choice.tensor, choice.zero)
        key = (*mesh, choice.offload, choice.moment_dtype, choice.precision)
        if key not in self._states:
            rows = state_rows(training_run_of(self._space, choice))
            self._states[key] = sum(row.bytes_per_device for row in rows if row.phase == PERSISTENT)
        return self._states[key]


def base_config(model: str, length: int, batch: int, optimizer: str) -> Config:
    """Returns the configuration of a training run of a published model; all other fields have their defaults.

    Args:
      model: name in `jaxllm.architectures`.
      length: tokens per sequence.
      batch: sequences per step.
      optimizer: value of `config.optimizer.name`.
    """
    config = Config()
    config.model.name = model
    config.data.sequence_length = length
    config.train.batch_size = batch
    config.optimizer.name = optimizer
    return config
