"""XLA's figures: the peak's definition, donation, and what is missing (jax-ml/jax#18954, #31292)."""

import types

import jax
import jax.numpy as jnp
import pytest

from jaxllm.ledger.compiled import figures, read
from jaxllm.ledger.rows import Unknown

SIDE = 256
MATRIX = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
BYTES = SIDE * SIDE * 4


def compiled(function, *inputs, donate=()):
    return jax.jit(function, donate_argnums=donate).lower(*inputs).compile()


def test_a_scalar():
    found = figures(compiled(lambda x: x + 1, jax.ShapeDtypeStruct((), jnp.float32)))
    assert (found["arguments"], found["outputs"], found["aliases"]) == (4, 4, 0)
    assert found["peak"] == 8 + found["temps"]


def test_one_product():
    found = figures(compiled(lambda a, b: a @ b, MATRIX, MATRIX))
    assert found["arguments"] == 2 * BYTES
    assert found["outputs"] == BYTES
    assert found["peak"] == 3 * BYTES + found["temps"]
    assert found["flops"] == 2 * SIDE**3


def test_donation_makes_two_buffers_one():
    kept = figures(compiled(lambda a, b: a + b, MATRIX, MATRIX))
    given = figures(compiled(lambda a, b: a + b, MATRIX, MATRIX, donate=(0,)))
    assert (kept["aliases"], given["aliases"]) == (0, BYTES)
    assert kept["peak"] - given["peak"] == BYTES


def test_a_backend_without_analyses_is_unknown_and_not_zero():
    found = read(None, None)
    assert set(found) == {"arguments", "outputs", "aliases", "temps", "peak", "flops"}
    assert all(isinstance(value, Unknown) and value.why for value in found.values())


@pytest.mark.parametrize("missing", ["temp_size_in_bytes", "alias_size_in_bytes"])
def test_a_missing_field_makes_the_peak_unknown(missing):
    names = ["argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes"]
    found = read(types.SimpleNamespace(**{name: 8 for name in names if name != missing}), {"flops": -1.0})
    assert found["arguments"] == 8
    assert isinstance(found["peak"], Unknown)
    assert missing in found["peak"].why
    assert isinstance(found["flops"], Unknown)


def test_a_true_zero_is_a_number():
    names = ["argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes"]
    found = read(types.SimpleNamespace(**dict.fromkeys(names, 0)), {"flops": 0.0})
    assert (found["peak"], found["flops"]) == (0, 0)
