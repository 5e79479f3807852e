"""Parser of the GGUF header: metadata and tensor locations.

Source: the GGUF specification in the ggml project (docs/gguf.md), versions 2 and 3, little-endian. The reader of the
`gguf` package creates several NumPy arrays for every token and merge and takes most of a minute on a vocabulary of
Llama 3's size; this one takes a second.
"""

import dataclasses
import math
import mmap
import pathlib
import struct
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jaxllm.errors import UserError

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_MAX_DIMENSIONS = 4  # limit of ggml tensors


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Type, shape and location of a tensor in its file.

    Attributes:
      kind: storage type.
      shape: rows first, as in NumPy; the file has the reverse order.
      start: offset of the first byte in the file.
      nbytes: size in bytes.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """Parsed header of a GGUF file.

    Attributes:
      values: metadata by key. A float32 is returned as the shortest decimal that rounds to it, e.g. 1e-05.
      tensors: tensor locations by name.
      data: memory map of the whole file.
    """

    values: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap


def read_header(path: pathlib.Path) -> Header:
    """Reads the header of a file and checks that all tensors are within the file.

    Raises:
      UserError: the file is missing, not GGUF, of another version or byte order, truncated, or has a tensor of an
        unknown type.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24 or file.read(4) != b"GGUF":
            raise UserError(f"{path} is not a GGUF file; give a model file of llama.cpp")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _parse(data, path)
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is truncated or damaged ({size} bytes; {error}); download it again") from error


def _parse(data: mmap.mmap, path: pathlib.Path) -> Header:
    cursor = _Cursor(data, 4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        fix = "convert it with gguf-convert-endian FILE little" if swapped else "convert the model again"
        raise UserError(f"{path} is GGUF {'big-endian' if swapped else f'version {version}'}; {fix}")
    count, keys = cursor.scalar("Q"), cursor.scalar("Q")
    values: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.string()
        values[key] = cursor.value(GGUFValueType(cursor.scalar("I")))
    found = [(cursor.string(), *_tensor_info(cursor)) for _ in range(count)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    base = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape, offset in found:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError as error:
            raise UserError(f"{path}: tensor {name} has the unknown type {kind}; use another file") from error
        block, size = GGML_QUANT_SIZES[known]
        nbytes = math.prod(shape) // block * size
        if name in tensors or shape[-1] % block or base + offset + nbytes > len(data):
            raise UserError(f"{path}: tensor {name} is truncated or occurs twice; download the file again")
        tensors[name] = TensorInfo(known, shape, base + offset, nbytes)
    return Header(values, tensors, data)


def _tensor_info(cursor: "_Cursor") -> tuple[int, tuple[int, ...], int]:
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
    return cursor.scalar("I"), shape, cursor.scalar("Q")


class _Cursor:
    """Sequential reader of the header; a read past the end raises `struct.error` or ValueError."""

    def __init__(self, data: mmap.mmap, offset: int):
        self._data = data
        self.offset = offset

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.offset)
        self.offset += struct.calcsize(code)
        return value

    def string(self) -> str:
        return self._bytes(self.scalar("Q")).decode("utf-8")

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is GGUFValueType.ARRAY:
            inner, count = GGUFValueType(self.scalar("I")), self.scalar("Q")
            if inner in _SCALARS:
                dtype = np.dtype(_SCALARS[inner]).newbyteorder("<")
                return np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()
            return [self.value(inner) for _ in range(count)]
        value = self.scalar(_SCALARS[kind])
        return float(str(np.float32(value))) if kind is GGUFValueType.FLOAT32 else value

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.offset:
            raise ValueError("the header goes past the end")
        self.offset += count
        return self._data[self.offset - count : self.offset]
