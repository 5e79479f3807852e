"""What a decoded token moves on a TPU: weights and cache, and little beside. Run by `make test-aot`.

XLA's cost analysis counts the body of a loop once: of the loop over layers one layer, of that over tokens one token. So
what it counts is held against the head, one layer's weights and one layer's cache. It counts what passes between main
and vector memory as often as it is touched in either; read from main memory alone, the excess is smaller.
"""

import jax.numpy as jnp
import pytest

from jaxllm import architectures, hardware, programs
from jaxllm.decode import generate
from jaxllm.ledger import absent
from jaxllm.model import layer_cache
from jaxllm.model.specs import parameter_count

BATCH, CAPACITY, BF16 = 8, 4096, 2
MODEL = architectures.ARCHITECTURES["llama3.2-1b"]


@pytest.fixture(autouse=True)
def greedy(monkeypatch):
    """The choice of a token has branches, of which the analysis counts the costliest: the sort that filters need."""
    monkeypatch.setattr(
        generate.sampling_lib, "next_tokens", lambda logits, *_: jnp.argmax(logits, axis=1).astype(jnp.int32)
    )


def compiled():
    """(bytes accessed, temporaries, bytes of the cache)."""
    device = hardware.named("v5e")
    program = programs.decode(MODEL, BATCH, 8, CAPACITY, jnp.bfloat16)
    target = absent.require_compiler(device.name, device.compile_target)
    executable = absent.compile_for(program, target, 1)
    cost = executable.cost_analysis()
    cost = cost[0] if isinstance(cost, (list, tuple)) else cost
    return cost["bytes accessed"], executable.memory_analysis().temp_size_in_bytes, program.inputs[1].cache.nbytes


def once(cache):
    head = MODEL.vocab_size * MODEL.width * BF16
    layers = parameter_count(MODEL) * BF16 - head + cache
    return head + layers / MODEL.layers


def test_weights_and_cache_are_read_once():
    moved, temps, cache = compiled()
    assert once(cache) < moved < 1.09 * once(cache)
    assert temps < 0.02 * cache


def test_a_write_that_lays_the_cache_out_anew_would_be_caught(monkeypatch):
    """XLA's own scatter, which the kernel is in place of."""
    monkeypatch.setattr(layer_cache, "_write_on_tpu", layer_cache._scatter)
    moved, temps, cache = compiled()
    assert moved > 1.5 * once(cache)
    assert temps > cache
