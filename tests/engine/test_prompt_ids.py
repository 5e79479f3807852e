"""Prompts with token ids beyond the model's vocabulary are refused."""

import dataclasses

import models
import numpy as np
import pytest

from jaxllm.engine import generator
from jaxllm.errors import UserError
from jaxllm.interop.tokenizer import ByteTokenizer

MODEL = dataclasses.replace(models.ROTARY, vocab_size=257)


class _Marked(ByteTokenizer):
    """Byte tokenizer with one more special token beyond a model of 257 ids, like the image tokens of some releases."""

    def encode(self, text, special=False):
        del special
        return np.array([300 if char == "¤" else ord(char) for char in text], np.int32)


def test_a_special_token_that_the_model_does_not_have_is_one_line():
    assert generator.encode("ab", _Marked(), MODEL).tolist() == [97, 98]
    with pytest.raises(UserError, match=r"special token of id 300, but the model's vocab_size is 257") as caught:
        generator.encode("a¤b", _Marked(), MODEL)
    assert "\n" not in str(caught.value)
    assert generator.encode("¤", _Marked(), dataclasses.replace(MODEL, vocab_size=301)).tolist() == [300]


def test_a_begin_token_that_the_model_does_not_have_is_one_line():
    tokenizer = _Marked()
    tokenizer.bos_id = 257
    with pytest.raises(UserError, match=r"id 257, but the model's vocab_size is 257"):
        generator.encode("ab", tokenizer, MODEL)
