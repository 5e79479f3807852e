"""Random access to the documents of a corpus: interface, and the python, text and tokens sources.

Every source is read completely once when it is opened, so that a bad byte, line, row or token stops the run before its
first step. Afterwards documents are read from disk on access. Records (JSON Lines, Parquet) are in
`jaxllm.data.records`, conversations in `jaxllm.data.conversations`.

A document is {"name": str, "text": str}. The tokens source returns {"name": str, "tokens": integer array [n]}; the chat
source adds "weights": array [n], the weight of each token as a target.
Names identify the origin of a document and do not depend on the machine:

  python   path relative to the standard library
  text     file:byte offset; files are cut at line boundaries into documents of up to 64 KiB
  jsonl    file:line, from 1
  parquet  file:row, from 0
  chat     file:line, from 1
  tokens   file:window, from 0; windows overlap by one token, so each token but the first is a target exactly once
"""

import array
import codecs
import mmap
import os
import pathlib
import sysconfig
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxllm.config import DataConfig
from jaxllm.errors import UserError

MAX_DOCUMENT_BYTES = 64 * 1024  # longest document of the text source
SINGLE_FILE_DOCUMENTS = 20  # minimum number of documents from a single text file, so that some can be held out
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
CHECK_CHUNK = 1 << 20  # bytes or tokens checked at a time
_LIBRARY_SKIPS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class File(NamedTuple):
    name: str  # relative to the part of the pattern before its first wildcard
    path: str


def too_short(sequence_length: int, targets: int) -> UserError:
    """Builds the error for data with fewer targets than one sequence."""
    return UserError(
        f"config.data.sequence_length ({sequence_length}) is longer than the data ({targets} tokens to train on); "
        "lower it, or add files to config.data.path"
    )


class Documents:
    """Base class of random-access sources; the module docstring describes the documents.

    Attributes:
      notes: lines for the log about the data that was read.
    """

    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, i: int) -> dict[str, Any]:
        raise NotImplementedError

    def name(self, i: int) -> str:
        """Returns the name of document i without reading it."""
        raise NotImplementedError

    def group(self, i: int) -> str:
        """Returns the hold-out group of document i, which is held out as a whole; the document alone by default."""
        return self.name(i)


class Subset(Documents):
    """View of some documents of another source, selected by index."""

    def __init__(self, documents: Documents, indices: Sequence[int]):
        self.documents, self.indices = documents, array.array("q", indices)
        self.notes = documents.notes

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.documents[self.indices[i]]

    def name(self, i: int) -> str:
        return self.documents.name(self.indices[i])


class PythonLibrary(Documents):
    """Source code of Python's standard library, a corpus that is present on every machine.

    Silently skips installed packages, tests, empty files, and files that are not UTF-8 (some exist to test other
    encodings).
    """

    def __init__(self) -> None:
        root = sysconfig.get_paths()["stdlib"]
        found = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in _LIBRARY_SKIPS]
            found += [os.path.join(folder, name) for name in names if name.endswith(".py")]
        files = (File(pathlib.Path(os.path.relpath(path, root)).as_posix(), path) for path in found)
        self.files = sorted(file for file in files if self._is_text(file.path))

    @staticmethod
    def _is_text(path: str) -> bool:
        try:
            return bool(pathlib.Path(path).read_text("utf-8"))
        except UnicodeDecodeError:
            return False

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"name": self.name(i), "text": pathlib.Path(self.files[i].path).read_bytes().decode()}

    def name(self, i: int) -> str:
        return self.files[i].name


