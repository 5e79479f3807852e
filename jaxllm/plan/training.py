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
from jaxllm.plan.request import SearchResult
from jaxllm.plan.training_space import TrainingChoice, TrainingSpace

# Significant digits of a step time when ranking: the closed forms are no more precise.
_DIGITS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """Closed-form estimate of a training choice that fits.

    Attributes:
      choice: the choice.
      peak_bytes: peak memory of one device.
      seconds: lower bound on the step time, counting only resources whose rate is known.
      busy: sum of the times of all resources: the step time if nothing overlaps.
      bound: the resource that sets `seconds`.
      unknown: the rate that is unknown; "" if all are known.
    """

    choice: TrainingChoice
    peak_bytes: int
    seconds: float
    busy: float
    bound: str
    unknown: str = ""

    @property
    def rank(self) -> tuple[bool, float, tuple[int, ...], float, int]:
        """Sort key, smaller is better: known time, shorter time, simpler choice, less total work, smaller peak."""
        seconds = float(f"{self.seconds:.{_DIGITS}g}")
        return bool(self.unknown), seconds, self.choice.complexity, self.busy, self.peak_bytes


TrainingResult = SearchResult[TrainingSpace, TrainingChoice, TrainingEstimate]


def training_run_of(space: TrainingSpace, choice: TrainingChoice) -> TrainingRun:
    """Returns the training run of a choice, as the memory and compute formulas take it.

    Raises:
      UserError: an array cannot be sharded over the mesh.
    """
    return run_lib.make(space.model, space.configured(choice), choice.precision, space.platform)


def ledger_of(space: TrainingSpace, choice: TrainingChoice) -> Ledger:
    """Returns the bill of a choice: memory only, without capacity and compute."""
    return training_memory.training(space.model, space.configured(choice), choice.precision, space.platform)


def estimate(space: TrainingSpace, device: Device, choice: TrainingChoice, peak_bytes: int) -> TrainingEstimate:
    """Returns the estimate of a choice whose peak is already computed."""
    step = roofline.train_step(training_run_of(space, choice), device)
    seconds, bound = step.seconds, step.bound
    known = dict(step.seconds_of) or {"unknown": float("inf")}
    if isinstance(seconds, Unknown) or isinstance(bound, Unknown):
        seconds, bound = max(known.values()), max(known, key=known.__getitem__)
    return TrainingEstimate(choice, peak_bytes, seconds, sum(known.values()), bound, step.unknown)


def search(space: TrainingSpace, device: Device, budget: int) -> TrainingResult:
    """Evaluates every choice that could be the best overall.

    Skips the rest of a family once one of its choices fits: earlier choices are simpler and at least as fast.

    Args:
      device: the device; `space.count` of them.
      budget: bytes that a run may use on one device.
    """
    begun = time.perf_counter()
    evaluator = _Evaluator(space, device, budget)
    fitting = tuple(sorted(evaluator.fitting, key=lambda estimate: estimate.rank))
    closest = None if fitting else evaluator.closest
    return SearchResult(space, device, budget, evaluator.evaluated, fitting, closest, time.perf_counter() - begun)


def smallest_peak(space: TrainingSpace) -> int | None:
    """Returns the smallest peak of all choices in a space, in bytes; None if no choice is possible."""
    closest = _Evaluator(space, None, -1).closest
    return closest[1] if closest else None


class _Evaluator:
    """Evaluates the choices of a space.

    Attributes:
      evaluated: number of choices evaluated.
      fitting: estimates of those that fit.
      closest: the choice with the smallest peak, and that peak in bytes.
    """

    def __init__(self, space: TrainingSpace, device: Device | None, budget: int):
        self._space, self._device, self._budget = space, device, budget
        self._states: dict[tuple[int | str, ...], int] = {}
        self.evaluated = 0
        self.fitting: list[TrainingEstimate] = []
        self.closest: tuple[TrainingChoice, int] | None = None
        for family in space.families():
            self._evaluate(family)

    def _evaluate(self, family: Iterable[TrainingChoice]) -> None:
        """Evaluates the choices of a family up to the first that fits."""
        beside_state: dict[int, int] = {}
        for choice in family:
            self.evaluated += 1
            try:
                peak = self._peak(choice, beside_state.get(choice.loss_chunk, 0))
            except UserError:  # an array cannot be sharded over this mesh
                return
            if peak is None:
                continue
            beside_state.setdefault(choice.loss_chunk, peak - self._state(choice))
            if self.closest is None or peak < self.closest[1]:
                self.closest = choice, peak
            if peak <= self._budget:
                assert self._device is not None
                self.fitting.append(estimate(self._space, self._device, choice, peak))
                return

    def _peak(self, choice: TrainingChoice, beside_state: int) -> int | None:
        """Returns the peak in bytes; None if a lower bound exceeds both the budget and the smallest peak so far.

        Args:
          beside_state: known bytes live beside the state in the peak phase. Within a family, a choice with the same
            chunks that offloads more of its state needs at least as much, plus the buffers for what it fetches from
            the host.
        """
        if self.closest is not None and self._state(choice) + beside_state > max(self._budget, self.closest[1]):
            return None
        return ledger_of(self._space, choice).peak_bytes

    def _state(self, choice: TrainingChoice) -> int:
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
