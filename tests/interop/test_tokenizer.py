"""Tokenizers: the byte table compared with the library's decoding, and streaming compared with decoding at once."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxllm.errors import UserError
from jaxllm.interop import text as texts
from jaxllm.interop.tokenizer import ByteTokenizer, FileTokenizer, StreamDecoder

TEXTS = ["if x:\n        .y = 1\n", "日本語のテキスト。", "naïve café", "🔥🔥 fire", "", " leading", "a", "tab\tend \n"]
CORPUS = [*TEXTS, "def f(x):\n    return x\n" * 4, "the cat sat on the mat and the dog sat on the cat"] * 3


def byte_level(path, **added):
    """Trains a byte-level BPE with a special end token and an ordinary added token, as in GPT-2 derivatives."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False, **added)
    built.train_from_iterator(CORPUS, trainer)
    built.add_special_tokens(["<|endoftext|>"])
    built.add_tokens(["    \n\n"])
    built.enable_truncation(3)  # must not survive loading
    built.save(str(path))
    return path


def sentencepiece(path, metaspace=False):
    """Llama-2-like tokenizer: ▁ for spaces, a leading space, byte fallback for unknown characters, and <s> first."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "a", "b", "c", "日", "▁a"]
    built = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    if metaspace:
        built.pre_tokenizer = pre_tokenizers.Metaspace()
        built.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        built.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    built.add_special_tokens(["<unk>", "<s>", "</s>"])
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    built.save(str(path))
    return path


@pytest.fixture(scope="module", params=["bytes", "byte_level", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return ByteTokenizer()
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    return FileTokenizer({"byte_level": byte_level, "sentencepiece": sentencepiece}[request.param](path))


def streamed(tokenizer, parts):
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(part) for part in parts), decoder.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip_and_its_bytes_add_up(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    put_in_front = int(tokenizer.drops_leading_space and bool(text))
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode()) + put_in_front
    assert tokenizer.byte_lengths().shape == (tokenizer.vocab_size,)


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_one_id_at_a_time_equals_decoding_at_once(tokenizer, text):
    ids = tokenizer.encode(text)
    parts = streamed(tokenizer, [[i] for i in ids])
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)
    assert parts[-1] == ""


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_parts_stream_to_the_same_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 1), max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(streamed(tokenizer, parts)) == tokenizer.decode(ids)


def test_a_character_in_two_parts_waits_for_its_end():
    decoder = StreamDecoder(ByteTokenizer())
    assert decoder.push([0xF0, 0x9F]) == ""
    assert decoder.push([0x94, 0xA5]) == "🔥"
    assert decoder.finish() == ""


def test_a_character_that_never_ends_is_reported_at_the_finish():
    tokenizer = ByteTokenizer()
    ids = [*b"ok", 0xF0, 0x9F]
    assert streamed(tokenizer, [ids]) == ["ok", "\ufffd"]
    assert tokenizer.decode(ids) == "ok\ufffd"


def test_bytes_tokenizer():
    tokenizer = texts.load("bytes").tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.end_ids) == (257, None, (256,))
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.decode([104, 256, 105]) == "hi"
    assert tokenizer.byte_lengths().tolist() == [1] * 256 + [0]


def test_the_table_decodes_as_the_library_does(tmp_path):
    for path in (
        byte_level(tmp_path / "b.json"),
        sentencepiece(tmp_path / "s.json"),
        sentencepiece(tmp_path / "m.json", metaspace=True),
    ):
        ours, theirs = FileTokenizer(path), tokenizers.Tokenizer.from_file(str(path))
        theirs.no_truncation()
        for text in TEXTS:
            ids = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode(text).tolist() == ids, (path, text)
            assert ours.decode(ids) == theirs.decode(ids), (path, text)


def test_broken_bytes_decode_as_the_library_does(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json")
    ours, theirs = FileTokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    ids = {run: i for i, run in enumerate(ours._table)}
    for data in (b"\xe6\x97a", b"\xf0\x9f\x94", b"\xff\xfea\xc3", b"\xe6\xe6\x97\xa5", b"\xf0\x80\x80\x80"):
        broken = [ids[bytes([value])] for value in data]
        assert ours.decode(broken) == theirs.decode(broken) == data.decode("utf-8", "replace")


def test_byte_level_lengths_special_names_and_ends(tmp_path):
    tokenizer = FileTokenizer(byte_level(tmp_path / "tokenizer.json"))
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    lengths = tokenizer.byte_lengths()
    assert lengths[vocabulary["Ġ"]] == 1  # a space, which is written with two bytes
    assert lengths[vocabulary["Ġthe"]] == 4
    end = len(vocabulary)
    assert tokenizer.end_ids == (end,)
    assert tokenizer.bos_id is None
    assert lengths[end] == 0
    assert lengths[end + 1] == 6  # an added token stands for its literal text
    assert tokenizer.vocab_size == end + 2
    assert end not in tokenizer.encode("a<|endoftext|>")
    assert tokenizer.decode(tokenizer.encode("a<|endoftext|>")) == "a<|endoftext|>"
    assert tokenizer.encode("a<|endoftext|>", special=True)[-1] == end
    assert len(tokenizer.encode("the cat sat on the mat " * 9)) > 3  # the file's truncation is disabled


def test_sentencepiece_lengths_and_ends(tmp_path):
    tokenizer = FileTokenizer(sentencepiece(tmp_path / "tokenizer.json"))
    lengths = tokenizer.byte_lengths()
    assert lengths[:3].tolist() == [0, 0, 0]
    assert set(lengths[3:259].tolist()) == {1}
    assert lengths[259:].tolist() == [1, 1, 1, 1, 3, 2]
    assert (tokenizer.bos_id, tokenizer.end_ids, tokenizer.drops_leading_space) == (1, (2,), True)
    # An invalid byte does not affect the valid character next to it.
    assert tokenizer.decode([3 + 0xE6, 3 + 0x97, 3 + 0xA5, 3 + 0xFF]) == "日\ufffd"


def test_the_settings_beside_a_file_name_its_end(tmp_path):
    byte_level(tmp_path / "tokenizer.json", special_tokens=["<stop>"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    tokenizer = texts.load(str(tmp_path)).tokenizer  # a folder is accepted too
    assert tokenizer.end_ids[0] == 0
    assert len(tokenizer.end_ids) == 2


def test_errors_name_the_file_and_the_fix(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.json.*give 'bytes' or the path"):
        texts.load(str(tmp_path / "nowhere.json"))
    bad = tmp_path / "bad.json"
    for content in ("not json", "{}", '{"version": "1.0", "model": 3}'):
        bad.write_text(content)
        with pytest.raises(UserError, match=r"bad.json is not a valid tokenizer.json") as caught:
            texts.load(str(bad))
        assert "\n" not in str(caught.value)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"bad.json is not a valid tokenizer.json"):
        texts.load(str(bad))
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}))
    words.decoder = decoders.WordPiece()
    words.save(str(bad))
    with pytest.raises(UserError, match="decoder WordPiece; use a byte-level BPE or SentencePiece-like"):
        texts.load(str(bad))
