"""GGUF export: contents of the file, and refusal of models that llama.cpp would run differently."""

import dataclasses

import pytest
from gguf_files import write
from gguf_models import FAMILIES, LLAMA, random_params

from jaxllm import architectures
from jaxllm.errors import UserError
from jaxllm.interop.gguf import keys as gguf_keys
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.tokenizer import ByteTokenizer


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gemma2", {"query_scale": 0.3}, "query_scale = 0.3"),
        ("llama", {"embedding_scale": 2.0}, "embedding_scale = 2.0"),
        ("llama", {"logit_softcap": 30.0}, "logit_softcap = 30.0"),
        ("mixtral", {"normalize_routing": False}, "normalize_routing = False"),
        ("gpt2", {"out_bias": False}, "out_bias = False"),
        ("qwen3", {"mlp": "geglu"}, "mlp = 'geglu'"),
        ("olmo2", {"tied_embeddings": True}, "tied_embeddings = True"),
        ("smollm3", {"pattern": ("full", "nope")}, "pattern = ('full', 'nope')"),
        ("gemma2", {"attention_softcap": 0.0}, "both soft caps"),
    ],
)
def test_models_that_llama_cpp_would_run_otherwise_are_not_written(name, change, words, tmp_path):
    _, model = FAMILIES[name]
    model = dataclasses.replace(model, **change)
    with pytest.raises(UserError) as caught:
        write(tmp_path / "m.gguf", model)
    assert words in str(caught.value)
    assert not (tmp_path / "m.gguf").exists()


def test_numbers_that_f16_cannot_hold_are_refused(tmp_path):
    params = random_params(LLAMA)
    params["embed"]["tokens"] = params["embed"]["tokens"].at[3, 4].set(7e4)
    with pytest.raises(UserError, match=r"token_embd.weight has values beyond 65504.*BF16"):
        write(tmp_path / "m.gguf", LLAMA, params, "F16")
    write(tmp_path / "m.gguf", LLAMA, params, "BF16")
    with pytest.raises(UserError, match="'Q4_K' is unsupported; supported values are F32, F16, BF16, Q8_0"):
        write(tmp_path / "m.gguf", LLAMA, params, "Q4_K")


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_every_published_model_has_a_family_that_says_all_of_it(name):
    model = architectures.ARCHITECTURES[name]
    family = gguf_keys.choose_family(model)
    kin = {"smollm2": "llama", "mistral": "llama", "mixtral": "llama", "gpt3": "gpt2", "qwen2.5": "qwen2"}
    start = name.split("-")[0]
    expected = kin.get(start, "llama" if start.startswith("llama") else start)
    if start.startswith("phi"):  # without its factors for long contexts, a Phi is a Llama
        expected = "phi3" if model.rope_scaling == "longrope" else "llama"
    assert family == ("qwen3moe" if model.experts and start == "qwen3" else expected)


def test_bytes_and_a_chat_template_travel_along(tmp_path):
    model = dataclasses.replace(LLAMA, vocab_size=264)
    write(tmp_path / "m.gguf", model, tokenizer=ByteTokenizer(), chat_template="{{ messages }}", name="tiny")
    opened = gguf.open_file(tmp_path / "m.gguf")
    assert opened.text.chat_template == "{{ messages }}"
    text = "naïve\n\t日本 \x00 🔥"
    assert opened.text.tokenizer.encode(text).tolist() == list(text.encode())
    assert opened.text.tokenizer.decode(list(text.encode())) == text
    assert (opened.text.tokenizer.bos_id, opened.text.end_ids, opened.text.tokenizer.vocab_size) == (None, (256,), 264)
    with pytest.raises(UserError, match="the tokenizer has 257 ids and the model's vocab_size is 64"):
        write(tmp_path / "m.gguf", LLAMA, tokenizer=ByteTokenizer())
