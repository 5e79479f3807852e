"""Wall-clock time of a run by phase; every second belongs to exactly one phase, so the phases sum to the total."""

import time


class PhaseTimer:
    """Running stopwatch whose laps are summed by phase name.

    JAX dispatches asynchronously, so end a lap where the host waits for a result (`float(metric)`), not where the
    computation was dispatched.

    Attributes:
      seconds: total seconds per name.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> float:
        """Adds the seconds since the previous lap to `name`, and returns them."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        return seconds

    @property
    def total(self) -> float:
        """Seconds since the timer was created."""
        return time.perf_counter() - self._start
