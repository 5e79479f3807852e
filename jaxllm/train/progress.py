"""Progress display of a training run: a live bar on a terminal, periodic lines otherwise."""

import math

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
        share = f" ({flops / self._peak_flops:.0%} of peak)" if self._peak_flops else ""
        left = _duration((self._steps - step) * self._mean_seconds)
        return f"loss {loss:.3f}  {rate:,.0f} tok/s  {_si(flops)}FLOP/s{share}  {left} left"


def _si(value: float) -> str:
    if value <= 0 or not math.isfinite(value):
        return "0 "
    power = min(int(math.log10(value) // 3), 6)
    return f"{value / 1000**power:.3g} {' kMGTPE'[power].strip()}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
