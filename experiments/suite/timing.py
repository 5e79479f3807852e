"""Seconds of device programs, compiled beforehand: medians of repeats, several calls in each."""

import concurrent.futures
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

REPEATS = 5
LEAST_SECONDS = 0.01  # of one repeat: a call is far shorter than what the clock and the host add to it
MOST_CALLS = 200


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
      median, low, high: of the repeats.
      calls: in each repeat.
    """

    median: float
    low: float
    high: float
    repeats: int
    calls: int

    def rate(self, work: float) -> dict[str, Any]:
        """Fields of a record: so much work a second."""
        return {
            "value": work / self.median,
            "low": work / self.high,
            "high": work / self.low,
            "repeats": self.repeats,
        }


def measure(run: Callable[[], Any], repeats: int = REPEATS, least_seconds: float = LEAST_SECONDS) -> Timing:
    """Times `run`, which starts work on the device and returns its arrays.

    Calls of a repeat are queued and waited for together: the device has the next one at hand while it works.
    """
    jax.block_until_ready(run())
    begun = time.perf_counter()
    jax.block_until_ready(run())
    once = time.perf_counter() - begun
    calls = max(1, min(MOST_CALLS, math.ceil(least_seconds / max(once, 1e-6))))
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - begun) / calls)
    return Timing(statistics.median(seconds), min(seconds), max(seconds), repeats, calls)


def compile_all(lowered: Mapping[Any, jax.stages.Lowered]) -> dict[Any, jax.stages.Compiled | Exception]:
    """The executables, compiled side by side; an error in the place of one that could not be."""

    def one(name: Any) -> jax.stages.Compiled | Exception:
        try:
            return lowered[name].compile()
        except Exception as error:  # the compiler's, of any kind
            return error

    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2))) as pool:
        return dict(zip(lowered, pool.map(one, lowered), strict=True))
