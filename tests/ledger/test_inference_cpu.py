"""Prefill on a CPU: every live set of the rules is the largest of some program, and close to XLA's temporaries."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import pytest

from jaxllm import programs
from jaxllm.ledger.formula.fitted.infer import cpu as inference_cpu
from jaxllm.ledger.formula.fitted.infer.forward_pass import Pass

SIZES = {"vocab_size": 512, "layers": 4, "width": 128, "heads": 8, "kv_heads": 2, "head_dim": 32, "mlp_width": 384}
BASE = dataclasses.replace(models.ROTARY, **SIZES, context_length=4096)
PLAIN = dataclasses.replace(models.LEARNED, **SIZES, context_length=4096)
WIDE = {"mlp_width": 4096}
# Model, sequences, tokens of context, prompt tokens per chunk, and a row name from the largest live set.
CELLS = {
    "4,064 rows are written": (BASE, 4, 1024, 127, "scores"),
    "4,096 rows are not": (BASE, 4, 1024, 128, "queries"),
    "more keys than scores": (BASE, 4, 4096, 8, "keys"),
    "one head of keys": (dataclasses.replace(BASE, kv_heads=1), 4, 1024, 128, "scores"),
    "a gated MLP": (dataclasses.replace(BASE, **WIDE), 16, 256, 128, "MLP"),
    "a plain MLP": (dataclasses.replace(PLAIN, **WIDE), 16, 256, 128, "MLP"),
    "weights": (dataclasses.replace(BASE, width=512, mlp_width=2048), 1, 256, 16, "weights"),
    "many words": (dataclasses.replace(BASE, vocab_size=50_000), 32, 256, 16, "logits"),
    "capped in one layer": (dataclasses.replace(BASE, attention_softcap=20.0), 4, 1024, 127, "scores"),
    "capped in several": (dataclasses.replace(BASE, attention_softcap=20.0, unroll=2), 4, 1024, 127, "constants"),
    "unrolled": (dataclasses.replace(BASE, unroll=2), 4, 1024, 128, "constants"),
}
if tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 11):
    del CELLS["one head of keys"]  # XLA compiles it to a loop there
    ONE_MORE = ("capped in several",)  # one more array as large as scores
else:
    ONE_MORE = ()


def _pass(cell):
    model, batch, capacity, tokens, _ = CELLS[cell]
    return Pass(model, batch, capacity, tokens, 4, "cpu", True)


@pytest.fixture(scope="module")
def temporaries():
    """Returns the temporaries of the cells' programs, in bytes."""
    found = {}
    for cell, (model, batch, capacity, tokens, _) in CELLS.items():
        program = programs.prefill(model, batch, tokens, capacity, jnp.float32)
        found[cell] = program.compile().memory_analysis().temp_size_in_bytes
        found[cell] -= _pass(cell).scores if cell in ONE_MORE else 0
        jax.clear_caches()
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_temporaries_are_near_xlas(temporaries, cell):
    made = inference_cpu.prefill_rows(_pass(cell))
    assert inference_cpu.covers(_pass(cell))
    assert sum(row.bytes_per_device for row in made) == pytest.approx(temporaries[cell], rel=0.03)
    assert any(row.name.startswith(CELLS[cell][-1]) for row in made), "another moment is the largest"


@pytest.mark.parametrize("cell", ["4,064 rows are written", "4,096 rows are not"])
def test_a_wrong_bound_of_the_loop_is_caught(temporaries, monkeypatch, cell):
    monkeypatch.setattr(inference_cpu, "_LOOPED", 4064 if "4,064" in cell else 4097)
    wrong = sum(row.bytes_per_device for row in inference_cpu.prefill_rows(_pass(cell)))
    assert abs(wrong / temporaries[cell] - 1) > 0.5


def test_what_the_rules_are_not_for():
    experts = dataclasses.replace(BASE, experts=8, experts_per_token=2)
    rings = dataclasses.replace(BASE, pattern=("sliding", "full"), window=64)
    assert not inference_cpu.covers(Pass(experts, 1, 256, 16, 4, "cpu", True))
    assert not inference_cpu.covers(Pass(rings, 1, 256, 16, 4, "cpu", True))
    assert inference_cpu.covers(Pass(rings, 1, 64, 16, 4, "cpu", True)), "all layers hold the same"
    unrolled = dataclasses.replace(BASE, unroll=4)
    assert not inference_cpu.covers(Pass(unrolled, 1, 256, 16, 4, "cpu", True))
    assert not inference_cpu.covers(Pass(BASE, 1, 256, 16, 2, "cpu", True))
    assert not inference_cpu.covers(Pass(BASE, 1, 256, 16, 4, "cpu", False))
    assert not inference_cpu.covers(Pass(BASE, 1, 256, 16, 4, "gpu", True))
