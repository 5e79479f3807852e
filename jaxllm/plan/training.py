"""The search for the fastest training run that fits, by the closed forms."""

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
from jaxllm.plan.space import Choice, Space

# Least times that differ by less are one: the closed forms know no more.
_DIGITS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What the closed forms say of one choice that fits.

    Attributes:
      peak_bytes: on one device.
      seconds: least time of a step; where a rate is not known, of the resources whose rate is.
      busy: seconds of all resources together: what a step takes where nothing overlaps.
      bound: the resource that sets `seconds`.
      unknown: "" or which rate is not known.
    """

    choice: Choice
    peak_bytes: int
    seconds: float
    busy: float
    bound: str
    unknown: str = ""

    @property
    def rank(self) -> tuple[bool, float, tuple[int, ...], float, int]:
        """Smaller is better: a time that is known, the least, the simpler of two as fast, less overlap, less memory."""
        seconds = float(f"{self.seconds:.{_DIGITS}g}")
        return bool(self.unknown), seconds, self.choice.moving_parts, self.busy, self.peak_bytes


@dataclasses.dataclass(frozen=True)
class Search:
    """Attributes:
    space: that was searched.
    device: of which there are `space.count`.
    budget: bytes of one device that a run may take.
    judged: choices; those that state alone rules out are among them.
    fitting: verdicts, the best first.
    closest: the choice of the smallest peak, and the peak, where nothing fits.
    seconds: that the search took.
    """

    space: Space
    device: Device
    budget: int
    judged: int
    fitting: tuple[Verdict, ...]
    closest: tuple[Choice, int] | None
    seconds: float


def setting_of(space: Space, choice: Choice) -> TrainingRun:
    """Raises:
    UserError: an array cannot be split as the mesh wants it.
    """
    return run_lib.make(space.model, space.configured(choice), choice.precision, space.platform)


def ledger_of(space: Space, choice: Choice) -> Ledger:
    """The bill, without device and work."""
    return training_memory.training(space.model, space.configured(choice), choice.precision, space.platform)


def verdict(space: Space, device: Device, choice: Choice, peak_bytes: int) -> Verdict:
    """Of a choice whose peak is known."""
    least = roofline.train_step(setting_of(space, choice), device)
    seconds, bound = least.seconds, least.bound
    known = dict(least.seconds_of) or {"nothing that is known": float("inf")}
    if isinstance(seconds, Unknown) or isinstance(bound, Unknown):
        seconds, bound = max(known.values()), max(known, key=known.__getitem__)
    return Verdict(choice, peak_bytes, seconds, sum(known.values()), bound, least.unknown)


def search(space: Space, device: Device, budget: int) -> Search:
    """Judges every choice that could be the best of all.

    A choice is not judged where a simpler one of its family fits, which is at least as fast.
    """
    begun = time.perf_counter()
    judge = _Judge(space, device, budget)
    for family in space.families():
        judge.judge(family)
    fitting = tuple(sorted(judge.fitting, key=lambda found: found.rank))
    closest = None if fitting else judge.closest
    return Search(space, device, budget, judge.judged, fitting, closest, time.perf_counter() - begun)


def smallest_peak(space: Space) -> int | None:
    """Of all choices of a space; None where it has none that is possible."""
    judge = _Judge(space, None, -1)
    for family in space.families():
        judge.judge(family)
    return judge.closest[1] if judge.closest else None


class _Judge:
    """Counts and keeps what is judged."""

    def __init__(self, space: Space, device: Device | None, budget: int):
        self._space, self._device, self._budget = space, device, budget
        self._states: dict[tuple[int | str, ...], int] = {}
        self.judged = 0
        self.fitting: list[Verdict] = []
        self.closest: tuple[Choice, int] | None = None

    def judge(self, family: Iterable[Choice]) -> None:
        """The choices of a family up to the first that fits."""
        besides: dict[int, int] = {}
        for choice in family:
            self.judged += 1
            try:
                peak = self._peak(choice, besides.get(choice.loss_chunk, 0))
            except UserError:  # an array that cannot be split over this mesh
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
        """None where it is more than the budget and than the smallest peak so far, as what is known to the byte says.

        Args:
          beside: what is known to live beside the state in the fullest phase. Of a family, choices with the same
            chunks that keep more of their state in the host's memory have as much, and what they bring from there.
        """
        if self.closest is not None and self._state(choice) + beside > max(self._budget, self.closest[1]):
            return None
        return ledger_of(self._space, choice).peak_bytes

    def _state(self, choice: Choice) -> int:
        """What persists on a device: the same for all choices that differ in other things."""
        mesh = (choice.replica, choice.data, choice.tensor, choice.zero)
        key = (*mesh, choice.offload, choice.moment_dtype, choice.precision)
        if key not in self._states:
            rows = state_rows(setting_of(self._space, choice))
            self._states[key] = sum(row.bytes_per_device for row in rows if row.phase == PERSISTENT)
        return self._states[key]


def base_config(model: str, length: int, batch: int, optimizer: str) -> Config:
    """A run of a published model; everything else is the configuration's default.

    Args:
      length: tokens of a sequence.
      batch: sequences a step.
    """
    config = Config()
    config.model.name = model
    config.data.sequence_length = length
    config.train.batch_size = batch
    config.optimizer.name = optimizer
    return config
