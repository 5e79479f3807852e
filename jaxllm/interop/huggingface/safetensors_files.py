"""Reads the tensors of safetensors files as memory-mapped views, and writes such files one tensor at a time.

Format: 8 bytes with the length of the JSON header, little-endian; the header, {name: {dtype, shape, data_offsets}};
the elements, row-major. A checkpoint of several files has an index that maps each tensor to its file. Source: README of
the safetensors project. The safetensors library is not used because not all supported versions have bfloat16 for NumPy,
and because it reads and writes whole tensors; from a memory map, a device's shard can be read alone.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.errors import UserError
from jaxllm.interop import copying

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Supported dtypes by their names in the format. Its others (integers, float8) are quantized weights.
_INTEGERS = {"I32": np.int32, "I64": np.int64}
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
# The safetensors library rejects longer headers.
_MAX_HEADER_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class Entry:
    """Location of a tensor: bytes [begin, end) of a file."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFiles:
    """Tensors of a checkpoint, read one at a time by name.

    Args:
      entries: entry of each tensor, as returned by `read_header`.
    """

    def __init__(self, entries: Mapping[str, Entry]):
        self.entries = entries
        self._maps: dict[pathlib.Path, np.memmap] = {}

    def dtype(self) -> np.dtype:
        """Returns the common dtype of all floating-point tensors; float32 if they differ or are float64."""
        found = {np.dtype(_DTYPES[entry.dtype]) for entry in self.entries.values() if entry.dtype in _DTYPES}
        return found.pop() if len(found) == 1 and np.dtype(np.float64) not in found else np.dtype(np.float32)

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as a view of its memory-mapped file.

        Raises:
          UserError: its dtype is not F64, F32, F16 or BF16.
        """
        return self._view(name, _DTYPES, "use a checkpoint that is not quantized")

    def read_integers(self, name: str) -> np.ndarray:
        """Returns an integer tensor, such as packed codes, as a view of its memory-mapped file.

        Raises:
          UserError: its dtype is not I32 or I64.
        """
        return self._view(name, _INTEGERS, "use the files of one release")

    def _view(self, name: str, dtypes: Mapping[str, Any], fix: str) -> np.ndarray:
        entry = self.entries[name]
        if entry.dtype not in dtypes:
            raise UserError(
                f"{entry.file}: {name} has the unsupported dtype {entry.dtype}; supported values are "
                f"{', '.join(dtypes)}: {fix}"
            )
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, mode="r")
        return np.ndarray(entry.shape, dtypes[entry.dtype], self._maps[entry.file], entry.begin)


def open_tensors(folder: pathlib.Path) -> TensorFiles:
    """Opens the checkpoint in a folder: checks every file, but reads only the headers.

    Args:
      folder: folder with an index and its files, or with `model.safetensors`.
    Raises:
      UserError: a file is missing, truncated or not in the format, or the index does not match the files.
    """
    entries: dict[str, Entry] = {}
    files = _index_files(folder) if (folder / INDEX).is_file() else {_single_file(folder): None}
    for path, listed in files.items():
        found = read_header(path)
        if listed is not None:
            _check_index(path, listed, set(found))
        entries |= found
    return TensorFiles(entries)


def read_header(path: pathlib.Path) -> dict[str, Entry]:
    """Reads the header of a file and checks that every tensor's data is complete.

    Raises:
      UserError: the file is missing, truncated or not in the format; the message names the incomplete tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise UserError(
                    f"{path} has a truncated header or is not a safetensors file ({size:,} bytes); download it again"
                )
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = {
            name: Entry(
                path,
                str(fields["dtype"]),
                tuple(int(n) for n in fields["shape"]),
                *(8 + length + int(offset) for offset in fields["data_offsets"]),
            )
            for name, fields in header.items()
        }
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); download it again") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} has an invalid safetensors header; download it again") from error
    for name, entry in entries.items():
        if entry.end > size:
            raise UserError(
                f"{path} is truncated: {name} ends at byte {entry.end:,} and the file has {size:,}; download it again"
            )
        dtype = (_DTYPES | _INTEGERS).get(entry.dtype)
        wanted = None if dtype is None else int(np.prod(entry.shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if entry.begin > entry.end or wanted not in (None, entry.end - entry.begin):
            raise UserError(
                f"{path}: {name} {entry.dtype}{list(entry.shape)} has {entry.end - entry.begin:,} bytes instead of "
                f"{wanted:,}; download it again"
            )
    return entries


def _single_file(folder: pathlib.Path) -> pathlib.Path:
    path = folder / SINGLE_FILE
    if not path.is_file():
        others = sorted(p.name for p in folder.glob("*.safetensors")) or sorted(p.name for p in folder.glob("*.bin"))
        has = f"; it has {', '.join(others[:3])}{' …' if len(others) > 3 else ''}" if others else ""
        raise UserError(
            f"{folder} has no {SINGLE_FILE} and no {INDEX}{has}; use a folder with safetensors files and their index"
        )
    return path


def _index_files(folder: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """Maps each file to the tensors that the index assigns to it."""
    try:
        weight_map = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        files: dict[pathlib.Path, set[str] | None] = {}
        for name, file in weight_map.items():
            files.setdefault(folder / file, set()).add(name)  # type: ignore[union-attr]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{folder / INDEX} is not a valid index of safetensors files; download it again") from error
    for path, names in files.items():
        if not path.is_file():
            assert names
            raise UserError(
                f"{path} not found; {INDEX} lists {len(names)} tensors in it, including {min(names)}: download it"
            )
    return files


def _check_index(path: pathlib.Path, listed: set[str], found: set[str]) -> None:
    missing, unexpected = sorted(listed - found), sorted(found - listed)
    if missing or unexpected:
        parts = [f"{', '.join(missing)} not found, although listed in {INDEX}"] * bool(missing)
        parts += [f"{', '.join(unexpected)} not listed in {INDEX}"] * bool(unexpected)
        raise UserError(f"{path}: {'; '.join(parts)}; use the index and the files of one release")


def write_checkpoint(
    folder: pathlib.Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    tensors: Iterable[tuple[str, np.ndarray]],
    shard_bytes: int,
) -> None:
    """Writes a checkpoint, with an index if it has several files; one tensor is in memory at a time.

    Args:
      folder: existing folder.
      shapes: shapes of all tensors, in the order of `tensors`.
      dtype: dtype of all tensors.
      tensors: (name, array) of every tensor.
      shard_bytes: maximum bytes of tensor data per file; a larger tensor gets a file of its own.
    """
    shards = _shards({name: int(np.prod(shape)) * dtype.itemsize for name, shape in shapes.items()}, shard_bytes)
    single = len(shards) == 1
    files = [
        SINGLE_FILE if single else f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]
    remaining = iter(tensors)
    for file, names in zip(files, shards, strict=True):
        write_file(folder / file, {name: shapes[name] for name in names}, dtype, remaining)
    assert next(remaining, None) is None, "more tensors than shapes"
    if not single:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Groups the tensor names into files; starts a new file when the next tensor would exceed the limit."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_file(
    path: pathlib.Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    tensors: Iterator[tuple[str, np.ndarray]],
) -> None:
    """Writes one file. `tensors` must yield in the order of `shapes`. An existing file is not overwritten.

    Raises:
      FileExistsError: the file exists.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers rejects a file without it
    at = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensor data
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            yielded, tensor = next(tensors)
            assert (yielded, tensor.shape) == (name, shape), (yielded, tensor.shape, name, shape)
            file.write(copying.as_contiguous(tensor, dtype).reshape(-1).view(np.uint8).data)
