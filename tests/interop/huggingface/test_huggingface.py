"""Hugging Face folders: reading and writing, with every tensor accounted for, and the files next to the weights."""

import json

import folders
import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from huggingface_hub import errors

from jaxllm.errors import UserError
from jaxllm.interop import opening
from jaxllm.interop import text as texts
from jaxllm.interop.huggingface import config_file, safetensors_files
from jaxllm.interop.huggingface.safetensors_files import INDEX, SINGLE_FILE, open_tensors
from jaxllm.interop.opening import open_model

FAMILY = "llama"
MODEL = folders.FAMILIES[FAMILY]


def equal(a, b):
    def bits(x):
        return np.asarray(x).view(f"u{x.dtype.itemsize}")

    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(bits(x), bits(y)), a, b))


def rewrite(folder, change):
    """Applies `change` to the tensors of a folder."""
    files = open_tensors(folder)
    tensors = {name: np.array(files.read(name)) for name in files.entries}
    dtype = files.dtype()
    change(tensors)
    (folder / SINGLE_FILE).unlink()
    shapes = {name: x.shape for name, x in tensors.items()}
    safetensors_files.write_checkpoint(folder, shapes, dtype, tensors.items(), 1 << 40)


@pytest.mark.parametrize("family", sorted(folders.FAMILIES))
@pytest.mark.parametrize("shard_bytes", [5000, 1 << 40])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_folder_and_back(tmp_path, family, shard_bytes, dtype):
    model = folders.FAMILIES[family]
    tree = folders.random_tree(model, dtype)
    folder = folders.write(tmp_path / "m", model, tree, family, shard_bytes)
    assert (folder / INDEX).is_file() == (shard_bytes == 5000)
    opened = open_model(str(folder))
    assert (opened.family, opened.stored, opened.text.end_ids) == (family, dtype, (1, 2))
    assert config_file.canonical(opened.model) == config_file.canonical(model)
    found = opened.load(dtype)
    if opened.model.pattern == model.pattern:
        assert equal(found, tree)
    again = folders.write(tmp_path / "again", opened.model, found, family, shard_bytes)
    for file in sorted(path.name for path in folder.iterdir()):
        assert (folder / file).read_bytes() == (again / file).read_bytes(), file


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_detour_through_another_dtype_would_show(tmp_path, dtype):
    """A conversion through bfloat16 or a flipped bit would be detected by the previous test."""
    tree = folders.random_tree(MODEL, dtype)
    found = open_model(str(folders.write(tmp_path / "m", MODEL, tree, FAMILY, 5000))).load(dtype)
    assert equal(found, tree)
    assert not equal(jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(dtype), found), tree)
    path = next((tmp_path / "m").glob("model-00002-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not equal(open_model(str(tmp_path / "m")).load(dtype), tree)


def test_names_of_base_models_and_of_old_releases(tmp_path):
    """Reads names without the prefix of the base model, and ignores the constants that old releases stored."""
    model = folders.FAMILIES["gpt2"]
    tree = folders.random_tree(model, np.float32)
    folder = folders.write(tmp_path / "m", model, tree, "gpt2")

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(model.layers):
            tensors[f"h.{layer}.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
            tensors[f"h.{layer}.attn.masked_bias"] = np.full((), -1e4, np.float32)

    rewrite(folder, change)
    assert equal(open_model(str(folder)).load(np.float32), tree)
    rewrite(folder, lambda tensors: tensors.update({"h.0.attn.rotary": np.ones(2, np.float32)}))
    with pytest.raises(UserError, match=r"1 unexpected: h\.0\.attn\.rotary"):
        open_model(str(folder))


@pytest.mark.parametrize("prefixes", [("language_model.", ""), ("model.language_model.", "model.")])
def test_the_language_model_in_a_model_of_images(tmp_path, prefixes):
    """Reads the language model of a vision-language folder, with tensor names before and after transformers 4.52."""
    model = folders.FAMILIES["gemma3_text"]
    tree = folders.random_tree(model)
    folder = folders.write(tmp_path / "m", model, tree, "gemma3_text")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 5]})
    )
    (folder / "generation_config.json").unlink()

    def change(tensors):
        for name in list(tensors):
            tensors[prefixes[0] + (name.removeprefix("model.") if prefixes[1] else name)] = tensors.pop(name)
        tensors[f"{prefixes[1]}vision_tower.x.weight"] = np.ones(3, ml_dtypes.bfloat16)
        tensors[f"{prefixes[1]}multi_modal_projector.y"] = np.ones(3, ml_dtypes.bfloat16)

    rewrite(folder, change)
    opened = open_model(str(folder))
    assert equal(opened.load(ml_dtypes.bfloat16), tree)
    assert opened.text.end_ids == (1, 5)
    (folder / "config.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match="2 unexpected"):  # vision tensors in a text-only model
        open_model(str(folder))


def tied_case(tmp_path, tied, head):
    """Returns a folder whose output head is present, absent, or different (CASES E7)."""
    model = folders.FAMILIES["qwen3"]
    folder = folders.write(tmp_path / "m", model, folders.random_tree(model), "qwen3")
    assert model.tied_embeddings
    folders.change_config(folder, tie_word_embeddings=tied)
    if head != "absent":
        embedding = "model.embed_tokens.weight"
        wrong = np.zeros((), ml_dtypes.bfloat16) if head == "same" else np.ones((), ml_dtypes.bfloat16)
        rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding] + wrong}))
    return folder


