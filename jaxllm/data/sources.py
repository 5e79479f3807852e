"""Corpora as documents in random order, and the split into training and validation.

Every source is read through once when it is opened, so that a bad byte, line, row or token stops the run
before its first step and not in its thousandth. After that a document is read from disk when it is asked for.
Compressed and columnar files have no cheap random access: their texts are kept, uncompressed, in an unnamed
temporary file (in $TMPDIR) for as long as the source is open.

A document is {"name": str, "text": str}, or {"name": str, "tokens": integer array [n]} from the tokens source.
Names say where it came from, and do not depend on the machine:

  python   the file, relative to the standard library
  text     file:byte offset; files are cut at line boundaries into documents of up to 64 KiB
  jsonl    file:line, from 1
  parquet  file:row, from 0
  tokens   file:window, from 0; windows overlap by one token, so that each token but the first is a target once

A document is held out when a hash of its name falls below config.data.validation_fraction. The text source
hashes the name of the file where there are several files, so that none is in both parts.
"""

import array
import codecs
import glob
import gzip
import hashlib
import io
import json
import mmap
import os
import pathlib
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import zstandard

from jaxllm.config import DataConfig
from jaxllm.errors import UserError

PIECE_BYTES = 64 * 1024  # longest document of the text source
LONE_FILE_PIECES = 20  # at least so many documents from a single text file, so that some can be held out
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_LIBRARY_SKIPS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_CHUNK = 1 << 20  # bytes or tokens checked at a time


class File(NamedTuple):
    name: str  # relative to the part of the pattern before its first wildcard
    path: str


def too_short(sequence_length: int, targets: int) -> UserError:
    """The error for data that does not fill one sequence."""
    return UserError(
        f"config.data.sequence_length ({sequence_length}) is longer than the data ({targets} tokens to train on); "
        "shorten the first, or give more in config.data.path"
    )


class Documents:
    """Random access to documents; see the module's docstring for what one is."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, i: int) -> dict[str, Any]:
        raise NotImplementedError

    def name(self, i: int) -> str:
        """Name of document i, without reading it."""
        raise NotImplementedError

    def group(self, i: int) -> str:
        """What is held out together with document i: by itself, unless a source says otherwise."""
        return self.name(i)


class Subset(Documents):
    """Some documents of another source, by index."""

    def __init__(self, documents: Documents, indices: Sequence[int]):
        self.documents, self.indices = documents, array.array("q", indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.documents[self.indices[i]]

    def name(self, i: int) -> str:
        return self.documents.name(self.indices[i])


class PythonLibrary(Documents):
    """The standard library's own source: a corpus that every machine has.

    Left out, by rule and without a word: installed packages, tests, empty files, and files that are not UTF-8
    (some exist to exercise other encodings).
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
    """Plain text, cut at line boundaries.

    Raises:
      UserError: a file that is not UTF-8.
    """

    def __init__(self, files: Sequence[File]):
        self.files = files
        self._of_file, self._start, self._stop = array.array("q"), array.array("q"), array.array("q")
        for n, file in enumerate(files):
            with open(file.path, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check_utf8(file.path, data)
                limit = PIECE_BYTES if len(files) > 1 else min(PIECE_BYTES, max(256, len(data) // LONE_FILE_PIECES))
                start = 0
                while start < len(data):
                    stop = _cut(data, start, limit)
                    self._of_file.append(n)
                    self._start.append(start)
                    self._stop.append(stop)
                    start = stop

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, i: int) -> dict[str, Any]:
        with open(self.files[self._of_file[i]].path, "rb") as handle:
            handle.seek(self._start[i])
            return {"name": self.name(i), "text": handle.read(self._stop[i] - self._start[i]).decode()}

    def name(self, i: int) -> str:
        return f"{self.files[self._of_file[i]].name}:{self._start[i]}"

    def group(self, i: int) -> str:
        return self.files[self._of_file[i]].name if len(self.files) > 1 else self.name(i)


def _cut(data: mmap.mmap, start: int, limit: int) -> int:
    """End of the document at `start`: after the last line that fits, or between two characters of a longer line."""
    stop = start + limit
    if stop >= len(data):
        return len(data)
    line = data.rfind(b"\n", start, stop) + 1
    if line > start:
        return line
    while data[stop] & 0xC0 == 0x80:  # inside a character
        stop -= 1
    return stop


def _check_utf8(path: str, data: mmap.mmap) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    stop = 0
    try:
        while stop < len(data):
            chunk = data[stop : stop + _CHUNK]
            stop += len(chunk)
            decoder.decode(chunk, final=stop == len(data))
    except UnicodeDecodeError as error:
        # The decoder counts from what it held back of the chunk before.
        offset = stop - len(error.object) + error.start
        raise UserError(
            f"{path} is not UTF-8 at byte {offset} ({error.reason}); convert it, for instance with iconv -t UTF-8"
        ) from error


class Rows(Documents):
    """One text a line (JSON Lines, plain or .gz or .zst) or a row (Parquet). Rows of empty text are left out.

    Raises:
      UserError: names file:line or file:row, and what is wrong there.
    """

    def __init__(self, files: Sequence[File], field: str, parquet: bool):
        self.files, self.field = files, field
        self._of_file, self._row = array.array("q"), array.array("q")
        self._start, self._stop = array.array("q"), array.array("q")
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed, and so removed, with this object)
        self._spooled = [parquet or file.path.endswith((".gz", ".zst")) for file in files]
        for n, file in enumerate(files):
            start = self._spool.tell() if self._spooled[n] else 0
            for row, text, size in _parquet_texts(file, field) if parquet else _jsonl_texts(file, field):
                data = _encoded(text, f"{file.path}:{row}")
                size = len(data) if self._spooled[n] else size
                if data:
                    self._of_file.append(n)
                    self._row.append(row)
                    self._start.append(start)
                    self._stop.append(start + size)
                    if self._spooled[n]:
                        self._spool.write(data)
                start += size
        self._spool.flush()  # before it is read through its descriptor

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, i: int) -> dict[str, Any]:
        n, start, size = self._of_file[i], self._start[i], self._stop[i] - self._start[i]
        if self._spooled[n]:
            # pread has no file position, which the reading threads would share.
            return {"name": self.name(i), "text": os.pread(self._spool.fileno(), size, start).decode()}
        with open(self.files[n].path, "rb") as handle:
            handle.seek(start)
            return {"name": self.name(i), "text": json.loads(handle.read(size))[self.field]}

    def name(self, i: int) -> str:
        return f"{self.files[self._of_file[i]].name}:{self._row[i]}"


