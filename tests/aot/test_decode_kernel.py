"""The decode attention kernels, compiled for absent devices. Run by `make test-aot`."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxllm.hardware import detect
from jaxllm.kernels.decode import api as decode_lib
from jaxllm.kernels.decode import gpu as decode_gpu
from jaxllm.ledger.compiled import absent
from jaxllm.programs import Program

GPUS, TPUS = ["a100-80gb", "h100", "b200"], ["v5e", "v5p"]
LAYERS, BATCH = 4, 2
# (heads, key heads, slots, head_dim, new tokens, dtype, int8, ring)
SHAPES = {
    "llama": (32, 8, 4096, 128, 1, jnp.bfloat16, False, False),
    "half the lanes": (32, 8, 4096, 64, 1, jnp.bfloat16, False, False),
    "odd": (8, 2, 1000, 80, 3, jnp.float32, False, True),
    "int8": (16, 8, 2048, 256, 1, jnp.bfloat16, True, False),
}


def program(shape, platform):
    heads, kv_heads, slots, head_dim, tokens, dtype, int8, ring = SHAPES[shape]
    cache = jax.ShapeDtypeStruct((LAYERS, BATCH, kv_heads, slots, head_dim), jnp.int8 if int8 else dtype)
    scales = {name: jax.ShapeDtypeStruct(cache.shape[:-1], jnp.float32) for name in ("k_scale", "v_scale") if int8}

    def run(q, k, v, lengths, layer, scales):
        options = {"window": slots if ring else 0, "scale": 0.1, "softcap": 30.0 if ring else 0.0}
        capacity = slots * (2 if ring else 1)
        return decode_lib.decode_attention(
            q, k, v, lengths, layer=layer, **scales, **options, capacity=capacity, platform=platform
        )

    q = jax.ShapeDtypeStruct((BATCH, tokens, heads, head_dim), dtype)
    lengths, layer = jax.ShapeDtypeStruct((BATCH,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return Program("decode_attention", jax.jit(run), (q, cache, cache, lengths, layer, scales), ())


@functools.cache
def compiled(shape, device):
    named = detect.by_name(device)
    target = absent.require_compiler(named.name, named.compile_target)
    return absent.compile_for(program(shape, named.platform), target, 1)


def cache_bytes(shape):
    _, cache, *_ = program(shape, "cpu").inputs
    return 2 * cache.size * cache.dtype.itemsize


@pytest.mark.parametrize("device", [*GPUS, *TPUS])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_and_copies_no_cache(shape, device):
    """Temporaries are partial results of the splits, a few elements per head: under a quarter of one layer's cache."""
    text = compiled(shape, device).as_text()
    assert text.count("decode_attention") > 0
    temps = compiled(shape, device).memory_analysis().temp_size_in_bytes
    heads, kv_heads, slots, head_dim, tokens, dtype, *_ = SHAPES[shape]
    most = 32  # splits
    if device in GPUS:
        itemsize = jnp.dtype(dtype).itemsize
        block = decode_gpu.block_length(head_dim, itemsize)
        most = decode_gpu.split_count(BATCH, kv_heads, tokens * heads // kv_heads, slots, block)
    # acc, m and l of each split in float32; one more copy while they are combined.
    assert temps <= 2 * most * BATCH * tokens * heads * (head_dim + 2) * 4
    assert temps < cache_bytes(shape) / LAYERS / 4


@pytest.mark.parametrize("device", ["v5e", "v5p"])
@pytest.mark.parametrize("shape", ["llama", "half the lanes"])
def test_one_layer_of_the_stack_is_read(shape, device):
    (cost,) = [compiled(shape, device).cost_analysis()]
    cost = cost[0] if isinstance(cost, (list, tuple)) else cost
    assert cost["bytes accessed"] == pytest.approx(cache_bytes(shape) / LAYERS, rel=0.05)


def test_a_copy_of_the_cache_would_be_caught():
    """Slicing a layer out of the stack before the kernel copies that layer."""
    named = detect.by_name("h100")
    target = absent.require_compiler(named.name, named.compile_target)
    stacked = program("llama", "gpu")

    def run(q, k, v, lengths, layer, scales):
        options = {"window": 0, "scale": 0.1, "softcap": 0.0, "capacity": k.shape[3], "platform": "gpu"}
        return decode_lib.decode_attention(q, k[layer], v[layer], lengths, **options)

    copying = absent.compile_for(Program("copying", jax.jit(run), stacked.inputs, ()), target, 1)
    assert copying.memory_analysis().temp_size_in_bytes >= cache_bytes("llama") / LAYERS
