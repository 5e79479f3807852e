"""Converts a tokenizer to the keys of a GGUF file with which llama.cpp produces the same ids.

Source: llama.cpp's src/llama-vocab.cpp. GGUF has no normalizer: the NFC step in Qwen's tokenizer.json is dropped, as in
llama.cpp's converter. It does not affect text that is already composed.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import UserError
from jaxllm.interop.gguf import splitting
from jaxllm.interop.gguf import tokenizer as tokenizers
from jaxllm.interop.gguf.file import Metadata
from jaxllm.interop.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from jaxllm.interop.tokenizer import END_NAMES, ByteTokenizer, JsonTokenizer, Tokenizer

# Text whose ids are compared after conversion: accents, dashes, digits, symbols, scripts, code, white space.
_PROBE = (
    "Ça coûte 1234.5 € — “naïve” café, isn't it? I'LL see…\n\n\tif x == 10:\n        return {'a': [1, 22, 333]}  # ok\n"
    "日本語のテキスト。 Привет мир! 🔥👩‍💻 a  b   c    d\r\n<|x|> __init__ HTTPServer"
)


def tokenizer_keys(tokenizer: Tokenizer | None, vocab_size: int, special: Mapping[str, str]) -> dict[str, Any]:
    """Returns the `tokenizer.ggml` keys of a tokenizer.

    Args:
      tokenizer: None for a file without one.
      vocab_size: vocabulary size of the model; ids that the tokenizer lacks are filled with unused tokens.
      special: special tokens by their names in the chat template.
    Raises:
      UserError: GGUF cannot represent the tokenizer, or its ids would differ.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    if isinstance(tokenizer, ByteTokenizer):
        tokenizer = tokenizer.as_json_tokenizer()
    if not isinstance(tokenizer, JsonTokenizer):
        raise UserError(f"a {type(tokenizer).__name__} cannot be converted to GGUF; convert to safetensors")
    keys, tokens, types = _from_json(json.loads(tokenizer.to_json()), tokenizer.vocab_size)
    if len(tokens) > vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokens)} ids and the model's vocab_size is {vocab_size}; use the model's tokenizer"
        )
    keys |= _ids(tokenizer, tokens, special)
    keys["tokenizer.ggml.tokens"] = tokens + [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    keys["tokenizer.ggml.token_type"] = types + [UNUSED] * (vocab_size - len(tokens))
    if "tokenizer.ggml.scores" in keys:
        keys["tokenizer.ggml.scores"] += [_LOWEST_SCORE] * (vocab_size - len(tokens))
    again = tokenizers.read_tokenizer(Metadata(keys, "the tokenizer as GGUF"))
    if again.encode(_PROBE).tolist() != tokenizer.encode(_PROBE).tolist():
        raise UserError(
            "the tokenizer gives other ids under GGUF's rules; convert to safetensors, which keeps it unchanged"
        )
    return keys


_LOWEST_SCORE = -1e9  # a score below all others
# llama.cpp requires merges. A tokenizer without merges gets one of two bytes that never occur in UTF-8 text.
_DUMMY_MERGE = "ÿ ÿ"


def _ids(tokenizer: Tokenizer, tokens: list[str], special: Mapping[str, str]) -> dict[str, Any]:
    by_token = {token: i for i, token in enumerate(tokens)}
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: by_token[special[key]] for key, name in names.items() if special.get(key) in by_token}
    if tokenizer.bos_id is not None:
        found["bos"] = tokenizer.bos_id
    if tokenizer.end_ids:
        found["eos"] = tokenizer.end_ids[0]
        # llama.cpp recognizes the others by name; those without a known name need a key.
        unnamed = [i for i in tokenizer.end_ids[1:] if tokens[i] not in END_NAMES]
        found |= dict(zip(("eot", "eom"), unnamed, strict=False))
    keys: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": i for name, i in found.items()}
    return keys | {"tokenizer.ggml.add_bos_token": tokenizer.bos_id is not None}


def _from_json(content: dict[str, Any], count: int) -> tuple[dict[str, Any], list[str], list[int]]:
    model, added = content["model"], {token["id"]: token for token in content["added_tokens"]}
    if model["type"] != "BPE":
        raise UserError(f"the tokenizer is a {model['type']}, but GGUF supports only BPE; convert to safetensors")
    tokens = {i: token for token, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    names = [tokens.get(i, f"[PAD{i}]") for i in range(count)]
    marks = json.dumps(content["normalizer"] or content["pre_tokenizer"], ensure_ascii=False)
    is_sentencepiece = bool(model.get("byte_fallback")) and "▁" in marks
    types = [
        _type(i, name, added, model if is_sentencepiece else {}) if i in tokens else UNUSED
        for i, name in enumerate(names)
    ]
    keys = _sentencepiece(content, names) if is_sentencepiece else _byte_level(content)
    return keys, names, types


def _type(i: int, name: str, added: Mapping[int, dict[str, Any]], sentencepiece: Mapping[str, Any]) -> int:
    if sentencepiece and name == sentencepiece.get("unk_token"):
        return UNKNOWN
    if i in added:
        return CONTROL if added[i]["special"] else USER_DEFINED
    return BYTE if sentencepiece and len(name) == 6 and name.startswith("<0x") else NORMAL


def _byte_level(content: dict[str, Any]) -> dict[str, Any]:
    if content["normalizer"] not in (None, {"type": "NFC"}):
        raise UserError(
            f"the tokenizer has a normalizer ({content['normalizer']!r:.60}), but GGUF has none; convert to safetensors"
        )
    name = splitting.gguf_name(content["pre_tokenizer"], bool(content["model"].get("ignore_merges")))
    if name is None:
        raise UserError("the tokenizer has a pre-tokenizer without a name in GGUF; convert to safetensors")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.merges": merges or [_DUMMY_MERGE],
    }


def _sentencepiece(content: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Returns the keys of a SentencePiece tokenizer; the score of a piece is the negative rank of its merge."""
    steps = content["normalizer"] or content["pre_tokenizer"]
    steps = steps.get("normalizers") or steps.get("pretokenizers") or [steps]
    known = {"Prepend", "Replace", "Metaspace"}
    if {step["type"] for step in steps} - known or (content["normalizer"] and content["pre_tokenizer"]):
        raise UserError(
            "the tokenizer has a normalizer or pre-tokenizer that GGUF does not support; convert to safetensors"
        )
    prefix = any(step["type"] == "Prepend" or step.get("prepend_scheme", "never") != "never" for step in steps)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(content["model"]["merges"]):
        ranks.setdefault("".join(merge.split(" ", 1) if isinstance(merge, str) else merge), rank)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.scores": [float(-ranks[name]) if name in ranks else _LOWEST_SCORE for name in names],
    }
