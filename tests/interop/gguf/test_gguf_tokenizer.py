"""GGUF tokenizers: pre-tokenization as named in the file, SentencePiece without merges, and round trips."""

import itertools
import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxllm.errors import UserError
from jaxllm.interop.byte_level import byte_alphabet
from jaxllm.interop.gguf import splitting, vocabulary
from jaxllm.interop.gguf import tokenizer as gguf_tokenizer
from jaxllm.interop.gguf.file import Metadata
from jaxllm.interop.gguf.splitting import BY_NAME
from jaxllm.interop.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from jaxllm.interop.tokenizer import FileTokenizer, JsonTokenizer

MIXED = (
    "Ça coûte 1234567 € — “naïve” café, isn't it? I'LL SEE…\n\n\tif x == 10:\n        return {'a': [1, 22, 333]}\n"
    "日本語のテキスト。 Привет, мир! 🔥👩‍💻 a  b   c    d  \r\n<|x|> __init__ HTTPServer camelCase ½ ² Ⅷ"
)


def metadata(values):
    return Metadata({f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}, "m.gguf")


def trained(path, pre, whole_words=False, **added):
    """Trains a byte-level BPE on words split by the pre-tokenizer `pre`."""
    built = tokenizers.Tokenizer(models.BPE(ignore_merges=whole_words))
    built.pre_tokenizer, built.decoder = pre, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    built.train_from_iterator([MIXED, "12 123 1234 12345 " * 9, "isn't it's I'll I'LL " * 9, "    \n\n" * 9], trainer)
    built.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    built.add_tokens(["<tool>"])
    built.save(str(path))
    return FileTokenizer(path)


def split(*expressions):
    steps = [pre_tokenizers.Split(tokenizers.Regex(e), "isolated") for e in expressions]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SMOLLM = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
# Pre-tokenizers as in the tokenizer.json files of the releases.
RELEASED = {
    "gpt-2": (GPT2, False),
    "smollm": (SMOLLM, False),
    "llama-bpe": (split(rf"{SHORT}|\p{{N}}{{1,3}}|{REST}"), True),
    "dbrx": (split(rf"{SHORT}|\p{{N}}{{1,3}}|{REST}"), False),
    "qwen2": (split(rf"{SHORT}|\p{{N}}|{REST}"), False),
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_byte_level_tokenizer_goes_there_and_back(name, tmp_path):
    ours = trained(tmp_path / "tokenizer.json", *RELEASED[name])
    values = vocabulary.tokenizer_keys(ours, 512, {"bos_token": "<|endoftext|>"})
    assert values["tokenizer.ggml.pre"] == name
    assert len(values["tokenizer.ggml.tokens"]) == 512
    again = gguf_tokenizer.read_tokenizer(Metadata(values, "m.gguf"))
    for text in (MIXED, "a <|im_end|><tool> b", "   x", "\n"):
        for special in (False, True):
            assert again.encode(text, special).tolist() == ours.encode(text, special).tolist()
        assert again.decode(again.encode(text)) == text
    assert again.bos_id is None
    assert set(again.end_ids) == set(ours.end_ids)
    assert again.end_ids[0] == ours.end_ids[0]
    assert gguf_tokenizer.special_tokens(Metadata(values, ""))["bos_token"] == "<|endoftext|>"
    # Another pre-tokenizer name splits the text differently, into more tokens, without an error: the ids must differ.
    wrong = "llama-bpe" if name in ("gpt-2", "smollm") else "gpt-2"
    other = gguf_tokenizer.read_tokenizer(Metadata(values | {"tokenizer.ggml.pre": wrong}, "m.gguf"))
    assert other.encode(MIXED).tolist() != ours.encode(MIXED).tolist()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "It's I'LL x1234", ["It", "'s", " I", "'", "LL", " x", "1234"]),
        ("smollm", "It's I'LL x1234", ["It", "'s", " I", "'", "LL", " x", "1", "2", "3", "4"]),
        ("llama-bpe", "It's I'LL x1234", ["It", "'s", " I", "'LL", " x", "123", "4"]),
        ("dbrx", "It's I'LL x1234", ["It", "'s", " I", "'LL", " x", "123", "4"]),
        ("qwen2", "It's I'LL x1234", ["It", "'s", " I", "'LL", " x", "1", "2", "3", "4"]),
        ("tekken", "It's HTTPServer 12", ["It", "'s", " HTTPServer", " ", "1", "2"]),
        ("gpt-4o", "It's HTTPServer 1234", ["It's", " HTTPServer", " ", "123", "4"]),
        ("falcon", "x=12345 a", ["x", "=", "123", "45", " a"]),
        ("default", "x=12 a", ["x", "=", "12", " a"]),
        ("deepseek-coder", "x1 = 23\ny", ["x", "1", " = ", "2", "3", "\n", "y"]),
        ("gpt-2", "a  b\n\n  c", ["a", " ", " b", "\n\n ", " c"]),
        ("llama-bpe", "a  b\n\n  c!?\n\nd", ["a", " ", " b", "\n\n", " ", " c", "!?\n\n", "d"]),
    ],
)
def test_each_name_splits_words_in_its_way(name, text, words):
    found = _pre(name).pre_tokenize_str(text)
    alphabet = byte_alphabet()
    assert [bytes(alphabet[char] for char in piece).decode() for piece, _ in found] == words


