"""Section c: bandwidth at which decode attention reads its cache, as a fraction of a copy's in the same run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.kernels.decode import common as decode_common
from jaxllm.kernels.decode.api import decode_attention
from suite import implementations, performance
from suite.records import Context

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128  # as in Llama 3 8B
# Batch and length, the most informative first.
SHAPES = ((1, 8192), (16, 8192), (64, 4096), (1, 32768), (64, 32768), (8, 1024), (1, 1024), (16, 32768), (64, 1024))
STEPS = 20  # per call: a step over a small cache is shorter than a kernel launch


def program() -> Any:
    """Returns a jitted (q, k, v, lengths, scales) -> q that applies attention STEPS times in sequence."""

    def run(q: Any, k: Any, v: Any, lengths: Any, scales: Any) -> Any:
        options = {"window": 0, "scale": HEAD_DIM**-0.5, "softcap": 0.0, "capacity": k.shape[2]}
        options |= {"platform": "gpu", "interpret": implementations.interpreted()}

        def step(_: Any, q: Any) -> Any:
            return decode_attention(q, k, v, lengths, **scales, **options)

        return jax.lax.fori_loop(0, STEPS, step, q)

    return jax.jit(run)


def arrays(batch: int, length: int, heads: int, key_heads: int, head_dim: int, int8: bool) -> tuple[Any, ...]:
    """Returns q and a full cache; created under jit, so that no float32 intermediate is stored."""

    def one(key: Any) -> Any:
        x = jax.random.normal(key, (batch, key_heads, length, head_dim), jnp.bfloat16)
        return decode_common.quantize(x) if int8 else (x, None)

    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, 1, heads, head_dim), jnp.bfloat16)
    (k, k_scale), (v, v_scale) = (jax.jit(one)(key) for key in keys[1:])
    scales = {"k_scale": k_scale, "v_scale": v_scale} if int8 else {}
    return q, k, v, jnp.full(batch, length, jnp.int32), scales


def measure(context: Context, batch: int, length: int, int8: bool) -> None:
    heads, key_heads, head_dim = (4, 2, 16) if context.tiny else (HEADS, KEY_HEADS, HEAD_DIM)
    arguments = arrays(batch, length, heads, key_heads, head_dim, int8)
    executable = program().lower(*arguments).compile()
    timed = performance.measure(functools.partial(executable, *arguments))
    moved = STEPS * performance.cache_bytes(batch, key_heads, length, head_dim, arguments[1].dtype.itemsize)
    copied = performance.copy_rate(context.tiny)
    context.add(
        f"{'int8' if int8 else 'bfloat16'} cache, {batch} × {length}",
        unit="GB/s",
        **timed.rate(moved / 1e9),
        beside={"copy": copied / 1e9},
        detail={"microseconds": 1e6 * timed.median / STEPS, "bytes": moved // STEPS},
        note=f"{moved / timed.median / copied:.0%} of a copy, {1e6 * timed.median / STEPS:.0f} µs",
    )


def run(context: Context) -> None:
    for batch, length in ((2, 64),) if context.tiny else SHAPES:
        for int8 in (False, True):
            name = f"{'int8' if int8 else 'bfloat16'} cache, {batch} × {length}"
            context.attempt(name, 1 if context.tiny else 5, functools.partial(measure, context, batch, length, int8))
