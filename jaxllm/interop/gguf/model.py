"""Import and export of models in GGUF, llama.cpp's file format, with tokenizer and chat template."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop import copying, rules
from jaxllm.interop.gguf import families, keys, rope, tensors, vocabulary
from jaxllm.interop.gguf import tokenizer as tokenizers
from jaxllm.interop.gguf.file import TensorFile, open_tensors
from jaxllm.interop.gguf.metadata import describe
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.tokenizer import Tokenizer

# Quantizations that `write` supports -> llama.cpp's file type.
QUANTIZATIONS = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}
_KEPT = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BLOCKS_VERSION = 2  # general.quantization_version: layout of quantized blocks


def open_file(path: str | pathlib.Path) -> Pretrained:
    """Opens a model in a GGUF file, or in several files, without reading its weights.

    Unquantized tensors load bit-exactly, except Gemma's norms: a file stores them as 1 + w, and they load as w.

    Args:
      path: the file, or the first of several.
    Raises:
      UserError: the file is damaged, or a key, a tensor or the tokenizer is missing, unknown or not supported.
    """
    file = open_tensors(path)
    metadata = file.metadata
    described = describe(metadata, file.shapes, file.read)
    model, layout = described.model, described.layout
    table = tensors.rules(model, layout)
    rules.check(table, file.shapes, str(path), described.constants)
    rules.check_shapes(model, table, file.shapes.__getitem__)
    tokenizer = None
    if metadata.get("tokenizer.ggml.model", str) not in (None, "none", "no_vocab"):
        tokenizer = tokenizers.read(metadata)
        if tokenizer.vocab_size > model.vocab_size:
            counts = f"{tokenizer.vocab_size} tokens and {model.vocab_size} embeddings"
            raise UserError(f"{path} has {counts}; fetch it again")

    def load(dtype: jax.typing.DTypeLike, shardings: Any) -> Any:
        return rules.load(model, table, file.read, dtype, shardings)

    return Pretrained(
        source=str(path),
        model=model,
        loader=load,
        quantization=_quantization(file),
        family=described.family,
        tokenizer=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template", str),
        special={} if tokenizer is None else tokenizers.special_names(metadata),
        end_ids=() if tokenizer is None else tokenizer.end_ids,
    )


def _quantization(file: TensorFile) -> str:
    """Returns the quantization with which `write` produces the same tensor types; "" if there is none."""
    nothing = {name: np.broadcast_to(np.zeros((), np.uint8), shape) for name, shape in file.shapes.items()}
    same = (q for q in QUANTIZATIONS if all(file.kind(k) == tensors.stored(k, x, q) for k, x in nothing.items()))
    return next(same, "")


def kept(opened: Pretrained) -> str:
    """Returns the lossless quantization of a model: that of its GGUF file, or the one of its stored dtype."""
    return opened.quantization or _KEPT[opened.stored.name]


def write(
    path: str | pathlib.Path,
    model: Architecture,
    params: Any,
    tokenizer: Tokenizer | None,
    *,
    quantization: str,
    chat_template: str | None = None,
    special: Mapping[str, str] | None = None,
    name: str = "",
) -> None:
    """Writes a file that llama.cpp can load, with one tensor in memory at a time.

    Vectors, routers and learned positions are always float32. With Q8_0, matrices whose row length is not a multiple
    of 32 are F16.

    Args:
      path: destination.
      model: the architecture.
      params: the parameter tree, of any floating-point dtype.
      tokenizer: None writes a file without one.
      quantization: a key of `QUANTIZATIONS`.
      chat_template: Jinja source; None if there is none.
      special: special tokens by their names in the template: {"bos_token": "<s>", …}.
      name: display name of the model.
    Raises:
      UserError: GGUF or llama.cpp cannot represent the model or the tokenizer, or an element overflows F16.
    """
    if quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise UserError(f"GGUF quantization {quantization!r} is not written; those that are: {known}")
    family = keys.choose(model)
    named: dict[str, Any] = {
        "general.type": "model",
        **({"general.name": name} if name else {}),
        "general.file_type": int(QUANTIZATIONS[quantization]),
        **({"general.quantization_version": _BLOCKS_VERSION} if quantization == "Q8_0" else {}),
        **keys.values(model, family),
        **vocabulary.values(tokenizer, model.vocab_size, special or {}),
        **({"tokenizer.chat_template": chat_template} if chat_template else {}),
    }
    writer = GGUFWriter(path, family)
    for key, value in named.items():
        _add(writer, key, value)
    table = tensors.rules(model, families.layout(family))

    def each(tell: Callable[[str, np.ndarray, GGMLQuantizationType], None]) -> None:
        for key, constant in rope.constants(model).items():
            tell(key, constant, GGMLQuantizationType.F32)
        for key, tensor in rules.save(model, table, params):
            kind = tensors.stored(key, tensor, quantization)
            tell(key, _encode(key, tensor, kind), GGMLQuantizationType[kind])

    try:
        # Two passes: the offsets of all tensors precede the first tensor in the file.
        each(lambda key, data, kind: writer.add_tensor_info(key, data.shape, data.dtype, data.nbytes, kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        each(lambda key, data, kind: writer.write_tensor_data(data))
    finally:
        writer.close()


def _encode(name: str, tensor: np.ndarray, kind: str) -> np.ndarray:
    if kind == "Q8_0":
        return quantize(copying.contiguous(tensor, np.dtype(np.float32)), GGMLQuantizationType.Q8_0)
    if kind == "BF16":
        return copying.contiguous(tensor, np.dtype(ml_dtypes.bfloat16)).view(np.uint8)
    with np.errstate(over="ignore"):
        made = copying.contiguous(tensor, np.dtype(np.float16 if kind == "F16" else np.float32))
    if kind == "F16" and not np.isfinite(made).all():
        raise UserError(f"{name} has numbers past 65504, which F16 cannot hold; write BF16 or Q8_0")
    return made


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
