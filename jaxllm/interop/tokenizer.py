"""Text to token ids and back, one id at a time if need be.

Every tokenizer here is a table: each id stands for a fixed run of bytes (a special token for none), and
decoding joins the runs and reads them as UTF-8. So whole-text decoding, streaming and bits per byte all
follow from the same table, and a character split over several tokens comes out whole.
"""

import codecs
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from jaxtyping import Int32

from jaxllm.errors import UserError
from jaxllm.interop import byte_runs

# Names under which published tokenizers keep the token that ends a document or a turn, likeliest first.
END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|eom_id|>",
    "<|end|>",
)


class Tokenizer:
    """A table of byte runs, and the way from text to ids.

    Attributes:
      vocab_size: number of ids.
      bos_id: id that begins every document, or None.
      end_ids: ids that end a document or a turn; the first closes the documents of a corpus. May be empty.
      drops_leading_space: the encoder puts a space before the text, and decoding takes it away again.
    """

    bos_id: int | None = None
    end_ids: tuple[int, ...] = ()
    drops_leading_space: bool = False

    def __init__(self, table: Sequence[bytes]):
        self._table = table
        self.vocab_size: int = len(table)

    def encode(self, text: str, special: bool = False) -> Int32[np.ndarray, " n"]:
        """Ids of a text; none is added at its ends.

        Args:
          text: what to encode.
          special: a special token's name in the text stands for that token. Off, it is text like any other,
            as a corpus needs; a chat template needs it on.
        """
        raise NotImplementedError

    def encode_with_spans(
        self, text: str, special: bool = False
    ) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, "n 2"]]:
        """What `encode` gives, and of each id the characters of the text that it stands for: [first, past the last)."""
        raise NotImplementedError

    def joined(self, ids: Iterable[int]) -> bytes:
        """Byte runs of the ids, end to end. An id outside the table (a padded vocabulary has them) is no text."""
        return b"".join(self._table[i] for i in ids if 0 <= i < self.vocab_size)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of the text that the ids stand for; special tokens are left out."""
        data = self.joined(ids)
        return data[1:] if self.drops_leading_space and data.startswith(b" ") else data

    def decode(self, ids: Iterable[int]) -> str:
        """Text that the ids stand for; U+FFFD where the bytes are not UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def byte_lengths(self) -> Int32[np.ndarray, " vocab_size"]:
        """Bytes of text each id stands for, 0 for special tokens: bits per byte is bits over their sum."""
        return np.array([len(run) for run in self._table], np.int32)


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes themselves; 256 ends a document."""

    end_ids = (256,)

    def __init__(self) -> None:
        super().__init__([bytes([value]) for value in range(256)] + [b""])

    def encode(self, text: str, special: bool = False) -> Int32[np.ndarray, " n"]:
        del special  # the end of a document has no name
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def encode_with_spans(
        self, text: str, special: bool = False
    ) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, "n 2"]]:
        sizes = [len(char.encode("utf-8", "replace")) for char in text]
        first = np.repeat(np.arange(len(text), dtype=np.int32), sizes)
        return self.encode(text, special), np.stack([first, first + 1], axis=1)


class JsonTokenizer(Tokenizer):
    """What a tokenizer.json describes, if its tokens are byte-level (GPT-2, Llama 3) or SentencePiece-like (Llama 2).

    Args:
      content: of the file.
      where: what to call it in messages.
      ends: ids that end a document or a turn, the first the document's; those of well-known names come after.
    Raises:
      UserError: not a tokenizer, or of a kind whose tokens do not stand for fixed bytes.
    """

    def __init__(self, content: str, where: str, ends: Sequence[int] = ()):
        try:
            # Two of them, since whether special names are read is a setting of the object, and threads share it.
            self._special, self._plain = (tokenizers.Tokenizer.from_str(content) for _ in range(2))
        except Exception as error:  # the library raises bare Exception for what it cannot read
            raise _not_a_tokenizer(where, error) from error
        for one in (self._special, self._plain):
            one.no_truncation()  # a file may carry its model's limits, which would cut documents short
            one.no_padding()
        self._plain.encode_special_tokens = True
        super().__init__(byte_runs.of(self._special, json.loads(content).get("decoder"), where))
        self.drops_leading_space = self._find_leading_space()
        self.bos_id = self._find_bos()
        self.end_ids = self._find_ends(ends)

    def encode(self, text: str, special: bool = False) -> Int32[np.ndarray, " n"]:
        encoder = self._special if special else self._plain
        return np.array(encoder.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_with_spans(
        self, text: str, special: bool = False
    ) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, "n 2"]]:
        encoding = (self._special if special else self._plain).encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def name_of(self, token: int) -> str | None:
        """How a token is written in the file; None where it has no such id."""
        return self._special.id_to_token(token)

    def to_json(self) -> str:
        """The content of a tokenizer.json that is this tokenizer, without limits on the length."""
        return self._special.to_str(pretty=True)

    def _find_leading_space(self) -> bool:
        """Whether the file's own decoder drops one space at the start: ask it, with a token that has one."""
        for i, run in enumerate(self._table):
            if len(run) > 1 and run.startswith(b" ") and run[1:].isalpha():
                return not self._special.decode([i]).startswith(" ")
        return False

    def _find_bos(self) -> int | None:
        """The id that the file's post-processor puts before a text, if it puts one."""
        bare = self._special.encode("a", add_special_tokens=False).ids
        full = self._special.encode("a", add_special_tokens=True).ids
        return full[0] if len(full) > len(bare) and full[1 : 1 + len(bare)] == bare else None

    def _find_ends(self, declared: Sequence[int]) -> tuple[int, ...]:
        """The declared end tokens, then the well-known ones that are marked as special here."""
        special = {token.content: i for i, token in self._special.get_added_tokens_decoder().items() if token.special}
        return tuple(dict.fromkeys([*declared, *(special[name] for name in END_NAMES if name in special)]))


