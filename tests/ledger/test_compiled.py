"""XLA's figures: the peak, donation, missing figures (jax-ml/jax#18954, #31292); the TPU compiler's buffer report."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import pytest

from jaxllm.ledger.compiled.inspection import Inspection, figures, inspect, parse_analyses, tpu_figures
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


def test_one_matmul():
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
    found = parse_analyses(None, None)
    device = {"arguments", "outputs", "aliases", "temps"}
    assert set(found) == device | {f"host_{name}" for name in device} | {"peak", "flops"}
    assert all(isinstance(value, Unknown) and value.why for value in found.values())


@pytest.mark.parametrize("missing", ["temp_size_in_bytes", "alias_size_in_bytes"])
def test_a_missing_field_makes_the_peak_unknown(missing):
    names = ["argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes"]
    found = parse_analyses(types.SimpleNamespace(**{name: 8 for name in names if name != missing}), {"flops": -1.0})
    assert found["arguments"] == 8
    assert isinstance(found["peak"], Unknown)
    assert missing in found["peak"].why
    assert isinstance(found["flops"], Unknown)


def test_a_true_zero_is_a_number():
    names = ["argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes"]
    found = parse_analyses(types.SimpleNamespace(**dict.fromkeys(names, 0)), {"flops": 0.0})
    assert (found["peak"], found["flops"]) == (0, 0)
    assert isinstance(found["host_arguments"], Unknown)


def test_host_memory_is_not_device_memory():
    sizes = {"argument": 8, "output": 8, "alias": 8, "temp": 2}
    memory = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
    host = {f"host_{name}_size_in_bytes": 100 * size for name, size in sizes.items()}
    found = parse_analyses(types.SimpleNamespace(**memory, **host), None)
    assert (found["peak"], found["host_arguments"], found["host_temps"]) == (10, 800, 200)


def test_an_inspection_survives_json():
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
def test_an_out_of_memory_error_is_a_result(message, peak):
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


# Synthetic dumps of the TPU compiler.
USAGE = """Memory Space: default (color=0)
Total bytes: {total} (1.00KiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
Memory Space: vmem (color=1)
Total bytes: 777 (777B)
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <1 x @0> (size=4,offset=0): s32[]
allocation 1: size 4096, parameter 0, shape |f32[8,128]| at ShapeIndex {}, maybe-live-out:
 value: <2 param.0 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 2: size 512, parameter 1, shape |s32[]| at ShapeIndex {}:
allocation 3: size 1024, parameter 2, shape |f32[256]| at ShapeIndex {}, color 1:
allocation 4: size 4096, output shape is |f32[8,128]|, maybe-live-out:
allocation 5: size 9000, preallocated-temp:
"""


def write(folder, name: str, total: int, assignment: str = ASSIGNMENT) -> None:
    stem = f"{name}.after_optimizations-"
    (folder / f"{stem}memory-usage-report.txt").write_text(USAGE.format(total=total))
    (folder / f"{stem}buffer-assignment.txt").write_text(assignment)


def test_arguments_are_those_in_main_memory_donated_or_not(tmp_path):
    write(tmp_path, "module_0000.jit_step", 20000)
    assert tpu_figures(tmp_path) == {"temps": 20000 - 4096 - 512, "peak": 20000}


def test_the_module_that_needs_most_is_the_program(tmp_path):
    write(tmp_path, "module_0000.jit_small", 5000)
    write(tmp_path, "module_0001.jit_step", 30000, ASSIGNMENT.replace("4096, parameter", "8192, parameter"))
    write(tmp_path, "module_0002.jit_other", 6000)
    assert tpu_figures(tmp_path) == {"temps": 30000 - 8192 - 512, "peak": 30000}


def test_a_missing_tpu_report_gives_no_figures(tmp_path):
    assert tpu_figures(tmp_path) == {}
    (tmp_path / "a.after_optimizations-memory-usage-report.txt").write_text(USAGE.format(total=1))
    assert tpu_figures(tmp_path) == {}  # the buffer assignment is missing
    write(tmp_path, "b", 9)
    (tmp_path / "b.after_optimizations-memory-usage-report.txt").write_text(
        "Memory Space: vmem (color=1)\nTotal bytes: 9 (9B)"
    )
    assert tpu_figures(tmp_path) == {}