@pytest.mark.parametrize(("tied", "head"), [(True, "absent"), (True, "same"), (False, "same"), (False, "different")])
def test_heads_that_are_as_the_flag_says(tmp_path, tied, head):
    opened = open_model(str(tied_case(tmp_path, tied, head)))
    tree = opened.load(ml_dtypes.bfloat16)
    assert ("head" in tree) == (not tied)
    if not tied:
        assert equal(tree["head"], tree["embed"]["tokens"]) == (head == "same")


@pytest.mark.parametrize(
    ("tied", "head", "words"),
    [
        (True, "different", "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight"),
        (False, "absent", "1 missing: lm_head.weight"),
    ],
)
def test_heads_that_contradict_the_flag(tmp_path, tied, head, words):
    with pytest.raises(UserError) as caught:
        open_model(str(tied_case(tmp_path, tied, head)))
    assert words in str(caught.value)


def test_norms_with_nowhere_to_go_and_norms_that_are_gone(tmp_path):
    folder = folders.write(tmp_path / "m", MODEL, folders.random_tree(MODEL), FAMILY)
    extra = {f"model.layers.{i}.self_attn.q_norm.weight": np.ones(10, ml_dtypes.bfloat16) for i in range(2)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.input_layernorm.weight"))
    with pytest.raises(UserError) as caught:
        open_model(str(folder))
    assert "1 missing: model.layers.1.input_layernorm.weight" in str(caught.value)
    assert "2 unexpected: model.layers.0.self_attn.q_norm.weight, model.layers.1" in str(caught.value)


def test_a_shape_that_the_configuration_does_not_make(tmp_path):
    folder = folders.write(tmp_path / "m", MODEL, folders.random_tree(MODEL), FAMILY)
    folders.change_config(folder, head_dim=8)
    with pytest.raises(UserError, match=r"k_proj\.weight \[20, 32\] cannot be loaded into attn\.k \[32, 2, 8\]"):
        open_model(str(folder))


def with_tokenizer(folder, **settings):
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<end>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_what_a_folder_says_of_text(tmp_path):
    folder = folders.write(tmp_path / "m", MODEL, folders.random_tree(MODEL), FAMILY)
    with_tokenizer(
        folder, bos_token="<s>", eos_token={"content": "<end>"}, add_bos_token=True, chat_template="{{ messages }}"
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 99]}))
    opened = open_model(str(folder))
    assert opened.text.tokenizer.bos_id == 2
    assert opened.text.special == {"bos_token": "<s>", "eos_token": "<end>"}
    assert opened.text.chat_template == "{{ messages }}"
    assert opened.text.end_ids == (3, 4), "those of generation that are in the vocabulary, then the end of a turn"
    assert [path.name for path in opened.tokenizer_files] == ["tokenizer.json", "tokenizer_config.json"]
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    with_tokenizer(folder, bos_token="<s>", chat_template=[{"name": "default", "template": "x"}])
    (folder / "generation_config.json").unlink()
    folders.change_config(folder, eos_token_id=3)
    opened = open_model(str(folder))
    assert opened.text.tokenizer.bos_id is None
    assert (opened.text.chat_template, opened.text.end_ids) == ("{{ 1 }}", (3,))
    (folder / "chat_template.jinja").unlink()
    assert open_model(str(folder)).text.chat_template == "x"


def test_tokens_without_text_beyond_the_vocabulary_do_not_matter(tmp_path):
    folder = folders.write(tmp_path / "m", MODEL, folders.random_tree(MODEL), FAMILY)
    with_tokenizer(folder)
    assert texts.load_folder(folder, {}, 4).tokenizer.vocab_size == 4
    assert texts.load_folder(folder, {}, 1).tokenizer.vocab_size == 5, "b is text"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("{tmp}", "is neither the workdir of a training run"),
        ("{tmp}/file.txt", "is not a .gguf file"),
        ("{tmp}/nowhere.gguf", "not found"),
        ("no such thing", "not found"),
    ],
)
def test_what_is_no_model(tmp_path, spec, words):
    (tmp_path / "file.txt").touch()
    with pytest.raises(UserError) as caught:
        open_model(spec.format(tmp=tmp_path))
    assert words in str(caught.value)


def test_without_a_network_one_line_reports_it(monkeypatch):
    def fails(name, allow_patterns):
        raise errors.LocalEntryNotFoundError("Got: ConnectError: no name service\nmore")

    monkeypatch.setattr(opening.huggingface_hub, "snapshot_download", fails)
    with pytest.raises(UserError) as caught:
        open_model("org/name")
    message = str(caught.value)
    assert message.startswith("org/name is not a local folder, and the Hugging Face hub cannot be reached")
    assert "give a local folder" in message
    assert "\n" not in message


def test_the_hub_is_asked_for_what_is_needed(tmp_path, monkeypatch):
    """The configuration is downloaded first, so weights of an unsupported model are not downloaded."""
    folder = folders.write(tmp_path / "m", MODEL, folders.random_tree(MODEL), FAMILY)
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(opening.huggingface_hub, "snapshot_download", download)
    opened = opening.open_model("org/name")
    assert opened.source == "org/name"
    assert [any("safetensors" in p and "index" not in p for p in patterns) for _, patterns in asked] == [False, True]
    folders.change_config(folder, model_type="mamba")
    asked.clear()
    with pytest.raises(UserError, match=r"org/name: config\.json: model_type is 'mamba'"):
        opening.open_model("org/name")
    assert len(asked) == 1
