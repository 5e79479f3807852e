"""Import and export of models in GGUF, llama.cpp's file format, with tokenizer and chat template."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop import copying, rules
from jaxllm.interop.gguf import keys, rope, tensors, vocabulary
from jaxllm.interop.gguf import tokenizer as tokenizers
from jaxllm.interop.gguf.file import Metadata, TensorFile, open_tensors
from jaxllm.interop.gguf.metadata import layout_of, parse_metadata
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.text import Text

# Quantizations that `write` supports -> llama.cpp's file type.
QUANTIZATIONS = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}
_LOSSLESS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
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
    parsed = parse_metadata(metadata, file.shapes, file.read)
    model, layout = parsed.model, parsed.layout
    mappings = tensors.build_rules(model, layout)
    rules.check(mappings, file.shapes, str(path), parsed.constants)
    rules.check_shapes(model, mappings, file.shapes.__getitem__)

    def load(dtype: jax.typing.DTypeLike, shardings: Any) -> Any:
        return rules.load(model, mappings, file.read, dtype, shardings)

    return Pretrained(
        source=str(path),
        model=model,
        loader=load,
        quantization=_quantization(file),
        family=parsed.family,
        text=_text(metadata, model.vocab_size),
    )


def _text(metadata: Metadata, vocab_size: int) -> Text:
    template = metadata.get("tokenizer.chat_template", str)
    if metadata.get("tokenizer.ggml.model", str) in (None, "none", "no_vocab"):
        return Text(chat_template=template)
    tokenizer = tokenizers.read_tokenizer(metadata)
    if tokenizer.vocab_size > vocab_size:
        counts = f"{tokenizer.vocab_size} tokens and {vocab_size} embeddings"
        raise UserError(f"{metadata.where} has {counts}; download it again")
    return Text(tokenizer, template, tokenizers.special_tokens(metadata), tokenizer.end_ids)


def _quantization(file: TensorFile) -> str:
    """Returns the quantization with which `write` produces the same tensor types; "" if there is none."""
    empty = {name: np.broadcast_to(np.zeros((), np.uint8), shape) for name, shape in file.shapes.items()}
    matching = (
        q for q in QUANTIZATIONS if all(file.kind(k) == tensors.storage_type(k, x, q) for k, x in empty.items())
    )
    return next(matching, "")


def lossless_quantization(opened: Pretrained) -> str:
    """Returns the lossless quantization of a model: that of its GGUF file, or the one of its stored dtype."""
    return opened.quantization or _LOSSLESS[opened.stored.name]


def write(
    path: str | pathlib.Path,
    model: Architecture,
    params: Any,
    text: Text,
    *,
    quantization: str,
    name: str = "",
) -> None:
    """Writes a file that llama.cpp can load, with one tensor in memory at a time.

    Vectors, routers and learned positions are always float32. With Q8_0, matrices whose row length is not a multiple
    of 32 are F16.

    Args:
      path: destination.
      model: the architecture.
      params: the parameter tree, of any floating-point dtype.
      text: tokenizer and chat template; a part that is missing is not written.
      quantization: a key of `QUANTIZATIONS`.
      name: display name of the model.
    Raises:
      UserError: GGUF or llama.cpp cannot represent the model or the tokenizer, or an element overflows F16.
    """
    if quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise UserError(f"GGUF quantization {quantization!r} is unsupported; supported values are {known}")
    family = keys.choose_family(model)
    metadata: dict[str, Any] = {
        "general.type": "model",
        **({"general.name": name} if name else {}),
        "general.file_type": int(QUANTIZATIONS[quantization]),
        **({"general.quantization_version": _BLOCKS_VERSION} if quantization == "Q8_0" else {}),
        **keys.architecture_keys(model, family),
        **vocabulary.tokenizer_keys(text.tokenizer, model.vocab_size, text.special),
        **({"tokenizer.chat_template": text.chat_template} if text.chat_template else {}),
    }
    writer = GGUFWriter(path, family)
    for key, value in metadata.items():
        _add(writer, key, value)
    mappings = tensors.build_rules(model, layout_of(family))

    def for_each_tensor(write_one: Callable[[str, np.ndarray, GGMLQuantizationType], None]) -> None:
        for key, constant in rope.constant_tensors(model).items():
            write_one(key, constant, GGMLQuantizationType.F32)
        for key, tensor in rules.save(model, mappings, params):
            kind = tensors.storage_type(key, tensor, quantization)
            write_one(key, _encode(key, tensor, kind), GGMLQuantizationType[kind])

    try:
        # Two passes: the offsets of all tensors precede the first tensor in the file.
        for_each_tensor(lambda key, data, kind: writer.add_tensor_info(key, data.shape, data.dtype, data.nbytes, kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for_each_tensor(lambda key, data, kind: writer.write_tensor_data(data))
    finally:
        writer.close()


def _encode(name: str, tensor: np.ndarray, kind: str) -> np.ndarray:
    if kind == "Q8_0":
        return quantize(copying.as_contiguous(tensor, np.dtype(np.float32)), GGMLQuantizationType.Q8_0)
    if kind == "BF16":
        return copying.as_contiguous(tensor, np.dtype(ml_dtypes.bfloat16)).view(np.uint8)
    with np.errstate(over="ignore"):
        encoded = copying.as_contiguous(tensor, np.dtype(np.float16 if kind == "F16" else np.float32))
    if kind == "F16" and not np.isfinite(encoded).all():
        raise UserError(f"{name} has values beyond 65504, the range of F16; write BF16 or Q8_0")
    return encoded


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
