"""Reader of GGUF models, in one or several files: metadata by key and tensors by name.

A quantized tensor is dequantized by the `gguf` package when it is read. At most one is in memory besides the array
built from it.
"""

import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from jaxllm.errors import UserError
from jaxllm.interop.gguf.header import Header, TensorInfo, read_header

# Unquantized types, read as views.
_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Block-quantized types, with scales per block of a row.
_BLOCKS = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)
_CHUNK_ELEMENTS = 1 << 18  # elements dequantized at a time
T = TypeVar("T")


class Metadata:
    """Metadata of a file, with a record of which keys have been read.

    Args:
      values: values by key.
      where: name of the file, for messages.
    Attributes:
      where: name of the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values = values
        self._used: set[str] = set()
        self.where = where

    def require(self, key: str, kind: type[T]) -> T:
        """Returns the value of a required key.

        Raises:
          UserError: the key is missing, or its value is of another type.
        """
        value = self.get(key, kind)
        if value is None:
            raise UserError(f"{self.where} has no {key}; convert the model again with a current llama.cpp")
        return value

    def get(self, key: str, kind: type[T]) -> T | None:
        """Returns the value of a key; None if the key is missing.

        Raises:
          UserError: the value is of another type; an int is accepted for a float.
        """
        self._used.add(key)
        value: Any = self._values.get(key)
        if value is not None and type(value) is not kind and not (kind is float and type(value) is int):
            raise UserError(
                f"{self.where}: {key} is {value!r:.60}, not of type {kind.__name__}; download the file again, or "
                "convert the model again"
            )
        return cast(T | None, value)

    def raw(self, key: str) -> Any:
        """Returns the value of a key, of any type; None if the key is missing."""
        self._used.add(key)
        return self._values.get(key)

    def unread(self, prefix: str) -> list[str]:
        """Lists the keys with a prefix that have not been read, sorted."""
        return sorted(key for key in self._values if key.startswith(prefix) and key not in self._used)


class FamilyKeys:
    """Metadata keys of one family, read without the prefix of the family's name.

    Args:
      metadata: metadata of the file.
      family: name of the family.
    """

    def __init__(self, metadata: Metadata, family: str):
        self.metadata = metadata
        self.family = family

    def size(self, key: str, default: int | None = None) -> int:
        name = f"{self.family}.{key}"
        if default is None:
            return self.metadata.require(name, int)
        found = self.metadata.get(name, int)
        return default if found is None else found

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self.family}.{key}"
        if default is None:
            return float(self.metadata.require(name, float))
        found = self.metadata.get(name, float)
        return default if found is None else float(found)

    def expect(self, key: str, allowed: Any) -> None:
        """Checks that a key is missing or has the allowed value (None: any value)."""
        value = self.metadata.raw(f"{self.family}.{key}")
        if value is not None and allowed is not None and value != allowed:
            raise UserError(f"{self.metadata.where}: {self.family}.{key} is {value!r:.60}; it must be {allowed!r}")


class TensorFile:
    """Tensors of a model, read one at a time by name.

    Args:
      headers: headers of the model's files.
      where: name of the (first) file, for messages.
    Attributes:
      shapes: shape of each tensor, rows first.
      metadata: metadata of the (first) file.
    Raises:
      UserError: a tensor is in two files, or its type is not supported.
    """

    def __init__(self, headers: Sequence[Header], where: str):
        self._tensors: dict[str, tuple[Header, TensorInfo]] = {}
        for header in headers:
            for name, info in header.tensors.items():
                if name in self._tensors:
                    raise UserError(f"{where}: tensor {name} is in two of its files; use the files of one model")
                if info.kind not in _PLAIN and info.kind not in _BLOCKS:
                    known = ", ".join(kind.name for kind in (*_PLAIN, *_BLOCKS))
                    raise UserError(
                        f"{where}: {name} has the unsupported type {info.kind.name}; supported types are {known}"
                    )
                self._tensors[name] = header, info
        self.shapes = {name: info.shape for name, (_, info) in self._tensors.items()}
        self.metadata = Metadata(headers[0].values, where)

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor: a view of the file if it is unquantized, else dequantized to float32."""
        header, info = self._tensors[name]
        data = np.frombuffer(header.data, np.uint8, info.nbytes, info.start)
        if info.kind in _PLAIN:
            return data.view(_PLAIN[info.kind]).reshape(info.shape)
        rows, columns = data.reshape(-1, info.nbytes * info.shape[-1] // math.prod(info.shape)), info.shape[-1]
        out = np.empty((len(rows), columns), np.float32)
        step = max(1, _CHUNK_ELEMENTS // columns)
        for i in range(0, len(rows), step):  # bounds memory: the library makes several copies of its input
            out[i : i + step] = dequantize(rows[i : i + step], info.kind)
        return out.reshape(info.shape)

    def kind(self, name: str) -> str:
        """Returns the storage type of a tensor: "F16", "Q4_K", …"""
        return self._tensors[name][1].kind.name


def open_tensors(path: str | pathlib.Path) -> TensorFile:
    """Opens the file of a model, or the first of several ("…-00001-of-00003.gguf"), without reading its tensors.

    Raises:
      UserError: a file is not GGUF, truncated or missing, or a tensor type is not supported.
    """
    path = pathlib.Path(path)
    headers = [read_header(path)]
    total = Metadata(headers[0].values, str(path)).get("split.count", int) or 1
    if total > 1:
        match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
        if not match or int(match[2]) != total:
            raise UserError(f"{path} is one of {total} files; give the first one, NAME-00001-of-{total:05d}.gguf")
        names = [f"{match[1]}-{number:05d}-of-{total:05d}.gguf" for number in range(2, total + 1)]
        headers += [read_header(path.with_name(name)) for name in names]
    return TensorFile(headers, str(path))
