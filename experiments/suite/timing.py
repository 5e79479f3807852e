"""Timing of compiled device programs: medians over repeats of several calls each."""

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
LEAST_SECONDS = 0.01  # per repeat: one call can be shorter than clock and host overhead
MOST_CALLS = 200


@dataclasses.dataclass(frozen=True)
class Timing:
    """Duration of one call, in seconds.

    Attributes:
      median, low, high: seconds per call over the repeats.
      repeats: number of repeats.
      calls: calls per repeat.
    """

    median: float
    low: float
    high: float
    repeats: int
    calls: int

    def rate(self, work: float) -> dict[str, Any]:
        """Returns a record's fields for `work` per second: median, low and high."""
        return {
            "value": work / self.median,
            "low": work / self.high,
            "high": work / self.low,
            "repeats": self.repeats,
        }


def measure(run: Callable[[], Any], repeats: int = REPEATS, least_seconds: float = LEAST_SECONDS) -> Timing:
    """Times `run`, which starts work on the device and returns its arrays.

    The calls of a repeat are queued and awaited together, so that the device never idles between calls.
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
    """Compiles programs in parallel; returns the executables, or the error where compilation failed."""

    def one(name: Any) -> jax.stages.Compiled | Exception:
        try:
            return lowered[name].compile()
        except Exception as error:  # any compiler error
            return error

    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2))) as pool:
        return dict(zip(lowered, pool.map(one, lowered), strict=True))
