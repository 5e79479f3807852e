"""Peak memory of loading: the final size plus one tensor; on a mesh, plus one array."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import folders
import models
import pytest
import runs

from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.text import Text

CHILD = pathlib.Path(__file__).with_name("memory_child.py")
MODEL = dataclasses.replace(
    *(models.ROTARY,),
    width=512,
    mlp_width=2048,
    layers=6,
    vocab_size=8192,
    heads=8,
    kv_heads=4,
    head_dim=64,
    tied_embeddings=False,
)
SLACK = 5 << 20  # memory that Python keeps
# Makes glibc return freed memory at once, regardless of earlier frees.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

pytestmark = pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(), reason="a process's own memory is reported by Linux"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Writes 64 MB of bfloat16 in safetensors shards of 8 MB, and the same model in Q8_0."""
    folder = tmp_path_factory.mktemp("memory")
    tree = folders.random_tree(MODEL)
    folders.write(folder / "sharded", MODEL, tree, "llama", 8 << 20)
    gguf.write(folder / "m.gguf", MODEL, tree, Text(), quantization="Q8_0")
    return folder


def reported(model, *arguments, devices=1):
    """Runs memory_child.py and returns the numbers it prints, in bytes."""
    flags = runs.environment()["XLA_FLAGS"] + f" --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, CHILD, model, *arguments],
        env=runs.environment(XLA_FLAGS=flags, **GIVEN_BACK),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("name", "dtype", "size"), [("sharded", "bfloat16", 2), ("m.gguf", "float32", 4)])
def test_loading_holds_the_model_and_one_tensor(source, name, dtype, size):
    found = reported(source / name, dtype, "load")
    assert found["final"] > 60e6
    assert found["peak"] >= found["final"], "it is seen at all"
    assert found["peak"] <= found["final"] + size * found["tensor"] + SLACK, found


def test_tensors_that_are_kept_would_show(source):
    found = reported(source / "sharded", "bfloat16", "load", "keeps")
    assert found["peak"] > 1.5 * found["final"] + 2 * found["tensor"] + SLACK, found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "way"), [("bfloat16", "sharded"), ("bf16", "lora")])
def test_on_a_mesh_one_array_is_beside_it(source, dtype, way):
    """Loads with ZeRO 3 on eight devices, and starts a LoRA run there: frozen weights are stored once."""
    found = reported(source / "sharded", dtype, way, devices=8)
    assert found["peak"] >= 0.95 * found["final"], "it is seen at all"
    assert found["peak"] <= found["final"] + found["array"] + 2 * SLACK, found