def _pre(name):
    tokens = [*byte_alphabet(), "ab"]
    values = {"model": "gpt2", "pre": name, "tokens": tokens, "merges": ["a b"], "bos_token_id": 0, "eos_token_id": 0}
    return gguf_tokenizer.read_tokenizer(metadata(values))._special.pre_tokenizer


def test_every_name_is_known_by_its_group():
    for name, way in BY_NAME.items():
        written = splitting.gguf_name(way.to_json(), way.whole_words)
        assert BY_NAME[written].expressions == way.expressions, name
    assert splitting.gguf_name({"type": "Whitespace"}, False) is None
    assert splitting.gguf_name({"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}, False) is None
    assert splitting.gguf_name({"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}]}, False) is None


BYTES = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": [*byte_alphabet(), "ab", "<s>", "</s>"],
    "token_type": [NORMAL] * 257 + [CONTROL] * 2,
    "merges": ["a b"],
    "bos_token_id": 257,
    "eos_token_id": 258,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": None}, "m.gguf has no tokenizer.ggml.pre: words would be split wrongly"),
        ({"pre": "llama-bpee"}, "the unsupported tokenizer.ggml.pre 'llama-bpee'"),
        ({"pre": ""}, "no tokenizer.ggml.pre"),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5', which is unsupported"),
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv', which is unsupported"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"token_type": [NORMAL]}, "has 1 token types for 259 tokens"),
        ({"tokens": [*BYTES["tokens"][:-1], "ab"]}, "or one twice"),
        ({"normalizer.lowercase": True}, "tokenizer.ggml.normalizer.lowercase, which jaxllm does not support"),
        ({"add_bos_token": True, "bos_token_id": None}, "adds a begin token but has no"),
        ({"model": "llama"}, "has no tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0]}, "has 1 scores for 259 tokens"),
        ({"add_bos_token": "yes"}, "not of type bool"),
    ],
)
def test_a_tokenizer_that_is_not_known_stops_the_import(changes, words):
    with pytest.raises(UserError) as caught:
        gguf_tokenizer.read_tokenizer(metadata(BYTES | changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    gguf_tokenizer.read_tokenizer(metadata(BYTES))


@pytest.mark.parametrize(
    ("changes", "begin"),
    [
        ({}, None),
        ({"add_bos_token": True}, 257),
        ({"add_bos_token": False}, None),
        ({"pre": "llama-bpe"}, 257),
        ({"pre": "llama-bpe", "add_bos_token": False}, None),
        ({"pre": "tekken", "bos_token_id": 258}, 258),
    ],
)
def test_who_begins_a_document(changes, begin):
    assert gguf_tokenizer.read_tokenizer(metadata(BYTES | changes)).bos_id == begin


def test_ends_are_those_of_the_keys_then_those_known_by_name():
    tokens = [*BYTES["tokens"], "<|im_end|>", "<stop>", "<|eot_id|>"]
    types = [*BYTES["token_type"], CONTROL, CONTROL, NORMAL]
    values = BYTES | {"tokens": tokens, "token_type": types, "eot_token_id": 260}
    tokenizer = gguf_tokenizer.read_tokenizer(metadata(values))
    assert tokenizer.end_ids == (258, 260, 259)  # an id whose token is not marked as special is not an end id
    assert tokenizer.encode("ab<stop>").tolist()[0] == 256
    assert 260 not in tokenizer.encode("ab<stop>").tolist()
    assert tokenizer.encode("ab<stop>", special=True).tolist() == [256, 260]


# --- SentencePiece

PIECES = ["▁", *"abcde", "日", "▁a", "ab", "bc", "abc", "cd", "▁ab", "de", "bcd", "▁▁", "▁▁▁▁", "ea", "▁abc", "dea"]


def sentencepiece(seed=0, **changes):
    """Returns metadata in Llama 2's order: <unk>, <s>, </s>, bytes, pieces; the order of longer pieces is random."""
    rng = random.Random(seed)
    long = [piece for piece in PIECES if len(piece) > 1]
    rng.shuffle(long)
    pieces = [*(piece for piece in PIECES if len(piece) == 1), *long]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *pieces, "<user>", "  \n"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED, USER_DEFINED]
    scores = [0.0] * 259 + [-1000.0 - i if len(p) == 1 else -float(long.index(p)) for i, p in enumerate(pieces)]
    values = {"model": "llama", "tokens": tokens, "token_type": types, "scores": [*scores, -1000.0, -1000.0]}
    return values | changes


def by_the_definition(values, text, prefix=True):
    """Tokenizes by definition: repeatedly merges the adjacent pair with the best score, the leftmost on ties."""
    ids = {token: i for i, token in enumerate(values["tokens"])}
    symbols = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    usable = {t for t, kind in zip(values["tokens"], values["token_type"], strict=True) if kind == NORMAL}
    while True:
        joined = [a + b for a, b in itertools.pairwise(symbols)]
        pairs = [(-values["scores"][ids[piece]], i) for i, piece in enumerate(joined) if piece in usable]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return [i for s in symbols for i in ([ids[s]] if s in usable else [3 + byte for byte in s.encode()])]


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="aabbccdde  日é", max_size=24), seed=st.integers(0, 3), prefix=st.booleans())
def test_pieces_are_those_of_the_definition(text, seed, prefix):
    values = sentencepiece(seed, add_space_prefix=prefix)
    ours = _cached(seed, prefix)
    assert ours.encode(text).tolist() == by_the_definition(values, text, prefix)
    assert ours.decode(ours.encode(text)) == text


_READ = {}


def _cached(seed, prefix):
    if (seed, prefix) not in _READ:
        _READ[seed, prefix] = gguf_tokenizer.read_tokenizer(metadata(sentencepiece(seed, add_space_prefix=prefix)))
    return _READ[seed, prefix]


def test_scores_decide_the_pieces():
    """Scores determine the merges: reversed scores, as a planted fault, give other ids for these texts."""
    texts = ["abcdea abcde", "deabcd", "abc bcd dea"]
    values = sentencepiece(1)
    ours = gguf_tokenizer.read_tokenizer(metadata(values))
    worst = gguf_tokenizer.read_tokenizer(metadata(values | {"scores": [-score for score in values["scores"]]}))
    assert [ours.encode(t).tolist() for t in texts] == [by_the_definition(values, t) for t in texts]
    assert [worst.encode(t).tolist() for t in texts] != [by_the_definition(values, t) for t in texts]


def test_tokens_of_a_sentencepiece_file():
    ours = gguf_tokenizer.read_tokenizer(metadata(sentencepiece()))
    assert (ours.bos_id, ours.end_ids, ours.drops_leading_space) == (1, (2,), True)
    user = ours.encode("a<user>b").tolist()
    assert ours.decode(user) == "a<user> b"  # text after such a token starts with a space again, as in llama.cpp
    assert user.count(ours.vocab_size - 2) == 1
    assert ours.encode("</s>", special=True).tolist() == [2]
    assert 2 not in ours.encode("</s>").tolist()
    assert ours.byte_lengths()[:3].tolist() == [0, 0, 0]
    assert ours.decode([3 + 0xE6, 3 + 0x97, 3 + 0xA5]) == "日"


@pytest.mark.parametrize("seed", range(3))
def test_a_sentencepiece_tokenizer_goes_there_and_back(seed, tmp_path):
    ours = gguf_tokenizer.read_tokenizer(metadata(sentencepiece(seed)))
    (tmp_path / "tokenizer.json").write_text(ours.to_json())
    folder = FileTokenizer(tmp_path / "tokenizer.json")
    values = vocabulary.tokenizer_keys(folder, 290, {})
    assert values["tokenizer.ggml.model"] == "llama"
    again = gguf_tokenizer.read_tokenizer(Metadata(values, "m.gguf"))
    for text in ("abc  bcd<user>deab 日é", "", " ", "    a\n", MIXED):
        assert again.encode(text).tolist() == folder.encode(text).tolist() == ours.encode(text).tolist()
    assert (again.bos_id, again.end_ids) == (1, (2,))


def test_what_gguf_has_no_words_for_is_refused(tmp_path):
    lower = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(byte_alphabet())}, []))
    lower.pre_tokenizer, lower.decoder = GPT2, decoders.ByteLevel()
    lower.normalizer = normalizers.Lowercase()
    with pytest.raises(UserError, match="has a normalizer"):
        vocabulary.tokenizer_keys(JsonTokenizer(lower.to_str(), "x"), 300, {})
    lower.normalizer = normalizers.NFC()
    vocabulary.tokenizer_keys(JsonTokenizer(lower.to_str(), "x"), 300, {})
    lower.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), GPT2])
    with pytest.raises(UserError, match="has a pre-tokenizer without a name in GGUF"):
        vocabulary.tokenizer_keys(JsonTokenizer(lower.to_str(), "x"), 300, {})
    assert vocabulary.tokenizer_keys(None, 300, {}) == {"tokenizer.ggml.model": "none"}