class TextFiles(Documents):
    """Plain text files, cut at line boundaries into documents of up to MAX_DOCUMENT_BYTES bytes.

    Raises:
      UserError: a file is not UTF-8.
    """

    def __init__(self, files: Sequence[File]):
        self.files = files
        self._file_index, self._start, self._stop = array.array("q"), array.array("q"), array.array("q")
        for n, file in enumerate(files):
            with open(file.path, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check_utf8(file.path, data)
                limit = MAX_DOCUMENT_BYTES
                if len(files) == 1:
                    limit = min(limit, max(256, len(data) // SINGLE_FILE_DOCUMENTS))
                start = 0
                while start < len(data):
                    stop = _document_end(data, start, limit)
                    self._file_index.append(n)
                    self._start.append(start)
                    self._stop.append(stop)
                    start = stop

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, i: int) -> dict[str, Any]:
        with open(self.files[self._file_index[i]].path, "rb") as handle:
            handle.seek(self._start[i])
            return {"name": self.name(i), "text": handle.read(self._stop[i] - self._start[i]).decode()}

    def name(self, i: int) -> str:
        return f"{self.files[self._file_index[i]].name}:{self._start[i]}"

    def group(self, i: int) -> str:
        return self.files[self._file_index[i]].name if len(self.files) > 1 else self.name(i)


def _document_end(data: mmap.mmap, start: int, limit: int) -> int:
    """Returns the end of the document at `start`: after the last line that fits, or between characters of a line."""
    stop = start + limit
    if stop >= len(data):
        return len(data)
    line = data.rfind(b"\n", start, stop) + 1
    if line > start:
        return line
    while data[stop] & 0xC0 == 0x80:  # continuation byte of a UTF-8 character
        stop -= 1
    return stop


def _check_utf8(path: str, data: mmap.mmap) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    stop = 0
    try:
        while stop < len(data):
            chunk = data[stop : stop + CHECK_CHUNK]
            stop += len(chunk)
            decoder.decode(chunk, final=stop == len(data))
    except UnicodeDecodeError as error:
        # error.start counts from the bytes that the decoder buffered from the previous chunk.
        offset = stop - len(error.object) + error.start
        raise UserError(
            f"{path} is not UTF-8 at byte {offset} ({error.reason}); convert it, for example with iconv -t UTF-8"
        ) from error


class TokenFiles(Documents):
    """Flat binary files of token ids, as nanoGPT writes them, in windows of sequence_length targets.

    Raises:
      UserError: a file size is not a multiple of the token size, an id is outside the vocabulary, the dtype is not
        supported, or the data is shorter than one sequence.
    """

    def __init__(self, files: Sequence[File], config: DataConfig, vocab_size: int):
        if config.token_dtype not in TOKEN_DTYPES:
            raise UserError(
                f"config.data.token_dtype is {config.token_dtype!r}; it must be one of {', '.join(TOKEN_DTYPES)}"
            )
        self.files, self._length = files, config.sequence_length
        self._tokens: list[np.ndarray] = []
        for file in files:
            size, item = os.path.getsize(file.path), np.dtype(config.token_dtype).itemsize
            if size % item:
                raise UserError(
                    f"{file.path} has {size} bytes, not a multiple of {item}; check config.data.token_dtype"
                )
            tokens = np.memmap(file.path, config.token_dtype, "r")
            _check_ids(file.path, tokens, vocab_size)
            self._tokens.append(tokens)
        windows = [-(-(len(tokens) - 1) // self._length) for tokens in self._tokens]
        self._first = np.concatenate([[0], np.cumsum(windows)])  # index of the first window of each file
        longest = max(len(tokens) for tokens in self._tokens)
        if longest <= self._length:
            # Raised here, because the hold-out would otherwise fail with a message about the number of documents.
            raise too_short(self._length, longest - 1)

    def __len__(self) -> int:
        return int(self._first[-1])

    def _locate(self, i: int) -> tuple[int, int]:
        n = int(np.searchsorted(self._first, i, side="right")) - 1
        return n, i - int(self._first[n])

    def __getitem__(self, i: int) -> dict[str, Any]:
        n, window = self._locate(i)
        start = window * self._length
        tokens = np.array(self._tokens[n][start : start + self._length + 1], np.int32)
        return {"name": self.name(i), "tokens": tokens}

    def name(self, i: int) -> str:
        n, window = self._locate(i)
        return f"{self.files[n].name}:{window}"


def _check_ids(path: str, tokens: np.ndarray, vocab_size: int) -> None:
    for start in range(0, len(tokens), CHECK_CHUNK):
        chunk = tokens[start : start + CHECK_CHUNK]
        if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
            at = int(np.argmax((chunk >= vocab_size) | (chunk < 0)))
            raise UserError(
                f"{path} has token {int(chunk[at])} at index {start + at}, outside the vocabulary of {vocab_size}; "
                "set config.data.token_dtype or config.data.tokenizer to match the file"
            )
