"""Bytes that a decoded token moves: weights and cache, and little else. Run by `make test-aot`.

For an H100 they are counted from the HLO. For a TPU, XLA's cost analysis counts the body of a loop once: one layer of
the loop over layers, one token of the loop over tokens. So its count is compared with the head, one layer's weights and
one layer's cache.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxllm import architectures, programs
from jaxllm.decode import generate, sampling
from jaxllm.decode.weights import WeightLayout
from jaxllm.hardware import detect
from jaxllm.ledger.compiled import absent, hlo
from jaxllm.ledger.compiled.traffic import traffic
from jaxllm.ledger.formula import flops
from jaxllm.model import layer_cache
from jaxllm.model.specs import parameter_count

BATCH, CAPACITY, CHUNK, BF16 = 8, 4096, 128, 2
MODEL = architectures.ARCHITECTURES["llama3.2-1b"]
# Weights and cache with as many elements, in heads that fill the lanes of a register.
WIDE = dataclasses.replace(MODEL, heads=16, kv_heads=4, head_dim=128)


@pytest.fixture(autouse=True)
def greedy(monkeypatch):
    """Removes the branches of sampling: the analysis would count the costliest, the sort that filters need."""
    monkeypatch.setattr(sampling.jax.lax, "cond", lambda wanted, yes, no: no())


def compiled(model, made=programs.decode, width=8, cache=jnp.bfloat16, layout=WeightLayout.TPU):
    """Returns (bytes accessed, temporaries, bytes of the cache)."""
    device = detect.by_name("v5e")
    program = made(model, BATCH, width, CAPACITY, jnp.bfloat16, cache, layout)
    target = absent.require_compiler(device.name, device.compile_target)
    executable = absent.compile_for(program, target, 1)
    cost = executable.cost_analysis()
    cost = cost[0] if isinstance(cost, (list, tuple)) else cost
    return cost["bytes accessed"], executable.memory_analysis().temp_size_in_bytes, program.inputs[1].cache.nbytes


def once(model, cache):
    head = model.vocab_size * model.width * BF16
    layers = parameter_count(model) * BF16 - head + cache
    return head + layers / model.layers


@pytest.mark.parametrize(
    ("model", "dtype"), [(MODEL, jnp.bfloat16), (WIDE, jnp.bfloat16), (MODEL, jnp.int8), (WIDE, jnp.int8)]
)
def test_weights_and_cache_are_read_once(model, dtype):
    moved, temps, cache = compiled(model, cache=dtype)
    assert once(model, cache) < moved < 1.05 * once(model, cache)
    assert temps < 0.02 * cache


def test_logits_that_went_through_memory_would_be_caught(monkeypatch):
    """Logits went through memory several times while the state carried them."""
    extend = generate.extend

    def through_memory(*arguments):
        logits, cache = extend(*arguments)
        for _ in range(3):
            logits = jax.lax.optimization_barrier(logits[:, ::-1])
        return logits, cache

    monkeypatch.setattr(generate, "extend", through_memory)
    moved, _, cache = compiled(MODEL)
    assert moved > 1.05 * once(MODEL, cache)


def test_projections_that_are_laid_out_anew_would_be_caught():
    moved, temps, cache = compiled(WIDE, layout=WeightLayout.TRAINING)
    assert moved > 1.4 * once(WIDE, cache)
    assert temps > 0.1 * cache


def test_a_write_that_lays_the_cache_out_anew_would_be_caught(monkeypatch):
    """XLA's own scatter, which the kernel replaces, lays the cache out anew."""
    monkeypatch.setattr(layer_cache, "_write_on_tpu", layer_cache._scatter)
    moved, temps, cache = compiled(MODEL)
    assert moved > 1.5 * once(MODEL, cache)
    assert temps > cache


def test_prompts_are_written_without_a_copy_of_the_cache(monkeypatch):
    """Prefill's temporaries are attention's scores in float32 and bfloat16; XLA's scatter needs two more caches."""
    scores = BATCH * MODEL.heads * CHUNK * CAPACITY * (4 + BF16)
    _, temps, cache = compiled(MODEL, programs.prefill, CHUNK)
    assert scores < temps < scores + 0.3 * cache
    monkeypatch.setattr(layer_cache, "_write_on_tpu", layer_cache._scatter)
    _, temps, _ = compiled(MODEL, programs.prefill, CHUNK)
    assert temps > scores + cache


def on_h100(name, batch, cache, layout=WeightLayout.PER_LAYER):
    """Returns (bytes moved per token, weights and cache read once, temporaries, the program) for a few layers."""
    model, device = dataclasses.replace(architectures.ARCHITECTURES[name], layers=4), detect.by_name("h100")
    program = programs.decode(model, batch, 8, CAPACITY, jnp.bfloat16, cache, layout)
    executable = absent.compile_for(program, absent.require_compiler(device.name, device.compile_target), 1)
    moved = traffic(hlo.parse(executable.as_text()), per_iteration=True)
    once = flops.decode_token(model, batch, CAPACITY, "bf16", "int8" if cache == jnp.int8 else "bf16").bytes
    return moved, once, executable.memory_analysis().temp_size_in_bytes, model


@pytest.mark.parametrize(
    ("name", "batch", "cache"),
    [
        ("llama3-8b", 1, jnp.bfloat16),
        ("llama3-8b", 8, jnp.int8),
        ("gpt2", 4, jnp.bfloat16),
        ("gemma2-2b", 1, jnp.bfloat16),
        ("mixtral-8x7b", 1, jnp.bfloat16),
        ("mixtral-8x7b", 8, jnp.bfloat16),
    ],
)
def test_weights_and_cache_are_read_once_on_a_gpu(name, batch, cache):
    moved, once, temps, model = on_h100(name, batch, cache)
    assert once < moved.total < 1.05 * once, moved.largest
    assert temps < 0.01 * once + 30 * batch * model.vocab_size, "more than what sampling a token takes"


def test_weights_sliced_from_stacks_would_be_caught_on_a_gpu():
    moved, once, temps, _ = on_h100("llama3-8b", 1, jnp.bfloat16, WeightLayout.TRAINING)
    assert moved.total > 1.5 * once
    assert temps > 0.04 * once
