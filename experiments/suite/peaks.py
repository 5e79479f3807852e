"""Measured peaks of this device: bytes/s of a copy and FLOP/s of a large matmul, the basis of the suite's fractions."""

import functools

import jax
import jax.numpy as jnp

from suite import timing


@functools.cache
def copy_rate(tiny: bool) -> float:
    """Returns bytes/s, read plus written, of one pass over an array much larger than any cache."""
    numbers = 2**20 if tiny else 2**28
    x = jnp.arange(numbers, dtype=jnp.int32)
    add = jax.jit(lambda x: x + 1)
    return 2 * 4 * numbers / timing.measure(functools.partial(add, x)).median


@functools.cache
def product_rate(tiny: bool) -> float:
    """Returns FLOP/s of a matmul of square bfloat16 matrices.

    Inputs are random because matrices of zeros take less power and run faster.
    """
    side = 256 if tiny else 8192
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    multiply = jax.jit(lambda a, b: a @ b)
    return 2 * side**3 / timing.measure(functools.partial(multiply, a, b), least_seconds=0.05).median