def _encoded(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} has half of a surrogate pair at character {error.start}; mend the escape") from error


def _jsonl_texts(file: File, field: str) -> Iterator[tuple[int, str, int]]:
    """(line from 1, its text, its bytes with the line end) of every line; a blank line has text ""."""
    try:
        with _open_lines(file.path) as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file.path}:{number}"
                try:
                    record = json.loads(line) if line.strip() else {field: ""}
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{where} is not UTF-8 at byte {error.start} of the line; convert the file"
                    ) from error
                except ValueError as error:
                    raise UserError(f"{where} is not JSON ({error}); mend or remove the line") from error
                if not isinstance(record, dict) or field not in record:
                    has = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}, not an object"
                    raise UserError(f"{where} has no field {field!r} (it has {has}); set config.data.text_field")
                if not isinstance(record[field], str):
                    kind = type(record[field]).__name__
                    raise UserError(f"{where} has {field!r} of type {kind}, not a string; set config.data.text_field")
                yield number, record[field], len(line)
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise UserError(f"{file.path} cannot be read ({error}); check that the file is whole") from error


def _open_lines(path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.endswith(".zst"):
        source = open(path, "rb")  # noqa: SIM115 (closed with the reader)
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True))
    return open(path, "rb")


def _parquet_texts(file: File, field: str) -> Iterator[tuple[int, str, int]]:
    """(row from 0, its text, 0) of every row."""
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        table = pyarrow.parquet.ParquetFile(file.path)
        names = table.schema_arrow.names
        if field not in names:
            raise UserError(
                f"{file.path} has no column {field!r} (it has {', '.join(names)}); set config.data.text_field"
            )
        for batch in table.iter_batches(columns=[field]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    kind = "null" if text is None else type(text).__name__
                    raise UserError(
                        f"{file.path}:{row} has {field!r} of type {kind}, not a string; drop or fix the row"
                    )
                yield row, text, 0
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file.path} is not Parquet ({str(error).splitlines()[0]}); check config.data.path") from error


