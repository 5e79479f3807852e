"""How a byte-level BPE cuts text into words before it merges bytes, by the name that GGUF has for each way.

Sources: the table of pre-tokenizers in llama.cpp's src/llama-vocab.cpp, and the tokenizer.json files they stand for.
A wrong one is not seen at once: the text comes out in more and rarer tokens, and the model writes worse. So a name that
is not here is refused.
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
class Splitting:
    """Expressions that cut a text one after the other, each what the last has left in one piece.

    Attributes:
      whole_words: a word that is a token is that token, whatever the merges say.
      begins: a document begins with the begin token, unless the file says otherwise.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False

    def to_json(self) -> dict[str, Any]:
        """As the pre-tokenizer of a tokenizer.json."""
        steps: list[dict[str, Any]] = []
        for expression in self.expressions:
            steps.append({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False})
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
        return {"type": "Sequence", "pretokenizers": steps}


# The first name of several is the one that is written.
_GROUPS: dict[str, Splitting] = {
    "gpt-2 phi-2 mpt olmo jais a.x-4.0 mellum gigachat exaone4 granite-docling trillion": Splitting((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": Splitting((_DIGIT, _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Splitting((_LLAMA3,), True, True),
    "dbrx smaug-bpe chatglm-bpe": Splitting((_LLAMA3,)),
    "glm4 glm5": Splitting((_LLAMA3,), True),
    "qwen2 deepseek-r1-qwen kormo stablelm2 megrez hunyuan solar-open grok-2": Splitting((_QWEN2,)),
    "tekken": Splitting((_TEKKEN,), True, True),
    "gpt-4o llama4 kanana2 minimax-m2": Splitting((_GPT4O,)),
    "falcon": Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
BY_NAME = {name: splitting for names, splitting in _GROUPS.items() for name in names.split()}


def name_of(pre_tokenizer: dict[str, Any] | None, whole_words: bool) -> str | None:
    """GGUF's name for the pre-tokenizer of a tokenizer.json; None where it has none that we know."""
    expressions = _expressions(pre_tokenizer)
    exact = [n.split()[0] for n, s in _GROUPS.items() if (s.expressions, s.whole_words) == (expressions, whole_words)]
    return exact[0] if exact else None


def _expressions(node: dict[str, Any] | None) -> tuple[str, ...] | None:
    """What a pre-tokenizer cuts at; None where it does anything else."""
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
        return None if expression is None else (_same(expression),)
    return None


def _same(expression: str) -> str:
    """One way of writing an expression that release files write in several."""
    return expression.replace("'(?i:[sdmt]|ll|ve|re)", _SHORTENED)
