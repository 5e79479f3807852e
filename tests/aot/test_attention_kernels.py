"""The attention kernels compiled for absent devices: that they compile, what memory they need, what spills."""

import dataclasses
import functools
import glob
import pathlib
import re
import subprocess
import sysconfig
import tempfile

import jax
import jax.numpy as jnp
import pytest

from jaxllm.hardware import detect
from jaxllm.kernels import reference
from jaxllm.kernels.flash.api import flash_attention
from jaxllm.kernels.flash.common import Tile, Tiles, tiles_for
from jaxllm.ledger.compiled import absent, attached, tpu_report
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


def figures(name, head_dim, length=LENGTH, rule="rich", dtype="bfloat16", tiles=None):
    """Returns (bytes of temporaries, {kernel: (bytes spilled, registers)}); TPUs report no spills, so {} for them."""
    return compiled_once(name, head_dim, length, rule, dtype, tiles)


@functools.cache
def compiled_once(name, head_dim, length, rule, dtype, tiles):
    device = detect.by_name(name)
    target = absent.require_compiler(device.name, device.compile_target)
    platform = "tpu" if target.platform == "tpu" else "gpu"
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_module_re": ".*"}
        if platform == "gpu":
            # As users compile. LLVM allocates registers, and tests run without its optimisations (`compiler.py`).
            options["xla_backend_optimization_level"] = 3
        made = program(platform, head_dim, length, rule, dtype, tiles=tiles)
        executable = absent.compile_for(made, target, 1, options)
        found, told = attached.figures(executable), tpu_report.figures(pathlib.Path(folder))
        # A TPU's report counts outputs among non-arguments; its own analysis omits vector memory.
        temps = told["temps"] - found["outputs"] if told else found["temps"]
        return temps, spills(pathlib.Path(folder))


def spills(folder):
    """Returns what NVIDIA's assembler reports for the kernels of `flash_triton` in a folder of PTX."""
    (assembler,) = glob.glob(f"{sysconfig.get_path('purelib')}/nvidia/*/bin/ptxas")
    told = {}
    for path in folder.glob("*.ptx"):
        arch = re.search(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
        if arch is None or "flash_attention" not in path.read_text():
            continue
        command = [assembler, "-v", "-arch", arch[1], str(path), "-o", str(folder / "out.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        entry = r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
        for kernel, stored, loaded, registers in re.findall(entry, said, re.DOTALL):
            if kernel.startswith("flash_attention"):
                told[kernel] = (int(stored) + int(loaded), int(registers))
    return told


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("head_dim", "dtype"), WITHOUT_SPILLS)
@pytest.mark.parametrize("name", GPUS)
def test_no_kernel_spills_on_gpus(name, head_dim, dtype, rule):
    _, told = figures(name, head_dim, rule=rule, dtype=dtype)
    assert set(told) == {"flash_attention", "flash_attention_dq", "flash_attention_dkv"}
    assert all(spilled == 0 for spilled, _ in told.values()), told


@pytest.mark.slow
def test_spills_would_be_seen():
    tile = Tile(64, 64, 4)
    _, told = figures("a100-80gb", 64, tiles=Tiles(tile, tile, tile))
    assert any(spilled > 0 for spilled, _ in told.values())


@pytest.mark.slow
def test_the_widest_heads_in_float32_spill_unless_taken_in_parts():
    now = tiles_for("triton", 256, "float32")
    at_once = Tiles(*(dataclasses.replace(tile, depth=0) for tile in (now.forward, now.dq, now.dkv)))
    _, told = figures("h100", 256, dtype="float32", tiles=at_once)
    assert len(told) == 3
    assert all(spilled > 0 for spilled, _ in told.values()), told


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", GPUS)
def test_gpus_need_two_numbers_a_query_and_head(name, head_dim, rule):
    """Temporaries are lse and delta in float32 and nothing else, whatever the head dimension."""
    temps, _ = figures(name, head_dim, rule=rule)
    assert 0 <= temps - 2 * 4 * HEADS * LENGTH <= SMALL


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "length"), [(64, LENGTH), (128, LENGTH), (256, LENGTH), (128, 8 * LENGTH)])
@pytest.mark.parametrize("name", TPUS)
def test_tpus_need_turned_copies_besides(name, head_dim, length):
    """TPUs need, besides, at most transposed copies of q, o, dO, dq, k, v, dk and dv, padded to 128 lanes.

    Linear in the length: at the longer one, a single head's scores would be twice the whole bound.
    """
    temps, _ = figures(name, head_dim, length)
    copies = 4 * 2 * (HEADS + KEY_HEADS) * length * max(head_dim, 128)
    statistics = 2 * 4 * HEADS * length
    # Often less than the statistics: the compiler reuses the space of outputs where it can.
    assert 0 <= temps <= copies + 4 * statistics


@pytest.mark.parametrize("name", GPUS)
def test_memory_grows_with_the_length_not_its_square(name):
    assert figures(name, 128, 2 * LENGTH)[0] <= 2 * figures(name, 128)[0] + SMALL


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
        return attached.figures(absent.compile_for(made, detect.by_name("h100").compile_target, 1))["temps"]

    assert temps(2048) > 3 * temps(1024)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_float32_and_odd_shapes_compile(name):
    for head_dim, length in ((80, 1000), (192, 77)):
        assert figures(name, head_dim, length, dtype="float32")[0] > 0