class TokenFiles(Documents):
    """Flat arrays of token ids, as nanoGPT writes them, in windows of sequence_length targets.

    Raises:
      UserError: a size that is no whole number of tokens, or an id that is not in the vocabulary.
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
                raise UserError(f"{file.path} has {size} bytes, not a multiple of {item}; set config.data.token_dtype")
            tokens = np.memmap(file.path, config.token_dtype, "r")
            _check_ids(file.path, tokens, vocab_size)
            self._tokens.append(tokens)
        windows = [-(-(len(tokens) - 1) // self._length) for tokens in self._tokens]
        self._first = np.concatenate([[0], np.cumsum(windows)])  # window each file begins with
        longest = max(len(tokens) for tokens in self._tokens)
        if longest <= self._length:
            # Said here, before the hold-out finds too few windows and blames their number.
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
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
            at = int(np.argmax((chunk >= vocab_size) | (chunk < 0)))
            raise UserError(
                f"{path} has token {int(chunk[at])} at index {start + at}, outside the vocabulary of {vocab_size}; "
                "set config.data.tokenizer to the one that made it, or config.data.token_dtype"
            )


def find_files(pattern: str, field: str = "path") -> list[File]:
    """Files that a path or glob (`**` goes into folders) names, sorted by name.

    Args:
      pattern: as the user wrote it.
      field: the configuration field it stands in, for the messages.
    Raises:
      UserError: no file matches, or one is empty.
    """
    pattern = os.path.expanduser(pattern)
    paths = (
        [pattern] if os.path.isfile(pattern) else [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]
    )
    if not paths:
        hint = f"; it is a folder, write {os.path.join(pattern, '*')}" if os.path.isdir(pattern) else "; check the path"
        raise UserError(f"config.data.{field} {pattern!r} matches no file{hint}")
    root = os.path.dirname(pattern if pattern in paths else pattern.split("*")[0].split("?")[0].split("[")[0])
    for path in paths:
        if not os.path.getsize(path):
            raise UserError(f"{path} is empty; remove it, or narrow config.data.{field}")
    return sorted(File(pathlib.Path(os.path.relpath(path, root or ".")).as_posix(), path) for path in paths)


def open_documents(config: DataConfig, files: Sequence[File], vocab_size: int) -> Documents:
    """The source `config.source` over some files (which the python source does not use)."""
    if config.source == "python":
        return PythonLibrary()
    if config.source == "text":
        return TextFiles(files)
    if config.source == "tokens":
        return TokenFiles(files, config, vocab_size)
    return Rows(files, config.text_field, parquet=config.source == "parquet")


class Split(NamedTuple):
    training: Documents
    validation: Documents


def split(config: DataConfig, vocab_size: int) -> Split:
    """Opens the corpus and holds some of it out.

    Args:
      config: source, path, validation_path and validation_fraction are read here.
      vocab_size: ids that a file of tokens may hold.
    Raises:
      UserError: a file that cannot be used, or a part with no documents.
    """
    if config.source == "python":
        if config.validation_path:
            raise UserError("config.data.validation_path is set while config.data.source is 'python'; leave it empty")
        return _held_out(open_documents(config, (), vocab_size), config)
    files = find_files(config.path)
    if not config.validation_path:
        return _held_out(open_documents(config, files, vocab_size), config)
    held = find_files(config.validation_path, "validation_path")
    real = {os.path.realpath(file.path) for file in held}
    files = [file for file in files if os.path.realpath(file.path) not in real]  # a glob may match both
    if not files:
        raise UserError(
            "config.data.validation_path covers every file of config.data.path: no documents left for training"
        )
    return _nonempty(Split(*(open_documents(config, part, vocab_size) for part in (files, held))))


def _held_out(documents: Documents, config: DataConfig) -> Split:
    scores: dict[str, float] = {}
    groups = [documents.group(i) for i in range(len(documents))]
    for group in groups:
        if group not in scores:
            digest = hashlib.blake2b(group.encode("utf-8", "surrogateescape"), digest_size=8).digest()
            scores[group] = int.from_bytes(digest, "big") / 2**64
    held = {group for group, score in scores.items() if score < config.validation_fraction}
    if not held and len(scores) > 1:
        held = {min(scores, key=lambda group: scores[group])}
    if len(scores) == 1:
        raise UserError(
            f"{groups[0]} is the only document: no documents left for validation; set config.data.validation_path"
        )
    training = [i for i, group in enumerate(groups) if group not in held]
    validation = [i for i, group in enumerate(groups) if group in held]
    return _nonempty(Split(Subset(documents, training), Subset(documents, validation)))


def _nonempty(parts: Split) -> Split:
    if not len(parts.training):
        raise UserError(
            "no documents left for training; lower config.data.validation_fraction, or give more in config.data.path"
        )
    if not len(parts.validation):
        raise UserError("no documents left for validation; give config.data.validation_path a file with text in it")
    return parts
