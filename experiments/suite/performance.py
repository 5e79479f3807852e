"""Timing of device programs, the FLOPs and bytes of their work by formula, and peak rates measured on this device."""

import concurrent.futures
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.config import Architecture
from jaxllm.ledger.formula import flops

REPEATS = 5
LEAST_SECONDS = 0.01  # per repeat: one call can be shorter than clock and host overhead
MOST_CALLS = 200
# The backward pass recomputes the scores and has four more matmuls: 5, compared with 2 in the forward pass.
FORWARD_AND_BACKWARD = 3.5


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


@functools.cache
def copy_rate(tiny: bool) -> float:
    """Returns bytes/s, read plus written, of one pass over an array much larger than any cache."""
    elements = 2**20 if tiny else 2**28
    x = jnp.arange(elements, dtype=jnp.int32)
    add = jax.jit(lambda x: x + 1)
    return 2 * 4 * elements / measure(functools.partial(add, x)).median


@functools.cache
def matmul_rate(tiny: bool) -> float:
    """Returns FLOP/s of a matmul of square bfloat16 matrices.

    Inputs are random because matrices of zeros take less power and run faster.
    """
    side = 256 if tiny else 8192
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    multiply = jax.jit(lambda a, b: a @ b)
    return 2 * side**3 / measure(functools.partial(multiply, a, b), least_seconds=0.05).median


def attention_flops(batch: int, heads: int, length: int, head_dim: int, backward: bool) -> float:
    """Returns the FLOPs of causal self-attention by the convention of FlashAttention-2 (Dao 2023, section 4.1).

    4·B·N·T²·H / 2 forward, 3.5 times that with the backward pass.
    """
    forward = 4 * batch * heads * length**2 * head_dim / 2
    return forward * FORWARD_AND_BACKWARD if backward else forward


def cache_bytes(batch: int, kv_heads: int, length: int, head_dim: int, itemsize: int) -> int:
    """Returns KV-cache bytes read per layer by one token of each row; int8 adds a float32 scale per vector."""
    scale = 4 if itemsize == 1 else 0
    return 2 * batch * kv_heads * length * (head_dim * itemsize + scale)


def decode_bytes(model: Architecture, batch: int, length: int) -> int:
    """Returns the bytes of weights and cache, both bfloat16, read by one token of each row."""
    return flops.decode_token(model, batch, length, "bf16", "bf16").bytes


def utilisation(model: Architecture, length: int, tokens_per_second: float, peak: float) -> float:
    """Returns MFU: model FLOP/s divided by a peak (FLOP/s); see `jaxllm.ledger.formula.flops`."""
    return flops.model_flops_per_token(model, length) * tokens_per_second / peak
