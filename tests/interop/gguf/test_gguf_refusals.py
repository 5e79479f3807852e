"""GGUF files that cannot be used: a one-line error before any tensor is read."""

import contextlib
import struct

import numpy as np
import pytest
from gguf_files import rewritten, write_plain

from jaxllm.errors import UserError
from jaxllm.interop.gguf import model as gguf


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.block_count": "two"}, "not of type int"),
        ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv, which jaxllm does not support"),
        ({"llama.attention.value_length": 4}, "value_length is 4; it must be 8"),
        ({"llama.vocab_size": 63}, "vocab_size is 63; it must be 64"),
        ({"llama.attention.causal": False}, "attention.causal is False"),
        ({"llama.rope.scaling.type": "dynamic"}, "rope.scaling.type is 'dynamic'"),
        ({"llama.expert_gating_func": 2}, "expert_gating_func is 2"),
        ({"llama.attention.sliding_window": 4, "llama.attention.sliding_window_pattern": [True]}, "has 1 layers of 2"),
        ({"split.count": "two"}, "split.count is 'two', not of type int"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
    ],
)
def test_keys_that_cannot_be_used_stop_the_import(keys, words, tmp_path):
    path = rewritten(write_plain(tmp_path), tmp_path / "m.gguf", keys)
    with pytest.raises(UserError) as caught:
        gguf.open_file(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_family_is_named(tmp_path):
    path = rewritten(write_plain(tmp_path), tmp_path / "m.gguf", arch="mamba")
    with pytest.raises(UserError, match="is 'mamba', which is unsupported; supported values are llama, qwen2"):
        gguf.open_file(path)


def test_all_missing_and_unexpected_tensors_are_listed(tmp_path):
    tensors = {
        "blk.0.attn_k.weight": None,
        "blk.1.ffn_norm.weight": None,
        "blk.0.attn_q_norm.weight": np.ones(8, np.float32),
        "blk.2.ffn_up.weight": np.ones((2, 2), np.float32),
    }
    path = rewritten(write_plain(tmp_path), tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(UserError) as caught:
        gguf.open_file(path)
    for name in tensors:
        assert name in str(caught.value)


def test_a_tensor_of_another_shape_is_reported_before_any_is_read(tmp_path):
    tensors = {"blk.0.attn_k.weight": np.ones((17, 32), np.float32)}
    path = rewritten(write_plain(tmp_path), tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(UserError, match=r"blk.0.attn_k.weight \[17, 32\]"):
        gguf.open_file(path)


def test_damaged_files_are_reported_before_anything_is_read(tmp_path):
    whole = write_plain(tmp_path).read_bytes()
    path = tmp_path / "m.gguf"
    cases = {"is not a GGUF file": b"GGML" + whole[4:], "GGUF big-endian": whole[:4] + struct.pack(">I", 3) + whole[8:]}
    cases |= {"is truncated or occurs twice": whole[:-64], "is truncated or damaged": whole[:300], "not a GGUF": b""}
    cases["GGUF version 1"] = whole[:4] + struct.pack("<I", 1) + whole[8:]
    for words, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            gguf.open_file(path)
        assert words in str(caught.value)
    for at in range(24, 2000, 37):  # a corrupted header byte results in a one-line error or a model, nothing else
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(UserError):
            gguf.open_file(path)
    with pytest.raises(UserError, match="no such file"):
        gguf.open_file(tmp_path / "nowhere.gguf")
