"""Admission by fitted memory, not by the model's limit: a refusal leaves the engine alive; an admitted call runs."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import pytest

from jaxllm.decode.sampling import SamplingOptions
from jaxllm.engine.generator import Generator
from jaxllm.engine.request import SampleRequest
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.interop.tokenizer import ByteTokenizer
from jaxllm.ledger.runtime.sampling import SamplingBill
from jaxllm.model import specs

MODEL = dataclasses.replace(models.ROTARY, vocab_size=260, context_length=262_144)
GREEDY = SampleRequest(max_new_tokens=4, sampling=SamplingOptions(temperature=0.0))


def billed(batch: int, context: int, memory: int) -> SamplingBill:
    device = dataclasses.replace(detect.by_name("h100"), platform="cpu", memory_bytes=memory)
    return SamplingBill("tiny", MODEL, batch, context, 8, device, 0)


def test_a_refusal_ends_the_call_and_not_the_engine():  # google-deepmind/gemma#715, vllm#40302
    memory = billed(2, 256, 2**40).ledger.peak_bytes  # two sequences of 256 tokens, to the byte
    params = specs.initialize(specs.param_specs(MODEL), jax.random.key(0), jnp.float32)
    generator = Generator(
        MODEL,
        params,
        ByteTokenizer(),
        jnp.float32,
        chunk=8,
        steps=4,
        admit=lambda batch, context: billed(batch, context, memory).require_fit(),
    )
    before, _ = generator.generate(["x" * 200], GREEDY)
    for prompts, largest in ((["x" * 15_500], "tokens in each of 1"), (["x"] * 60, "sequences of that length")):
        with pytest.raises(UserError, match=rf"does not fit: .* need .* of .* the largest that fits: .*{largest}"):
            generator.generate(prompts, GREEDY)
    assert generator.generate(["x" * 200], GREEDY)[0] == before
    admission = billed(2, 256, memory).admission()
    assert (admission.fits, admission.margin, admission.largest_batch) == (True, 0, 2)
    results, _ = generator.generate(["x" * 200] * admission.largest_batch, GREEDY)
    assert [result.tokens for result in results] == [before[0].tokens] * 2
    assert generator.live["weights"] == billed(2, 256, memory).ledger.kind_bytes("weights")
    assert generator.live["KV cache"] == billed(2, 256, memory).ledger.kind_bytes("KV cache")
