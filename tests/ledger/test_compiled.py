"""XLA's figures: the definition of the peak, donation, and missing figures (jax-ml/jax#18954, #31292)."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import pytest

from jaxllm.ledger.compiled.attached import Inspection, figures, inspect, read
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
    device = {"arguments", "outputs", "aliases", "temps"}
    assert set(found) == device | {f"host_{name}" for name in device} | {"peak", "flops"}
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
    assert isinstance(found["host_arguments"], Unknown)


def test_the_host_s_memory_is_not_the_device_s():
    sizes = {"argument": 8, "output": 8, "alias": 8, "temp": 2}
    memory = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
    host = {f"host_{name}_size_in_bytes": 100 * size for name, size in sizes.items()}
    found = read(types.SimpleNamespace(**memory, **host), None)
    assert (found["peak"], found["host_arguments"], found["host_temps"]) == (10, 800, 200)


def test_an_inspection_tells_all_and_survives_json():
    def step(weights, x):
        return jax.lax.scan(lambda c, w: (c @ w, None), x, weights)[0]

    inputs = (jax.ShapeDtypeStruct((5, SIDE, SIDE), jnp.float32), MATRIX)
    found = inspect(lambda: compiled(step, *inputs))
    assert found.matmul_counts["flops"] == 5 * 2 * SIDE**3
    assert found.collectives == []
    assert found.figures["arguments"] == 6 * BYTES
    again = Inspection.from_json(json.loads(json.dumps(found.to_json())))
    assert again == dataclasses.replace(found, seconds=again.seconds, matmul_counts=again.matmul_counts)
    assert again.matmul_counts["flops"] == found.matmul_counts["flops"]


@pytest.mark.parametrize(
    ("message", "peak"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (36.50G) "
            "exceeds available HBM (15.75G).",
            73 * 2**29,
        ),
        (
            "INTERNAL: x: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
            "Used 21.50G of 15.75G hbm. Exceeded hbm capacity by 5.75G.\n\nTotal hbm usage >= 22.0G:",
            43 * 2**29,
        ),
        ("RESOURCE_EXHAUSTED: no sizes here", None),
    ],
)
def test_what_does_not_fit_is_a_result(message, peak):
    def fails():
        raise jax.errors.JaxRuntimeError(message)

    found = inspect(fails)
    assert found.oom_message.startswith("RESOURCE_EXHAUSTED: ")
    assert isinstance(found.figures["arguments"], Unknown)
    assert "RESOURCE_EXHAUSTED" in found.figures["arguments"].why
    assert found.figures["peak"] == peak if peak else isinstance(found.figures["peak"], Unknown)
    assert Inspection.from_json(json.loads(json.dumps(found.to_json()))).figures == found.figures


def test_another_failure_is_a_failure():
    def fails():
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        inspect(fails)
