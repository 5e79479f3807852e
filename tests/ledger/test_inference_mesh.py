"""The inference bill on a mesh: exact shards of weights and cache, transfers as compiled, and time of all devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import models
import pytest

from jaxllm import programs
from jaxllm.architectures import ARCHITECTURES
from jaxllm.config.inference_mesh import InferenceMesh
from jaxllm.decode.weights import WeightLayout
from jaxllm.hardware import detect
from jaxllm.ledger.compiled import collectives, hlo, inspection
from jaxllm.ledger.formula import communication, roofline
from jaxllm.ledger.formula.inference_memory import inference
from jaxllm.ledger.rows import DECODE
from jaxllm.parallel.mesh import make_mesh

BATCH, CAPACITY = 4, 64
MESHES = [InferenceMesh(tensor=2), InferenceMesh(tensor=4), InferenceMesh(data=2, tensor=2), InferenceMesh(data=4)]
LLAMA70 = ARCHITECTURES["llama3-70b"]
H100 = detect.by_name("h100")


def program(model, sizes, cache=jnp.float32):
    mesh = make_mesh(sizes.config)
    options = {"layout": WeightLayout.PER_LAYER, "mesh": mesh}
    return programs.decode(model, BATCH, 8, CAPACITY, jnp.float32, cache, **options)


def bytes_of_one_device(tree):
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bill(model, sizes, cache="fp32", **options):
    return inference(model, BATCH, CAPACITY, 8, "fp32", cache, mesh=sizes, **options)


# The vocabulary of 261 does not divide over any mesh, and four devices outnumber the key/value heads.
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", models.ALL)
def test_state_is_exact(name, sizes):
    model = dataclasses.replace(models.ALL[name], vocab_size=261)
    params, state, _ = program(model, sizes).inputs
    ledger = bill(model, sizes)
    assert ledger.count == sizes.count
    assert ledger.kind_bytes("weights") == bytes_of_one_device(params)
    assert ledger.kind_bytes("KV cache") == bytes_of_one_device(state.cache.kv)
    assert ledger.persistent_bytes == bytes_of_one_device((params, state))


def test_int8_state_is_exact():
    sizes = InferenceMesh(tensor=4)
    params, state, _ = program(models.SLIDING, sizes, jnp.int8).inputs
    assert bill(models.SLIDING, sizes, "int8").persistent_bytes == bytes_of_one_device((params, state))


def test_heads_that_are_not_repeated_would_be_caught():
    """Two key/value heads on four devices: a bill of half a head per device is half the cache."""
    sizes, model = InferenceMesh(tensor=4), models.ROTARY
    assert bill(model, sizes).kind_bytes("KV cache") == 2 * bill(model, InferenceMesh()).kind_bytes("KV cache") // 4


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", ["experts", "post"])
def test_transfers_and_peak_are_xlas(name, sizes):
    model = dataclasses.replace(models.ALL[name], vocab_size=4099)
    compiled = program(model, sizes).compile()
    found = collectives.summary(collectives.collectives(hlo.parse(compiled.as_text())))
    billed = communication.inference(model, BATCH, 1, 4, sizes)
    assert sum(row["ring_bytes"] for row in found) == sum(transfer.ring_bytes for transfer in billed)
    assert bool(billed) == (sizes.tensor > 1)
    ledger, peak = bill(model, sizes), inspection.figures(compiled)["peak"]
    assert ledger.persistent_bytes + ledger.phase_bytes(DECODE) == pytest.approx(peak, rel=0.05)


def decode(sizes, batch=1, device=H100):
    return roofline.decode_token(LLAMA70, batch, 4096, "bf16", "bf16", device, "bfloat16", sizes)


def test_time_of_a_token():
    """Bandwidth is that of all devices; the interconnect adds one all-reduce per sub-layer."""
    two, eight = decode(InferenceMesh(tensor=2)), decode(InferenceMesh(tensor=8))
    assert two.bound == eight.bound == "bandwidth"
    assert 3.95 < two.seconds / eight.seconds < 4
    outputs = 161 * LLAMA70.width * 2  # 2 per layer and the embeddings, in bfloat16
    logits = LLAMA70.vocab_size * 4
    assert eight.sent_bytes == pytest.approx((2 * outputs + logits) * 7 / 8, abs=1)
    assert decode(InferenceMesh()).sent_bytes is None
    data = decode(InferenceMesh(data=4), batch=4)
    assert data.seconds == decode(InferenceMesh()).seconds
    assert data.sent_bytes == 0


def test_a_rate_that_is_not_known_is_named():
    alone = dataclasses.replace(H100, interconnect=None, network=None)
    assert "the rate between" in decode(InferenceMesh(tensor=2), device=alone).seconds.why
