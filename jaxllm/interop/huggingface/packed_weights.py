"""Weights of Hugging Face checkpoints that are packed as GPTQ or AWQ write them, presented as plain weights.

A packed linear map X with `inputs` and `outputs`, `bits` per code and P = 32 / bits codes in a word has the tensors

    tensor      GPTQ (AutoGPTQ, GPTQModel)                    AWQ (AutoAWQ, version "gemm")
    X.qweight   int32 [inputs / P, outputs], packed by rows   int32 [inputs, outputs / P], packed by columns
    X.qzeros    int32 [groups, outputs / P], packed by columns
    X.scales    float [groups, outputs]
    X.g_idx     int32 [inputs]: each input's group, optional  none

in place of X.weight: weight[o, i] = scale[g, o] · (code[i, o] − zero[g, o]), where g is the group of input i. Codes
start at a word's lowest bits; AWQ stores columns in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ's first layout
(`checkpoint_format` "gptq", the default) stores zero − 1, modulo 2^bits; "gptq_v2" stores the zero.

Sources: the papers (Frantar et al. 2022; Lin et al. 2023) and the files of releases; the layouts have no specification.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxllm.errors import Notice, UserError
from jaxllm.interop.huggingface.safetensors_files import Entry, TensorFiles

FIELD = "quantization_config"
_WORD_BITS = 32
_BITS = {"gptq": (2, 4, 8), "awq": (4,)}
# AWQ: the column of each code in a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclasses.dataclass(frozen=True)
class PackedFormat:
    """Format of the packed weights of a checkpoint.

    Attributes:
      method: gptq | awq.
      bits: Bits per code.
      symmetric: Whether every zero point is 2^(bits − 1); GPTQ only.
      zero_offset: What is added to a stored zero point: 1 in GPTQ's first layout, else 0.
      not_converted: Modules that have plain weights, by names or trailing or leading parts of names.
      where: The configuration file, for messages.
    """

    method: str
    bits: int
    symmetric: bool
    zero_offset: int
    not_converted: tuple[str, ...]
    where: str


def read_format(table: Any, where: str) -> PackedFormat:
    """Reads `quantization_config`.

    Args:
      table: Its value.
      where: Name of the file, for messages.

    Raises:
      UserError: The method, or one of its settings, is not supported.
    """
    method = table.get("quant_method") if isinstance(table, dict) else None
    if method not in _BITS:
        raise UserError(
            f"{where}: the weights are quantized (quant_method {method!r}), which is unsupported; supported methods "
            f"are {', '.join(_BITS)}: use the release in bfloat16, float16 or float32, or a .gguf file"
        )
    layout = table.get("checkpoint_format", "gptq") if method == "gptq" else table.get("version", "gemm")
    supported = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm", "GEMM")}[method]
    bits = table.get("bits", table.get("w_bit"))
    for name, value, allowed in (("bits", bits, _BITS[method]), ("format", layout, supported)):
        if value not in allowed:
            raise UserError(
                f"{where}: {FIELD} has {name} {value!r}, which is unsupported for {method}; supported values are "
                f"{', '.join(map(str, allowed))}"
            )
    return PackedFormat(
        method=method,
        bits=int(bits),
        symmetric=method == "gptq" and bool(table.get("sym", False)),
        zero_offset=1 if layout == "gptq" else 0,
        not_converted=tuple(table.get("modules_to_not_convert") or ()),
        where=where,
    )


def unpack(words: Int[np.ndarray, "*rows W"], bits: int, order: tuple[int, ...] = ()) -> Int[np.ndarray, "*rows WP"]:
    """Returns the codes of 32-bit words, P = 32 / bits in each, along the last dimension.

    Args:
      words: Packed codes.
      bits: Bits per code.
      order: Position of each code of a word, from the lowest bits; () for increasing order.
    """
    per_word = _WORD_BITS // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    if order:
        codes = codes[..., np.argsort(order)]
    return codes.reshape(*words.shape[:-1], -1).astype(np.int32)


class PackedFiles(TensorFiles):
    """Tensors of a checkpoint whose packed linear maps X appear as `X.weight`, dequantized to float32 when read.

    Args:
      files: The tensors as they are stored.
      packed: Their format.

    Raises:
      UserError: A module has both plain and packed weights, lacks a tensor, or is packed although it is listed as not
        converted; the message names it.
    """

    def __init__(self, files: TensorFiles, packed: PackedFormat):
        self._files, self._packed = files, packed
        entries = dict(files.entries)
        modules = [name.removesuffix(".qweight") for name in entries if name.endswith(".qweight")]
        for module in modules:
            self._check(module)
            weight = entries[f"{module}.qweight"]
            shape = self._shape(module)
            for part in _PARTS:
                entries.pop(f"{module}.{part}", None)
            entries[f"{module}.weight"] = Entry(weight.file, "F32", shape, 0, 0)
        self._modules = frozenset(modules)
        super().__init__(entries)
        if modules and packed.symmetric:
            self._warn_of_wrong_label(modules[0])

    def dtype(self) -> np.dtype:
        """Returns float32, which has the values of 16-bit scales times codes exactly."""
        return np.dtype(np.float32)

    def read(self, name: str) -> np.ndarray:
        module = name.removesuffix(".weight")
        if name == f"{module}.weight" and module in self._modules:
            return self._dequantized(module)
        return self._files.read(name)

    def unused_biases(self, wanted: set[str]) -> set[str]:
        """Returns the biases of packed modules that no rule wants and that are zero, as AutoGPTQ writes them."""
        biases = {f"{module}.bias" for module in self._modules} & self.entries.keys() - wanted
        return {name for name in biases if not np.any(self._files.read(name))}

    def _check(self, module: str) -> None:
        entries = self._files.entries
        file = entries[f"{module}.qweight"].file
        if f"{module}.weight" in entries:
            raise UserError(f"{file}: {module} has both weight and qweight; use the files of one release")
        missing = [part for part in ("qzeros", "scales") if f"{module}.{part}" not in entries]
        if missing:
            raise UserError(f"{file}: {module}.{missing[0]} is missing beside {module}.qweight; download it again")
        for listed in self._packed.not_converted:
            if f".{listed}." in f".{module}.":
                raise UserError(
                    f"{file}: {module} is packed, but {self._packed.where} lists {listed!r} in modules_to_not_convert; "
                    "use the files of one release"
                )

    def _shape(self, module: str) -> tuple[int, int]:
        """Returns (outputs, inputs)."""
        rows, columns = self._files.entries[f"{module}.qweight"].shape
        per_word = _WORD_BITS // self._packed.bits
        return (columns, rows * per_word) if self._packed.method == "gptq" else (columns * per_word, rows)

    def _stored_zeros(self, module: str) -> Int[np.ndarray, "groups outputs"]:
        order = _AWQ_ORDER if self._packed.method == "awq" else ()
        return unpack(self._files.read_integers(f"{module}.qzeros"), self._packed.bits, order)

    def _warn_of_wrong_label(self, module: str) -> None:
        stored, middle = self._stored_zeros(module), 2 ** (self._packed.bits - 1)
        if (stored == middle - self._packed.zero_offset).all():
            return
        label = "gptq" if self._packed.zero_offset else "gptq_v2"
        if (stored == middle - (1 - self._packed.zero_offset)).all():
            warnings.warn(
                f"{self._packed.where}: checkpoint_format is {label!r}, but the zero points of a symmetric file show "
                "the other layout; the zero points are believed",
                Notice,
                stacklevel=2,
            )

    def _dequantized(self, module: str) -> Float[np.ndarray, "outputs inputs"]:
        packed, (outputs, inputs) = self._packed, self._shape(module)
        words = self._files.read_integers(f"{module}.qweight")
        is_gptq = packed.method == "gptq"
        codes = unpack(words.T, packed.bits) if is_gptq else unpack(words, packed.bits, _AWQ_ORDER).T
        scales = np.asarray(self._files.read(f"{module}.scales"), np.float32)
        zeros = self._zeros(module)
        if scales.shape != zeros.shape or scales.shape[1] != outputs or not np.isfinite(scales).all():
            raise UserError(
                f"{module}: its scales {list(scales.shape)} do not fit its zero points {list(zeros.shape)} and "
                f"{outputs} outputs, or are not finite; download the file again"
            )
        groups = self._groups(module, inputs, len(scales))
        return (codes - zeros.T[:, groups]) * scales.T[:, groups]

    def _zeros(self, module: str) -> Int[np.ndarray, "groups outputs"]:
        stored, packed = self._stored_zeros(module), self._packed
        if not packed.symmetric:
            return (stored + packed.zero_offset) & (2**packed.bits - 1)
        middle = 2 ** (packed.bits - 1)
        if not ((stored == middle) | (stored == middle - 1)).all():
            raise UserError(
                f"{module}: {packed.where} says sym, but its zero points are not all {middle}; use the configuration "
                "of the same release"
            )
        return np.full_like(stored, middle)

    def _groups(self, module: str, inputs: int, count: int) -> Int[np.ndarray, " inputs"]:
        """Returns the group of each input."""
        if f"{module}.g_idx" in self._files.entries:
            groups = self._files.read_integers(f"{module}.g_idx")
            if groups.shape != (inputs,) or groups.min() < 0 or groups.max() >= count:
                raise UserError(f"{module}.g_idx does not name one of {count} groups for each of {inputs} inputs")
            return groups
        if inputs % count:
            raise UserError(f"{module}: {inputs} inputs do not divide into the {count} groups of its scales")
        return np.repeat(np.arange(count), inputs // count)


def open_packed(files: TensorFiles, config: Mapping[str, Any], where: str) -> TensorFiles:
    """Returns the tensors of a checkpoint, those of packed modules as plain weights.

    Args:
      files: The tensors as they are stored.
      config: Content of config.json.
      where: Its name, for messages.

    Raises:
      UserError: The quantization is not supported, or the tensors contradict it.
    """
    table = config.get(FIELD)
    return PackedFiles(files, read_format(table, where)) if table else files
