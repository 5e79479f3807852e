"""Pre-tokenizers of byte-level BPE, which split text into words before merging, by their names in GGUF.

Sources: the table of pre-tokenizers in llama.cpp's src/llama-vocab.cpp, and the corresponding tokenizer.json files.
Unknown names are rejected: a wrong pre-tokenizer fails silently, with more and rarer tokens and worse model output.
"""

import dataclasses
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORTENED}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SHORTENED}|{_WORD}|\p{{N}}|{_REST}"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_SLASH}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORTENED}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORTENED}?|\p{{N}}{{1,3}}|{_REST_SLASH}"
)


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """Pre-tokenizer: regular expressions applied in turn, each to the pieces left by the previous one.

    Attributes:
      expressions: the regular expressions.
      whole_words: a word that is in the vocabulary becomes that token, regardless of the merges (`ignore_merges`).
      begins: a document begins with the begin token, unless the file overrides it.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the "pre_tokenizer" field of a tokenizer.json."""
        steps: list[dict[str, Any]] = []
        for expression in self.expressions:
            steps.append({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False})
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
        return {"type": "Sequence", "pretokenizers": steps}


# The first of several names is used for export.
_GROUPS: dict[str, PreTokenizer] = {
    "gpt-2 phi-2 mpt olmo jais a.x-4.0 mellum gigachat exaone4 granite-docling trillion": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": PreTokenizer((_DIGIT, _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer((_LLAMA3,), True, True),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), True),
    "qwen2 deepseek-r1-qwen kormo stablelm2 megrez hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), True, True),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer((_GPT4O,)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
BY_NAME = {name: splitting for names, splitting in _GROUPS.items() for name in names.split()}


def gguf_name(pre_tokenizer: dict[str, Any] | None, whole_words: bool) -> str | None:
    """Returns the GGUF name of the pre-tokenizer of a tokenizer.json; None if there is no known one."""
    expressions = _expressions(pre_tokenizer)
    exact = [n.split()[0] for n, s in _GROUPS.items() if (s.expressions, s.whole_words) == (expressions, whole_words)]
    return exact[0] if exact else None


def _expressions(node: dict[str, Any] | None) -> tuple[str, ...] | None:
    """Returns the regular expressions of a pre-tokenizer; None if it does anything else than split."""
    if node is None:
        return None
    if node["type"] == "Sequence":
        parts = [_expressions(part) for part in node["pretokenizers"]]
        return None if None in parts else tuple(e for part in parts if part for e in part)
    if node["type"] == "Digits" and node.get("individual_digits"):
        return (_DIGIT,)
    if node["type"] == "ByteLevel" and not node.get("add_prefix_space"):
        return (_GPT2,) if node.get("use_regex", True) else ()
    if node["type"] == "Split" and node.get("behavior") == "Isolated" and not node.get("invert"):
        expression = node["pattern"].get("Regex")
        return None if expression is None else (_canonical(expression),)
    return None


def _canonical(expression: str) -> str:
    """Normalizes an expression that model releases spell in several ways."""
    return expression.replace("'(?i:[sdmt]|ll|ve|re)", _SHORTENED)