class FileTokenizer(JsonTokenizer):
    """A tokenizer.json.

    Args:
      path: the file. A tokenizer_config.json beside it names the end-of-document token, if it is there.
    Raises:
      UserError: the file is not a tokenizer, or of a kind whose tokens do not stand for fixed bytes.
    """

    def __init__(self, path: str | pathlib.Path):
        path = pathlib.Path(path)
        try:
            content = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _not_a_tokenizer(str(path), error) from error
        super().__init__(content, str(path))
        declared = self._special.token_to_id(_declared_end(path.with_name("tokenizer_config.json")))
        self.end_ids = self._find_ends([] if declared is None else [declared])


def _not_a_tokenizer(where: str, error: Exception) -> UserError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(f"{where} is not a tokenizer.json ({reason}); give the file of a Hugging Face model")


def _declared_end(settings: pathlib.Path) -> str:
    """The end token that a tokenizer_config.json names; "" where it names none."""
    try:
        declared = json.loads(settings.read_text("utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ""  # the settings are a help, not a need
    written: object = declared.get("content") if isinstance(declared, dict) else declared
    return written if isinstance(written, str) else ""


class StreamDecoder:
    """Text of a sequence as its ids come: whole characters only, and joined the same as `decode` of them all."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_leading_space

    def push(self, ids: Iterable[int]) -> str:
        """Text that the ids complete; "" while a character is still open."""
        data = self._tokenizer.joined(ids)
        if data and self._drop_space:
            data = data.removeprefix(b" ")
            self._drop_space = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left of a character that never closed: U+FFFD, or ""."""
        return self._utf8.decode(b"", final=True)


def load(spec: str) -> Tokenizer:
    """The tokenizer that `config.data.tokenizer` names.

    Args:
      spec: "bytes", or the path of a tokenizer.json or of the folder that holds it.
    Raises:
      UserError: no such file, or not a tokenizer.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = pathlib.Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"tokenizer {spec!r} not found at {path}; give 'bytes' or the path of a tokenizer.json")
    return FileTokenizer(path)
