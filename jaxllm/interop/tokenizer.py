"""Tokenizers: text to token ids and back, with streaming decoding.

Every tokenizer here is a table: each id maps to a fixed byte string (special tokens to the empty one). Decoding
concatenates the byte strings and decodes them as UTF-8. Whole-text decoding, streaming and bits per byte all use this
table, and a character that spans several tokens decodes correctly.
"""

import codecs
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from jaxtyping import Int32

from jaxllm.errors import UserError
from jaxllm.interop import byte_level

# Names that published tokenizers give the token that ends a document or a turn, most likely first.
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
    """Base class of tokenizers: a table of the bytes of each id, and an encoder.

    Args:
      table: the bytes of each id; empty for special tokens.
    Attributes:
      vocab_size: number of ids.
      bos_id: id that begins every document, or None.
      end_ids: ids that end a document or a turn; the first ends the documents of a corpus. May be empty.
      drops_leading_space: the encoder prepends a space to the text, and decoding removes it.
    """

    bos_id: int | None = None
    end_ids: tuple[int, ...] = ()
    drops_leading_space: bool = False

    def __init__(self, table: Sequence[bytes]):
        self._table = table
        self.vocab_size: int = len(table)

    def encode(self, text: str, special: bool = False) -> Int32[np.ndarray, " n"]:
        """Returns the ids of a text, without begin or end tokens.

        Args:
          text: the text to encode.
          special: encode the name of a special token in the text as that token, as a chat template needs. If False,
            the name is ordinary text, as a corpus needs.
        """
        raise NotImplementedError

    def encode_with_spans(
        self, text: str, special: bool = False
    ) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, "n 2"]]:
        """Returns the ids of `encode`, and for each id its half-open range [start, end) of characters in the text."""
        raise NotImplementedError

    def joined(self, ids: Iterable[int]) -> bytes:
        """Concatenates the bytes of the ids. Ids outside the table (a padded vocabulary has them) have no bytes."""
        return b"".join(self._table[i] for i in ids if 0 <= i < self.vocab_size)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decodes ids to the bytes of the text, without special tokens."""
        data = self.joined(ids)
        return data[1:] if self.drops_leading_space and data.startswith(b" ") else data

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def byte_lengths(self) -> Int32[np.ndarray, " vocab_size"]:
        """Returns the number of bytes of each id, 0 for special tokens; bits per byte is bits divided by their sum."""
        return np.array([len(data) for data in self._table], np.int32)


class ByteTokenizer(Tokenizer):
    """Byte-level tokenizer: ids 0 to 255 are the bytes; 256 ends a document."""

    end_ids = (256,)

    def __init__(self) -> None:
        super().__init__([bytes([value]) for value in range(256)] + [b""])

    def encode(self, text: str, special: bool = False) -> Int32[np.ndarray, " n"]:
        del special  # the end-of-document token has no name
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def encode_with_spans(
        self, text: str, special: bool = False
    ) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, "n 2"]]:
        sizes = [len(char.encode("utf-8", "replace")) for char in text]
        first = np.repeat(np.arange(len(text), dtype=np.int32), sizes)
        return self.encode(text, special), np.stack([first, first + 1], axis=1)

    def as_json_tokenizer(self) -> "JsonTokenizer":
        """Returns a tokenizer of the same ids that can be saved; its end-of-document token has a name."""
        content = byte_level.byte_tokenizer(END_NAMES[0]).to_str()
        return JsonTokenizer(content, "the byte tokenizer", self.end_ids)


class JsonTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json whose tokens are byte-level (GPT-2, Llama 3) or SentencePiece-like (Llama 2).

    Args:
      content: content of the file.
      where: name of the file, for messages.
      ends: ids that end a document or a turn; the first ends a document. Special tokens of `END_NAMES` follow.
    Raises:
      UserError: the content is not a tokenizer, or its tokens do not map to fixed bytes.
    """

    def __init__(self, content: str, where: str, ends: Sequence[int] = ()):
        try:
            # Two objects: parsing of special tokens is a setting of the object, and threads share the object.
            self._special, self._plain = (tokenizers.Tokenizer.from_str(content) for _ in range(2))
        except Exception as error:  # the library raises bare Exception for what it cannot read
            raise _not_a_tokenizer(where, error) from error
        for one in (self._special, self._plain):
            one.no_truncation()  # a file may set its model's length limit, which would truncate documents
            one.no_padding()
        self._plain.encode_special_tokens = True
        super().__init__(byte_level.token_bytes(self._special, json.loads(content).get("decoder"), where))
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
        """Returns the name of a token in the file; None if there is no such id."""
        return self._special.id_to_token(token)

    def to_json(self) -> str:
        """Serializes the tokenizer as the content of a tokenizer.json, without truncation."""
        return self._special.to_str(pretty=True)

    def _find_leading_space(self) -> bool:
        """Checks if the file's decoder removes one leading space, by decoding a token that begins with a space."""
        for i, data in enumerate(self._table):
            if len(data) > 1 and data.startswith(b" ") and data[1:].isalpha():
                return not self._special.decode([i]).startswith(" ")
        return False

    def _find_bos(self) -> int | None:
        """Returns the id that the file's post-processor prepends to a text; None if it prepends none."""
        bare = self._special.encode("a", add_special_tokens=False).ids
        full = self._special.encode("a", add_special_tokens=True).ids
        return full[0] if len(full) > len(bare) and full[1 : 1 + len(bare)] == bare else None

    def _find_ends(self, declared: Sequence[int]) -> tuple[int, ...]:
        """Returns the declared end tokens, followed by the special tokens of the file that are in `END_NAMES`."""
        special = {token.content: i for i, token in self._special.get_added_tokens_decoder().items() if token.special}
        return tuple(dict.fromkeys([*declared, *(special[name] for name in END_NAMES if name in special)]))


class FileTokenizer(JsonTokenizer):
    """Tokenizer read from a tokenizer.json on disk.

    Args:
      path: the file. If a tokenizer_config.json is next to it, that file names the end-of-document token.
    Raises:
      UserError: the file is not a tokenizer, or its tokens do not map to fixed bytes.
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
    return UserError(f"{where} is not a valid tokenizer.json ({reason}); use the file of a Hugging Face model")


def _declared_end(settings: pathlib.Path) -> str:
    """Returns the end token that a tokenizer_config.json names; "" if there is none."""
    try:
        declared = json.loads(settings.read_text("utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ""  # the settings are optional
    written: object = declared.get("content") if isinstance(declared, dict) else declared
    return written if isinstance(written, str) else ""


class StreamDecoder:
    """Incremental decoder: emits whole characters only; the concatenation equals `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_leading_space

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that the ids complete; "" while a character is incomplete."""
        data = self._tokenizer.joined(ids)
        if data and self._drop_space:
            data = data.removeprefix(b" ")
            self._drop_space = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Flushes the decoder: returns U+FFFD for an incomplete character, else ""."""
        return self._utf8.decode(b"", final=True)
