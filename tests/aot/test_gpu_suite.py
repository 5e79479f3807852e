"""The GPU suite's programs, compiled for an absent GPU at sizes that otherwise first occur on a real one."""

import dataclasses
import functools
import sys

import jax
import pytest
import runs

sys.path.insert(0, str(runs.ROOT / "experiments"))

from suite import attention, bandwidth, implementations, tune
from suite.cells import grid
from suite.correctness import decode_program, flash_program

from jaxllm.hardware import detect
from jaxllm.kernels.flash.common import Tile, tiles_for
from jaxllm.ledger.compiled import absent
from jaxllm.programs import Program


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(implementations, "interpreted", lambda: False)


def compiles(jitted, arguments, name="h100"):
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    device = detect.by_name(name)
    target = absent.require_compiler(device.name, device.compile_target)
    return absent.compile_for(Program("suite", jitted, inputs, ()), target, 1)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", attention.HEAD_DIMS)
@pytest.mark.parametrize("name", ["ours", "jax triton"])
def test_attention_over_the_longest_sequence(name, head_dim):
    """Compiles both passes. cuDNN's needs the device to choose its algorithm; Mosaic's has no backward pass."""
    length, is_ours = max(attention.LENGTHS), name == "ours"
    shape = (1, length, attention.WIDTH // head_dim, head_dim)
    arguments = jax.eval_shape(functools.partial(implementations.arrays, *shape, is_ours))
    made = implementations.jaxllm_causal(head_dim) if is_ours else implementations.third_party(name, head_dim, True)
    executable = compiles(implementations.program(made, True), arguments)
    q = arguments[0].size * arguments[0].dtype.itemsize
    assert executable.memory_analysis().temp_size_in_bytes < 4 * q  # no scores: those of one head take 2 GiB


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_decode_attention_over_the_largest_cache(int8):
    sizes = (bandwidth.HEADS, bandwidth.KEY_HEADS, bandwidth.HEAD_DIM)
    largest = max(bandwidth.SHAPES, key=lambda shape: shape[0] * shape[1])
    arguments = jax.eval_shape(functools.partial(bandwidth.arrays, *largest, *sizes, int8))
    executable = compiles(bandwidth.program(), arguments)
    cache = sum(x.size * x.dtype.itemsize for x in arguments[1:3])
    assert executable.memory_analysis().temp_size_in_bytes < cache / 10


@pytest.mark.slow
@pytest.mark.parametrize("kernel", tune.CHOICES)
def test_tiles_compile(kernel):
    """The first choice of tiles compiles for each kernel. The suite reports one too large for a multiprocessor."""
    head_dim = 128
    arguments = jax.eval_shape(functools.partial(implementations.arrays, 1, 1024, 2, head_dim, True))
    now = tiles_for(implementations.TRITON, head_dim, "bfloat16")
    first = dataclasses.replace(now, **{kernel: Tile(*tune.CHOICES[kernel][0])})
    compiles(
        implementations.program(implementations.jaxllm_causal(head_dim, tiles=first), kernel != "forward"),
        arguments,
    )


@pytest.mark.slow
def test_cells_of_the_correctness_section_compile():
    for cell in grid("flash", False)[::9]:
        compiles(*flash_program(cell, implementations.jaxllm_attention))
    for cell in grid("decode", False)[::9]:
        compiles(*decode_program(cell))
