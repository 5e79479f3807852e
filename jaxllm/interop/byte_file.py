"""Byte tokenizer as a tokenizer.json: byte-level BPE without merges."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxllm.interop.byte_runs import byte_alphabet
from jaxllm.interop.tokenizer import ByteTokenizer, JsonTokenizer

_END = "<|endoftext|>"


def as_json() -> JsonTokenizer:
    """Returns a tokenizer with the ids of `ByteTokenizer` and a named end-of-document token."""
    made = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    # Without merges the pre-tokenizer has no effect; GPT-2's is used because other formats have a name for it.
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([_END])
    assert made.token_to_id(_END) == ByteTokenizer.end_ids[0]
    return JsonTokenizer(made.to_str(), "the byte tokenizer", ByteTokenizer.end_ids)
