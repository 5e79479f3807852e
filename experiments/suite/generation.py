"""Section f: prompt and new tokens per second of the generator, on a 1B-class model with random weights."""

import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import architectures
from jaxllm.config import Architecture
from jaxllm.decode.sampling import SamplingOptions
from jaxllm.engine.generator import Generator
from jaxllm.engine.request import SampleRequest
from jaxllm.interop.tokenizer import ByteTokenizer
from jaxllm.model import specs
from jaxllm.step.precision import policy_for
from suite import performance, steps
from suite.records import Context

MODEL = "llama3.2-1b"
PROMPT, NEW = 2000, 48  # tokens per row
BATCHES = (1, 32)
CHUNKS = (128, 1024)  # prompt tokens per prefill call


def weights(model: Architecture, dtype: Any) -> Any:
    """Returns random weights, created on the device."""
    return jax.jit(lambda: specs.initialize(specs.param_specs(model), jax.random.key(0), dtype))()


def measure(context: Context, generator: Generator, model: Architecture, batch: int, chunk: int) -> None:
    """Adds two records: prefill including each row's first token, and greedy decoding of the tokens after it."""
    prompt, new = (40, 9) if context.tiny else (PROMPT, NEW)
    prompts = [chr(ord("a") + row % 26) * prompt for row in range(batch)]
    request = SampleRequest(max_new_tokens=new, sampling=SamplingOptions(temperature=0.0), ignore_eos=True)
    generator.generate(prompts, request)  # warm-up: compiles
    repeats = 2 if context.tiny else performance.REPEATS
    times = [generator.generate(prompts, request)[1] for _ in range(repeats)]
    taken = [t.prompt_tokens / t.first_token for t in times]
    made = [t.tokens_per_second for t in times]
    name = f"{MODEL}, {batch} × {prompt}, chunks of {chunk}"
    for what, rates in (("prefill", taken), ("decode", made)):
        fields: dict[str, Any] = {"detail": {}}
        if what == "decode":
            seconds = batch / statistics.median(rates)
            moved = performance.decode_bytes(model, batch, prompt + new // 2)
            share = moved / seconds / performance.copy_rate(context.tiny)
            fields = {
                "detail": {"bytes_per_token": moved, "of_copy": share},
                "note": f"{1e3 * seconds:.2f} ms a token; {share:.0%} of a copy, by weights and cache read once",
            }
        context.add(
            f"{what}: {name}",
            value=statistics.median(rates),
            unit="tokens/s",
            low=min(rates),
            high=max(rates),
            repeats=len(rates),
            **fields,
        )


def run(context: Context) -> None:
    config = steps.configured(MODEL, 1, 1, "none", context.tiny)
    if context.tiny:
        config.model.vocab_size = 257  # the tokenizer's size
    model = architectures.resolve_config(config)
    dtype = jnp.float32 if context.tiny else policy_for("auto", jax.default_backend()).compute_dtype
    params = weights(model, dtype)
    for chunk in (16,) if context.tiny else CHUNKS:
        for batch in (2,) if context.tiny else BATCHES:
            generator = Generator(model, params, ByteTokenizer(), dtype, chunk=chunk)
            act = functools.partial(measure, context, generator, model, batch, chunk)
            context.attempt(f"{MODEL}, batch {batch}, chunks of {chunk}", 2 if context.tiny else 15, act)
