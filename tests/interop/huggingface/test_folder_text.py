"""Tokenizer, template and generation files next to a folder's weights: valid ones are used, others are refused."""

import json

import chats
import folders
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.interop import text as texts
from jaxllm.interop.huggingface import model as huggingface

MODEL = folders.FAMILIES["llama"]


@pytest.fixture
def folder(tmp_path):
    texts.save(chats.text(), tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    return tmp_path


def read(folder, vocab_size=300, config=None):
    return texts.load_folder(folder, config or {}, vocab_size)


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config.json": {"chat_template": "S"}}, "S"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "D"),
        ({"tokenizer_config.json": {"chat_template": {"tool_use": "T", "default": "D"}}}, "D"),
        ({"tokenizer_config.json": {"chat_template": NAMED}, "chat_template.jinja": "J"}, "J"),
        ({"chat_template.json": {"chat_template": "X"}}, "X"),
        ({}, None),
    ],
)
def test_chat_templates_of_releases(folder, files, template):
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert read(folder).chat_template == template


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "rag", "template": "R"}]}',
            "the chat templates rag, and",
        ),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is 3, not a string"),
        ("tokenizer_config.json", b'{"add_bos_token": tr', "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json must contain a JSON object"),
        ("special_tokens_map.json", b"{", "special_tokens_map.json is not JSON"),
        ("generation_config.json", b"{", "generation_config.json is not JSON"),
        ("generation_config.json", b'{"eos_token_id": "2"}', "eos_token_id is '2'"),
        ("generation_config.json", b'{"eos_token_id": [2, null]}', "eos_token_id is [2, None]"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja cannot be read as text"),
    ],
)
def test_what_cannot_be_read_is_reported_and_not_left_out(folder, name, content, words):
    (folder / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(folder)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_end_ids_are_those_of_generation_before_those_of_the_model(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 258, 5000]}')
    assert read(folder, config={"eos_token_id": 9}).end_ids == (7, 258)
    (folder / "generation_config.json").unlink()
    assert read(folder, config={"eos_token_id": 9}).end_ids == (9, 258)
    assert read(folder, config={"text_config": {"eos_token_id": [3, 4]}}).end_ids == (3, 4, 258)


def test_numbers_of_64_bits_become_what_a_model_computes_with(tmp_path):
    tree = folders.random_tree(MODEL, np.float64)
    huggingface.export(tmp_path, MODEL, tree, np.dtype("float64"), shard_bytes=1 << 30)
    opened = huggingface.open_folder(tmp_path)
    assert opened.stored == np.float32
    found = np.asarray(opened.load(opened.stored)["final_norm"]["scale"])
    assert np.array_equal(found, tree["final_norm"]["scale"].astype(np.float32))
