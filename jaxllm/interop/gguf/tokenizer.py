"""Reads the tokenizer of a GGUF file by converting it to a tokenizer.json for the `tokenizers` library.

Source: llama.cpp's src/llama-vocab.cpp, for the meaning of each key and its default.
"""

import json
from collections.abc import Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.interop.gguf.file import Metadata
from jaxllm.interop.gguf.splitting import BY_NAME
from jaxllm.interop.tokenizer import JsonTokenizer

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Keys that affect neither encoding nor decoding.
_IGNORED_KEYS = (
    *("unknown_token_id", "padding_token_id", "seperator_token_id", "mask_token_id", "cls_token_id"),
    "token_type_count",
    *(f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
    *("prefix_token_id", "suffix_token_id", "middle_token_id"),
    *("add_eos_token", "add_sep_token"),  # apply to complete texts; here a text is a prompt to continue
)


def read_tokenizer(metadata: Metadata) -> JsonTokenizer:
    """Reads the tokenizer of a file.

    Raises:
      UserError: the type of tokenizer, its pre-tokenizer or a key is not supported, or the data is damaged.
    """
    where = metadata.where
    kind = metadata.require("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise UserError(
            f"{where}: tokenizer.ggml.model is {kind!r}, which is unsupported; supported values are gpt2 (byte-level "
            "BPE) and llama (SentencePiece BPE)"
        )
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens", list)
    types: list[int] = metadata.get("tokenizer.ggml.token_type", list) or [NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError(
            f"{where} has {len(types)} token types for {len(tokens)} tokens, or one twice; download it again"
        )
    parts = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    begin = _special_id(metadata, "bos", len(tokens), 1 if kind == "llama" else None)
    adds_begin = metadata.get("tokenizer.ggml.add_bos_token", bool)
    if adds_begin is None:
        adds_begin = kind == "llama" or BY_NAME[_pre_tokenizer_name(metadata)].begins
    if adds_begin and begin is None:
        raise UserError(f"{where} adds a begin token but has no tokenizer.ggml.bos_token_id; convert the model again")
    ends = [_special_id(metadata, "eos", len(tokens), 2 if kind == "llama" else None)]
    ends += [_special_id(metadata, name, len(tokens), None) for name in ("eot", "eom")]
    metadata.raw("tokenizer.ggml.pre")
    for key in _IGNORED_KEYS:
        metadata.raw(f"tokenizer.ggml.{key}")
    unknown = metadata.unread("tokenizer.ggml.")
    if unknown:
        keys = ", ".join(unknown)
        raise UserError(f"{where} has {keys}, which jaxllm does not support; ids might be wrong: use another file")
    content = parts | {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, types),
        "post_processor": _bos_post_processor(tokens[begin], begin) if adds_begin and begin is not None else None,
    }
    return JsonTokenizer(json.dumps(content), where, [end for end in ends if end is not None])


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Returns the special tokens that a chat template may use, by name: {"bos_token": "<s>", …}."""
    tokens = metadata.require("tokenizer.ggml.tokens", list)
    kinds = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {name: _special_id(metadata, kind, len(tokens), None) for kind, name in kinds.items()}
    return {name: tokens[i] for name, i in found.items() if i is not None}


def _pre_tokenizer_name(metadata: Metadata) -> str:
    """Returns the name of the pre-tokenizer.

    Raises:
      UserError: the name is missing or unknown.
    """
    name = metadata.get("tokenizer.ggml.pre", str)
    if name not in BY_NAME:
        problem = f"the unsupported tokenizer.ggml.pre {name!r}" if name else "no tokenizer.ggml.pre"
        fix = f"supported values are {', '.join(BY_NAME)}" if name else "convert the model with a current llama.cpp"
        raise UserError(f"{metadata.where} has {problem}: words would be split wrongly; {fix}")
    return name


def _byte_level(metadata: Metadata, tokens: Sequence[str]) -> dict[str, Any]:
    splitting = BY_NAME[_pre_tokenizer_name(metadata)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # The space that separates the two parts of a merge is never its first character.
    pairs = [
        (m[:at], m[at + 1 :]) for m in metadata.require("tokenizer.ggml.merges", list) if (at := m.find(" ", 1)) > 0
    ]
    merges = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary and "".join(pair) in vocabulary]
    metadata.raw("tokenizer.ggml.add_space_prefix")  # for SentencePiece only
    metadata.raw("tokenizer.ggml.scores")
    return {
        "normalizer": None,
        "pre_tokenizer": splitting.to_json(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": splitting.whole_words, "vocab": vocabulary, "merges": merges},
    }


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    scores = metadata.require("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise UserError(f"{metadata.where} has {len(scores)} scores for {len(tokens)} tokens; download it again")
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", bool):
        raise UserError(f"{metadata.where}: tokenizer.ggml.remove_extra_whitespaces is unsupported; use another file")
    unknown = _special_id(metadata, "unknown", len(tokens), 0)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", bool)
    prefix = True if prefix is None else prefix
    prepend = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    space = {"pattern": {"String": " "}, "content": "▁"}
    back = {"pattern": {"String": "▁"}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, {"type": "Replace", **space}]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", **back}, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": _merges(tokens, types, scores),
        },
    }


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Derives merges for a SentencePiece BPE, which stores scores instead.

    SentencePiece joins the adjacent pair that forms the piece with the highest score. Equivalently, every division of a
    piece into two pieces is a merge, and merges are ordered by descending score of the piece.
    """
    parts_of_text = (NORMAL, USER_DEFINED, UNUSED)
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in parts_of_text}
    best_first = sorted((i for i, kind in enumerate(types) if kind in parts_of_text), key=lambda i: -scores[i])
    return [
        (token[:at], token[at:])
        for token in (tokens[i] for i in best_first)
        for at in range(1, len(token))
        if token[:at] in pieces and token[at:] in pieces
    ]


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the added tokens, which are matched before pre-tokenization: special and user-defined ones."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": token, "special": kind != USER_DEFINED, **plain}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]


def _bos_post_processor(token: str, i: int) -> dict[str, Any]:
    """Returns the "post_processor" field of a tokenizer.json that prepends a token."""
    begin, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, begin | {"SpecialToken": {"id": token, "type_id": 1}}, other],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }


def _special_id(metadata: Metadata, name: str, count: int, default: int | None) -> int | None:
    """Returns the id of a special token; the default if it is missing or (as in some files) past the vocabulary."""
    found = metadata.get(f"tokenizer.ggml.{name}_token_id", int)
    return found if found is not None and 0 <= found < count else default
