"""Text records as documents: JSON Lines, plain or compressed, and Parquet.

Compressed and columnar files have no cheap random access. Their texts are stored uncompressed in an unnamed temporary
file (in $TMPDIR) while the source is open.
"""

import array
import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import zstandard

from jaxllm.data.documents import Documents, File
from jaxllm.errors import UserError


class Rows(Documents):
    """Documents from JSON Lines (plain, .gz or .zst; one per line) or Parquet (one per row); skips empty texts.

    Args:
      files: the files to read.
      field: JSON key or Parquet column of the text.
      parquet: True for Parquet, False for JSON Lines.
    Raises:
      UserError: a record is invalid; names file:line or file:row, and the problem.
    """

    def __init__(self, files: Sequence[File], field: str, parquet: bool):
        self.files, self.field = files, field
        self._file_index, self._row = array.array("q"), array.array("q")
        self._start, self._stop = array.array("q"), array.array("q")
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed, and so removed, with this object)
        self._spooled = [parquet or file.path.endswith((".gz", ".zst")) for file in files]
        for n, file in enumerate(files):
            start = self._spool.tell() if self._spooled[n] else 0
            for row, text, size in _parquet_texts(file, field) if parquet else _jsonl_texts(file, field):
                data = _encode_utf8(text, f"{file.path}:{row}")
                size = len(data) if self._spooled[n] else size
                if data:
                    self._file_index.append(n)
                    self._row.append(row)
                    self._start.append(start)
                    self._stop.append(start + size)
                    if self._spooled[n]:
                        self._spool.write(data)
                start += size
        self._spool.flush()  # before reads through the file descriptor

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, i: int) -> dict[str, Any]:
        n, start, size = self._file_index[i], self._start[i], self._stop[i] - self._start[i]
        if self._spooled[n]:
            # pread does not use the file position, which the reading threads share.
            return {"name": self.name(i), "text": os.pread(self._spool.fileno(), size, start).decode()}
        with open(self.files[n].path, "rb") as handle:
            handle.seek(start)
            return {"name": self.name(i), "text": json.loads(handle.read(size))[self.field]}

    def name(self, i: int) -> str:
        return f"{self.files[self._file_index[i]].name}:{self._row[i]}"


def _encode_utf8(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} has an unpaired surrogate at character {error.start}; fix the escape") from error


def _jsonl_texts(file: File, field: str) -> Iterator[tuple[int, str, int]]:
    """Yields (line number from 1, text, bytes of the line with its end) for every line; a blank line has text ""."""
    for number, line, record in json_lines(file):
        where = f"{file.path}:{number}"
        if not line.strip():
            record = {field: ""}
        if not isinstance(record, dict) or field not in record:
            is_object = isinstance(record, dict)
            kind = f"has {', '.join(record)}" if is_object else f"is a {type(record).__name__}, not an object"
            raise UserError(f"{where} has no field {field!r} (it {kind}); set config.data.text_field")
        if not isinstance(record[field], str):
            kind = type(record[field]).__name__
            raise UserError(f"{where} has {field!r} of type {kind}, not a string; set config.data.text_field")
        yield number, record[field], len(line)


def json_lines(file: File) -> Iterator[tuple[int, bytes, Any]]:
    """Yields (line number from 1, the line with its end, parsed value) for every line; None for a blank line.

    Raises:
      UserError: a line is not UTF-8 or not JSON (names file:line and the problem), or the file is not readable.
    """
    try:
        with _open_lines(file.path) as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file.path}:{number}"
                try:
                    value = json.loads(line) if line.strip() else None
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{where} is not UTF-8 at byte {error.start} of the line; convert the file to UTF-8"
                    ) from error
                except ValueError as error:
                    raise UserError(f"{where} is not JSON ({error}); fix or remove the line") from error
                yield number, line, value
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise UserError(f"{file.path} cannot be read ({error}); check that the file is complete") from error


def _open_lines(path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.endswith(".zst"):
        source = open(path, "rb")  # noqa: SIM115 (closed with the reader)
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True))
    return open(path, "rb")


def _parquet_texts(file: File, field: str) -> Iterator[tuple[int, str, int]]:
    """Yields (row from 0, text, 0) for every row; the 0 matches the tuples of `_jsonl_texts`."""
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
                        f"{file.path}:{row} has {field!r} of type {kind}, not a string; fix or remove the row"
                    )
                yield row, text, 0
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{file.path} is not a Parquet file ({str(error).splitlines()[0]}); check config.data.path"
        ) from error
