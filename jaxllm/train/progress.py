"""Progress display of a training run (a live bar on a terminal, periodic lines otherwise), and its time by phase."""

import math
import time

from rich import progress
from rich.console import Console


class Display:
    """Progress display: step, loss, tokens per second, FLOP/s, percentage of peak and time left.

    Args:
      console: where to print.
      first_step: steps already done.
      steps: total steps of the run.
      flops_per_token: model FLOPs per trained token, without recomputation.
      peak_flops: total peak FLOP/s of the devices; None if unknown.
      every: steps between lines if the console is not a terminal.
    """

    def __init__(
        self,
        console: Console,
        first_step: int,
        steps: int,
        flops_per_token: float,
        peak_flops: float | None,
        every: int,
    ):
        self._console, self._steps, self._every = console, steps, every
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._mean_seconds = self._mean_tokens = 0.0
        self._bar = progress.Progress(
            progress.TextColumn("step {task.completed:,}/{task.total:,}"),
            progress.BarColumn(bar_width=16),
            progress.TextColumn("{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=first_step, text="")

    def start(self) -> None:
        self._bar.start()

    def stop(self) -> None:
        self._bar.stop()

    def update(self, step: int, loss: float, tokens: float, seconds: float) -> None:
        """Shows a finished step.

        Args:
          step: steps done.
          loss: in nats per token.
          tokens: tokens of the step, without padding.
          seconds: duration of the step.
        """
        # Exponential moving average over about 20 steps: stable enough to read, and follows changes quickly.
        decay = 0.95 if self._mean_seconds else 0.0
        self._mean_seconds = decay * self._mean_seconds + (1 - decay) * seconds
        self._mean_tokens = decay * self._mean_tokens + (1 - decay) * tokens
        text = self.describe(step, loss)
        self._bar.update(self._task, completed=step, text=text)
        if self._bar.disable and (step % self._every == 0 or step == self._steps):
            self._console.print(f"step {step:,}/{self._steps:,}  {text}", highlight=False)

    def describe(self, step: int, loss: float) -> str:
        rate = self._mean_tokens / self._mean_seconds
        flops = rate * self._flops_per_token
        of_peak = f" ({flops / self._peak_flops:.0%} of peak)" if self._peak_flops else ""
        left = _duration((self._steps - step) * self._mean_seconds)
        return f"loss {loss:.3f}  {rate:,.0f} tok/s  {_si(flops)}FLOP/s{of_peak}  {left} left"


class PhaseTimer:
    """Wall-clock time of a run by phase; every second belongs to exactly one phase, so the phases sum to the total.

    JAX dispatches asynchronously, so end a phase where the host waits for a result (`float(metric)`), not where the
    computation was dispatched.

    Attributes:
      seconds: total seconds of each phase.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end_phase(self, name: str) -> float:
        """Adds the seconds since the end of the previous phase to `name`, and returns them."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        return seconds

    @property
    def total(self) -> float:
        """Seconds since the timer was created."""
        return time.perf_counter() - self._start


def _si(value: float) -> str:
    if value <= 0 or not math.isfinite(value):
        return "0 "
    power = min(int(math.log10(value) // 3), 6)
    return f"{value / 1000**power:.3g} {' kMGTPE'[power].strip()}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
