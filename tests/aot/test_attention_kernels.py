"""The attention kernels compiled for absent devices: that they compile, what memory they need, what spills."""

import dataclasses
import functools
import pathlib
import re
import tempfile

import jax
import jax.numpy as jnp
import pytest

from jaxllm.hardware import detect
from jaxllm.kernels import reference
from jaxllm.kernels.flash.api import flash_attention
from jaxllm.kernels.flash.common import Tile, Tiles, tiles_for
from jaxllm.ledger.compiled import absent, inspection
from jaxllm.programs import Program

GPUS = ["a100-80gb", "h100", "b200"]
TPUS = ["v5e", "v5p"]
HEADS, KEY_HEADS, LENGTH = 4, 2, 1024
# The masks of a packed batch of Gemma 2, and a bare causal mask. The two compile to different kernels.
RULES = {"rich": {"window": 300, "softcap": 30.0}, "bare": {"window": 0, "softcap": 0.0}}
WITHOUT_SPILLS = [
    *[(head_dim, "bfloat16") for head_dim in (16, 64, 80, 128, 256)],
    (128, "float16"),
    *[(head_dim, "float32") for head_dim in (16, 32, 64, 96, 128, 192, 256)],
]
# XLA's rounding of buffers, and its table of outputs.
SMALL = 1024


@functools.cache
def program(platform, head_dim, length, rule, dtype="bfloat16", **how):
    """Returns forward and backward of one layer's attention; all GPUs share it, so JAX traces and lowers it once."""
    q = jax.ShapeDtypeStruct((1, length, HEADS, head_dim), dtype)
    k = jax.ShapeDtypeStruct((1, KEY_HEADS, length, head_dim), dtype)
    segments = [jax.ShapeDtypeStruct((1, length), jnp.int32)] * (2 if rule == "rich" else 0)

    def run(q, k, v, d_out, *segments):
        def attend(q, k, v):
            masks = {"causal": True, "scale": head_dim**-0.5, **RULES[rule]}
            return flash_attention(q, k, v, *segments, **masks, platform=platform, **how)

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    return Program("attention", jax.jit(run), (q, k, k, q, *segments), ())


def compiled(name, head_dim, length=LENGTH, rule="rich", dtype="bfloat16", tiles=None):
    """Returns (bytes of temporaries, names of the kernels), as users compile for a device; each program once.

    Raises:
      JaxRuntimeError: a GPU kernel spills registers. A TPU's compiler does not report spills.
    """
    return _compiled(name, head_dim, length, rule, dtype, tiles)


@functools.cache
def _compiled(name, head_dim, length, rule, dtype, tiles):
    device = detect.by_name(name)
    target = absent.require_compiler(device.name, device.compile_target)
    platform = "tpu" if target.platform == "tpu" else "gpu"
    made = program(platform, head_dim, length, rule, dtype, tiles=tiles)
    if platform == "gpu":
        # LLVM allocates registers, and tests run without its optimizations (`compiler.py`).
        options = {
            "xla_backend_optimization_level": 3,
            "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
        }
        executable = absent.compile_for(made, target, 1, options)
        temps = inspection.figures(executable)["temps"]
    else:
        with tempfile.TemporaryDirectory() as folder:
            options = {"xla_dump_to": folder, "xla_dump_hlo_module_re": ".*"}
            executable = absent.compile_for(made, target, 1, options)
            # A TPU's report counts outputs among non-arguments; its own analysis omits vector memory.
            reported = inspection.tpu_figures(pathlib.Path(folder))["temps"]
            temps = reported - inspection.figures(executable)["outputs"]
    return temps, set(re.findall(r"\b(flash_attention(?:_dq|_dkv)?)\b(?!\.py)", executable.as_text()))


def temporaries(*arguments, **how):
    return compiled(*arguments, **how)[0]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("head_dim", "dtype"), WITHOUT_SPILLS)
@pytest.mark.parametrize("name", GPUS)
def test_no_kernel_spills_on_gpus(name, head_dim, dtype, rule):
    _, kernels = compiled(name, head_dim, rule=rule, dtype=dtype)
    assert kernels == {"flash_attention", "flash_attention_dq", "flash_attention_dkv"}


@pytest.mark.slow
def test_spills_would_be_seen():
    tile = Tile(64, 64, 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compiled("a100-80gb", 64, tiles=Tiles(tile, tile, tile))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_the_widest_heads_in_float32_spill_unless_taken_in_parts(kernel):
    tiles = tiles_for("triton", 256, "float32")
    at_once = dataclasses.replace(tiles, **{kernel: dataclasses.replace(getattr(tiles, kernel), depth=0)})
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compiled("h100", 256, dtype="float32", tiles=at_once)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", GPUS)
def test_gpu_temporaries_are_two_floats_per_query_and_head(name, head_dim, rule):
    """Temporaries are lse and delta in float32 and nothing else, whatever the head dimension."""
    temps = temporaries(name, head_dim, rule=rule)
    assert 0 <= temps - 2 * 4 * HEADS * LENGTH <= SMALL


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "length"), [(64, LENGTH), (128, LENGTH), (256, LENGTH), (128, 8 * LENGTH)])
@pytest.mark.parametrize("name", TPUS)
def test_tpu_temporaries_are_transposed_copies_besides(name, head_dim, length):
    """TPUs need, besides, at most transposed copies of q, o, dO, dq, k, v, dk and dv, padded to 128 lanes.

    Linear in the length: at the longer one, a single head's scores would be twice the whole bound.
    """
    temps = temporaries(name, head_dim, length)
    copies = 4 * 2 * (HEADS + KEY_HEADS) * length * max(head_dim, 128)
    statistics = 2 * 4 * HEADS * length
    # Often less than the statistics: the compiler reuses the space of outputs where it can.
    assert 0 <= temps <= copies + 4 * statistics


def test_memory_grows_with_the_length_not_its_square():
    assert temporaries("h100", 128, 2 * LENGTH) <= 2 * temporaries("h100", 128) + SMALL


def test_the_reference_s_memory_grows_with_the_square():
    def temps(length):
        q, k = (
            jax.ShapeDtypeStruct((1, length, 4, 64), "bfloat16"),
            jax.ShapeDtypeStruct((1, 2, length, 64), "bfloat16"),
        )
        mask = jax.ShapeDtypeStruct((1, length, length), bool)

        def run(q, k, v, mask):
            return reference.attention(q, k, v, mask, scale=0.1, softcap=0.0, named=False)

        made = Program("reference", jax.jit(run), (q, k, k, mask), ())
        return inspection.figures(absent.compile_for(made, detect.by_name("h100").compile_target, 1))["temps"]

    assert temps(2048) > 3 * temps(1024)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_float32_and_odd_shapes_compile(name):
    for head_dim, length in ((80, 1000), (192, 77)):
        assert temporaries(name, head_dim, length, dtype="float32") > 0
