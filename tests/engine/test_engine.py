"""Text generation: stop strings, finish reasons, limits and user errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from jaxllm.decode.generate import DECODE_STEPS
from jaxllm.decode.sampling import SamplingOptions
from jaxllm.engine.generator import Generator
from jaxllm.engine.request import SampleRequest
from jaxllm.engine.stop_strings import StopStream
from jaxllm.errors import UserError
from jaxllm.interop.tokenizer import ByteTokenizer
from jaxllm.model import specs

# The model has more ids than the tokenizer, as with a vocabulary padded for speed.
MODEL = dataclasses.replace(models.ROTARY, vocab_size=260)
PROMPTS = ["The cat", "def f(x):\n    return"]
GREEDY = SampleRequest(max_new_tokens=24, sampling=SamplingOptions(temperature=0.0))
WARM = SampleRequest(max_new_tokens=24, sampling=SamplingOptions(temperature=1.0, seed=3))


def params_of(model):
    return specs.initialize(specs.param_specs(model), jax.random.key(0), jnp.float32)


@functools.cache
def generator(**kwargs):
    params = params_of(MODEL)
    return Generator(MODEL, params, ByteTokenizer(), jnp.float32, **{"chunk": 8, "steps": 4} | kwargs)


def ascii_script(monkeypatch, made, text, then=()):
    """Makes a generator that always produces `text`, whatever the model computes; programs are compiled with it."""
    ids = jnp.array([*text.encode(), *then], jnp.int32)

    def choose(logits, seen, sampling, positions):
        return ids[(positions - 1) % ids.shape[0]]  # prompts have one token, so this draws for position 1

    monkeypatch.setattr("jaxllm.decode.generate.sampling_lib.next_tokens", choose)
    monkeypatch.setattr(made, "_compiled", {})


@pytest.mark.parametrize("request_", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_prompts_together_alone_and_without_a_cache(request_):
    results, times = generator().generate(PROMPTS, request_)
    assert [result.prompt for result in results] == PROMPTS
    assert all(0 < len(r.tokens) <= 24 and max(r.tokens) < 257 for r in results)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert generator().generate([prompt], request_)[0] == [result]
    assert generator(use_cache=False).generate(PROMPTS, request_)[0] == results
    assert times.prompt_tokens == sum(len(prompt) for prompt in PROMPTS)
    assert times.new_tokens == sum(len(result.tokens) for result in results)


def test_a_seed_for_each_prompt():
    """Rows of a batch equal each prompt run alone with its seed, next to unseeded and differently seeded rows."""
    prompts, seeds = ["The cat", "The cat", "x"], (3, 4, 3)
    results, _ = generator().generate(prompts, dataclasses.replace(WARM, seeds=seeds))
    assert results[0].tokens != results[1].tokens
    for prompt, seed, result in zip(prompts, seeds, results, strict=True):
        alone = dataclasses.replace(WARM, sampling=dataclasses.replace(WARM.sampling, seed=seed))
        assert generator().generate([prompt], alone)[0] == [result]
    with pytest.raises(UserError, match="--seed is given 2 times for 3 prompts"):
        generator().generate(prompts, dataclasses.replace(WARM, seeds=(1, 2)))
    with pytest.raises(UserError, match="--seed is -1"):
        generator().generate(prompts, dataclasses.replace(WARM, seeds=(1, 2, -1)))


def test_nothing_compiles_twice():
    generator().generate(PROMPTS, GREEDY)
    programs = dict(generator()._compiled)
    _, times = generator().generate(["x" * 100, "y"], WARM)  # 13 chunks; the others took 3
    assert generator()._compiled == programs
    assert times.compile < 1.0
    assert times.tokens_per_second > 0


def test_streamed_text_is_the_text():
    pieces = {0: "", 1: ""}
    calls = []

    def on_text(index, text):
        assert text
        pieces[index] += text
        calls.append(index)

    results, _ = generator().generate(PROMPTS, WARM, on_text)
    assert [pieces[0], pieces[1]] == [result.text for result in results]
    assert len(calls) > 2
    ends = [result.tokens[:-1] if result.reason == "end" else result.tokens for result in results]
    assert [result.text for result in results] == [ByteTokenizer().decode(ids) for ids in ends]


def test_stop_strings_end_tokens_and_limits(monkeypatch):
    made = generator()
    ascii_script(monkeypatch, made, "one two STOP three é", then=(256, 120))
    streamed = []

    def ask(**kwargs):
        streamed.clear()
        request = dataclasses.replace(GREEDY, **kwargs)
        [result], _ = made.generate(["."], request, lambda _, text: streamed.append(text))
        assert "".join(streamed) == result.text
        return result.text, result.reason, len(result.tokens)

    assert ask(stop=("STOP",)) == ("one two ", "stop", 12)  # spans several tokens and two device loops
    assert ask(stop=("zzz", "two", "o STOP")) == ("one ", "stop", 7)
    assert ask(stop=("threx",)) == ("one two STOP three é", "end", 22)  # begins but never completes; é is two ids
    assert ask(max_new_tokens=5) == ("one t", "length", 5)
    assert ask(max_new_tokens=20, stop=("three é",)) == ("one two STOP three \N{REPLACEMENT CHARACTER}", "length", 20)
    assert ask(ignore_eos=True) == ("one two STOP three éxo", "length", 24)
    assert ask(max_new_tokens=22) == ("one two STOP three é", "end", 22)
    assert ask(stop=("STOP",))[1] == "stop"
    assert not any("S" in text for text in streamed), "a part of a stop string was streamed"


def test_a_full_cache_is_a_length_and_a_long_prompt_an_error():
    [result], _ = generator().generate(["x" * 120], dataclasses.replace(WARM, max_new_tokens=2**40, ignore_eos=True))
    assert (len(result.tokens), result.reason) == (8, "length")
    with pytest.raises(UserError, match="128 tokens, but the model's context_length is 128; shorten it to 127"):
        generator().generate(["x" * 128], GREEDY)
    with pytest.raises(UserError, match=r"65 tokens, .* 128 \(the cache has space for 64\); shorten it to 63"):
        generator(capacity=64).generate(["x" * 65], GREEDY)
    assert generator().generate(["x"], GREEDY)[0][0].tokens  # generation continues after the error


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"max_new_tokens": 0}, "--max_new_tokens"),
        ({"stop": ("a", "")}, "--stop"),
        ({"sampling": SamplingOptions(temperature=-1.0)}, "--temperature"),
    ],
)
def test_errors_name_their_flag(change, flag):
    with pytest.raises(UserError, match=flag):
        generator().generate(PROMPTS, dataclasses.replace(GREEDY, **change))


def test_errors_of_prompts_and_tokenizers():
    with pytest.raises(UserError, match="--prompt is empty"):
        generator().generate(["fine", ""], GREEDY)
    with pytest.raises(UserError, match="257 ids, but the model's vocab_size is 64"):
        Generator(models.ROTARY, {}, ByteTokenizer(), jnp.float32)


def test_capacity_is_a_power_of_two_within_the_context():
    long = dataclasses.replace(MODEL, context_length=1000)
    made = Generator(long, params_of(long), ByteTokenizer(), jnp.float32)
    assert [made.capacity_for(n, 10) for n in (1, 118, 119, 500, 999)] == [128, 128, 256, 512, 1000]


def test_a_begin_token_stands_before_the_prompt():
    class Begins(ByteTokenizer):
        bos_id = 256

    made = Generator(MODEL, params_of(MODEL), Begins(), jnp.float32)
    np.testing.assert_array_equal(made.encode("a"), [256, 97])
    np.testing.assert_array_equal(made.encode(""), [256])


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("stops", "text", "want"),
    [
        ((), "abc", "abc"),
        (("b",), "abc", "a"),
        (("abd", "bc"), "abc", "a"),
        (("abc", "b"), "xabc", "xa"),  # the one that ends first
        (("bc", "abc"), "xabc", "x"),  # the longer of two that end together
        (("aab",), "aaaab", "aa"),
        (("abx",), "abab", "abab"),
        (("\n\n",), "a\nb\n\nc", "a\nb"),
    ],
)
def test_stop_strings_however_the_text_is_cut(stops, text, want, size):
    stream = StopStream(stops)
    pieces = [stream.push(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join(pieces) + stream.finish() == want
    assert stream.stopped == (want != text)


def test_a_stream_that_held_nothing_back_would_be_caught(monkeypatch):
    monkeypatch.setattr(StopStream, "_partial_match", lambda self: 0)
    with pytest.raises(AssertionError):
        test_stop_strings_however_the_text_is_cut(("bc",), "abc", "a", 1)


def test_steps_between_looks_change_no_text():
    assert DECODE_STEPS != 4
    results, _ = generator(steps=DECODE_STEPS).generate(PROMPTS, WARM)
    assert results == generator().generate(PROMPTS, WARM)[0]
