"""GGUF files compared with llama.cpp: every family that jaxllm writes, and a released model that it reads.

llama.cpp's cache uses float32. For SmolLM2 see also `experiments/smollm2_vs_llamacpp.py`, which has the figures.
"""

import dataclasses
import os
import sys

import gguf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from jaxllm.errors import UserError
from jaxllm.interop.gguf import metadata
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.text import Text
from jaxllm.interop.tokenizer import ByteTokenizer
from jaxllm.model import layers

sys.path.insert(0, str(runs.ROOT / "experiments"))

import llamacpp
import smollm2_vs_llamacpp as comparison

pytest.importorskip("cyllama")

TOLERANCE = 1e-4  # relative to the largest logit
PROMPT = np.array([(7 * i * i + 3 * i) % 250 for i in range(600)], np.int32)
# llama.cpp ignores the window of these models, so results agree only up to the window's length.
WINDOWLESS = {"mistral": 6}


def of_llama_cpp(path, ids, context=1024):
    theirs = llamacpp.LlamaCpp(path, context)
    try:
        return theirs.logits(ids)
    finally:
        theirs.close()


def differences(model, params, path, ids, context=1024):
    """Returns the largest logit difference of each token, relative to the largest logit of all."""
    opened = dataclasses.replace(gguf.open_file(path), model=model)
    ours = comparison.our_logits(opened, params, ids)
    return np.abs(ours - of_llama_cpp(path, ids, context)).max(-1) / np.abs(ours).max()


def difference(*arguments):
    return differences(*arguments).max()


def in_a_table(gate, kind):
    """Computes GELU as ggml does on a CPU: a lookup table with a 16-bit argument and a 16-bit result."""
    if kind == "swiglu":
        return jax.nn.silu(gate)
    looked_up = jax.nn.gelu(gate.astype(jnp.float16).astype(jnp.float32), approximate=True).astype(jnp.float16)
    return jnp.where(gate <= -10, 0, jnp.where(gate >= 10, gate, looked_up.astype(jnp.float32)))


def assert_same(name, found):
    """Asserts that every token is within the tolerance.

    In Gemma 3's six layers a hidden unit of a GELU sometimes falls on the other side of a 16-bit step of ggml's table:
    single tokens are off by up to 1.5e-4, the others by 3e-6.
    """
    if name == "gemma3":
        assert np.median(found) < TOLERANCE / 5
    assert found.max() < (5 if name == "gemma3" else 1) * TOLERANCE


def sized(name):
    """Returns a model whose vocabulary includes the bytes and whose context fits a long prompt."""
    model = dataclasses.replace(gguf_models.FAMILIES[name][1], vocab_size=264)
    if name == "gemma3":  # llama.cpp b9190 does not read the layer pattern of these: every sixth layer is full
        model = dataclasses.replace(model, pattern=("sliding",) * 5 + ("full",), layers=6)
    if model.rope_scaling == "longrope":
        model = dataclasses.replace(model, rope_original_context=512, rope_factor=4.0, context_length=2048)
    return model if model.context_length > 1024 else dataclasses.replace(model, context_length=1024)


@pytest.mark.parametrize("name", gguf_models.FAMILIES)
def test_llama_cpp_computes_what_we_do(name, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "activation", in_a_table)
    model = sized(name)
    params = gguf_models.random_params(model, scale=0.3)
    path = tmp_path / "m.gguf"
    gguf.write(path, model, params, Text(ByteTokenizer()), quantization="F32")
    ids = PROMPT[: WINDOWLESS.get(name, 48)]
    # llama.cpp selects Phi-3's long or short factors by the requested context length.
    assert_same(name, differences(model, params, path, ids, 512 if name == "phi3" else 1024))


@pytest.mark.parametrize("name", ["phi3", "llama 3.2", "gemma3", "yarn"])
def test_long_prompts_past_every_threshold(name, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "activation", in_a_table)
    model = sized(name)
    params = gguf_models.random_params(model, scale=0.3)
    path = tmp_path / "m.gguf"
    gguf.write(path, model, params, Text(ByteTokenizer()), quantization="F32")
    ids = PROMPT[:100] if name == "gemma3" else PROMPT  # Gemma's only threshold is its window
    assert_same(name, differences(model, params, path, ids, 1024))


