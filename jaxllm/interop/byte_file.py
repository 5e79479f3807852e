"""The byte tokenizer as a tokenizer.json: byte-level BPE that has no pairs to join."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxllm.interop.byte_runs import byte_alphabet
from jaxllm.interop.tokenizer import ByteTokenizer, JsonTokenizer

_END = "<|endoftext|>"


def as_json() -> JsonTokenizer:
    """A tokenizer of the same ids as `ByteTokenizer`; its end of a document has a name."""
    made = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    # How it splits changes nothing where nothing is joined; as GPT-2 does, so that other formats have a name for it.
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([_END])
    assert made.token_to_id(_END) == ByteTokenizer.end_ids[0]
    return JsonTokenizer(made.to_str(), "the byte tokenizer", ByteTokenizer.end_ids)
