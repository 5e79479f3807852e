"""Where a run's time goes: every second belongs to exactly one name, so the parts add up to the wall clock."""

import time


class PhaseTimer:
    """Laps of one stopwatch that never stops.

    Work that JAX has been handed is not done when its call returns, so a lap ends where the host waits for a
    result (`float(metric)`), not where it asked for one.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> float:
        """Gives the seconds since the last lap to `name`, and returns them."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        return seconds

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start