def test_a_wrong_file_is_seen(tmp_path, monkeypatch):
    model = sized("llama")
    params = gguf_models.random_params(model, scale=0.3)
    path = tmp_path / "m.gguf"
    monkeypatch.setattr(metadata, "_PERMUTED", ())
    gguf.write(path, model, params, Text(ByteTokenizer()), quantization="F32")
    assert difference(model, params, path, PROMPT[:48]) > 100 * TOLERANCE
    monkeypatch.undo()
    gguf.write(path, model, params, Text(ByteTokenizer()), quantization="F32")
    wrong = dataclasses.replace(model, rope_theta=model.rope_theta * 1.5)
    assert difference(wrong, params, path, PROMPT[:48]) > 100 * TOLERANCE


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0"])
def test_llama_cpp_loads_what_is_rounded(quantization, tmp_path):
    """llama.cpp also rounds activations, so the comparison with jaxllm's logits of rounded weights is looser."""
    model = dataclasses.replace(sized("llama"), width=64, heads=4, head_dim=16, mlp_width=64)
    path = tmp_path / "m.gguf"
    gguf.write(
        path, model, gguf_models.random_params(model, scale=0.3), Text(ByteTokenizer()), quantization=quantization
    )
    params = gguf.open_file(path).load(jnp.float32)
    assert difference(model, params, path, PROMPT[:48]) < 0.05


def test_llama_cpp_reads_bytes_as_bytes(tmp_path):
    """The byte tokenizer gives equal ids in llama.cpp, as it is and as a tokenizer.json."""
    model, text = sized("llama"), "alpha, é\n\t 日本 🔥 <|endoftext|>  x"
    params = gguf_models.random_params(model)
    for tokenizer in (ByteTokenizer(), ByteTokenizer().as_json_tokenizer()):
        path = tmp_path / f"{type(tokenizer).__name__}.gguf"
        gguf.write(path, model, params, Text(tokenizer), quantization="F16")
        theirs = llamacpp.LlamaCpp(path, 64)
        try:
            assert theirs.ids(text, False) == list(text.encode())
            marked = text.encode().replace(b"<|endoftext|>", b"\xff")
            assert theirs.ids(text, True) == [256 if byte == 0xFF else byte for byte in marked]
        finally:
            theirs.close()


def test_a_crash_of_llama_cpp_is_one_line(tmp_path):
    path = tmp_path / "m.gguf"
    model = sized("llama")
    gguf.write(path, model, gguf_models.random_params(model), Text(ByteTokenizer()), quantization="F32")
    theirs = llamacpp.LlamaCpp(path, 64)
    with pytest.raises(UserError, match=r"llama\.cpp crashed in abort of .*m\.gguf"):
        theirs._call(os.abort)
    theirs.close()


@pytest.fixture(scope="module")
def smollm2():
    try:
        return comparison.fetch()
    except UserError as error:
        pytest.skip(str(error))


def test_ids_equal_those_of_llama_cpp(smollm2):
    opened, theirs = gguf.open_file(smollm2), llamacpp.LlamaCpp(smollm2, 512)
    text = comparison.HELD_OUT.read_text("utf-8")
    for sample in (comparison.MIXED, text, "", " ", "\n\n", "1 22 333 4444", "<|im_start|>user\nHi<|im_end|>"):
        for special in (False, True):
            assert opened.text.tokenizer.encode(sample, special).tolist() == theirs.ids(sample, special), sample
    theirs.close()


@pytest.mark.slow
def test_smollm2_says_what_llama_cpp_says(smollm2, tmp_path):
    opened = gguf.open_file(smollm2)
    params = opened.load(jnp.float32)
    path = tmp_path / "f32.gguf"
    gguf.write(path, opened.model, params, opened.text, quantization="F32")
    ids = opened.text.tokenizer.encode(comparison.MIXED + comparison.HELD_OUT.read_text("utf-8")[:600])
    ours, theirs = comparison.our_logits(opened, params, ids), of_llama_cpp(path, ids)
    assert np.abs(ours - theirs).max() < TOLERANCE * np.abs(ours).max()
    assert comparison.perplexity(ours, ids) == pytest.approx(comparison.perplexity(theirs, ids), rel=1e-4)
    assert "2" in comparison.answer(opened, params, comparison.QUESTION)
