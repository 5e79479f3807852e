"""Models in GGUF files, llama.cpp's format: opened with their tokenizer and chat template, and written."""

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

# What a file can be written in -> llama.cpp's number for it.
QUANTIZATIONS = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}
_KEPT = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BLOCKS_VERSION = 2  # of the layout of quantised blocks


def open_file(path: str | pathlib.Path) -> Pretrained:
    """A model in a GGUF file, or in several of which this is the first; its weights are not read yet.

    Numbers that are not quantised come out to the bit. Gemma's norms, which a file holds as 1 + w, come out as w.

    Raises:
      UserError: the file is damaged; a key, a tensor or the tokenizer is missing, unknown or of no meaning to us.
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
    """What `write` would have to be asked for to write tensors of the same types; "" where it cannot."""
    nothing = {name: np.broadcast_to(np.zeros((), np.uint8), shape) for name, shape in file.shapes.items()}
    same = (q for q in QUANTIZATIONS if all(file.kind(k) == tensors.stored(k, x, q) for k, x in nothing.items()))
    return next(same, "")


def kept(opened: Pretrained) -> str:
    """The quantization in which a file has every bit of a model: that of its own file, or that of its dtype."""
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
    """Writes a file that llama.cpp loads, one tensor in memory at a time.

    Vectors, routers and learned positions are float32 whatever the rest. In Q8_0, a matrix whose rows are no multiple
    of 32 is F16.

    Args:
      params: the parameter tree, of any floating dtype.
      quantization: of QUANTIZATIONS.
      chat_template: Jinja source.
      special: how special tokens are written, by a template's names: {"bos_token": "<s>", …}.
      name: of the model, for people.
    Raises:
      UserError: GGUF, or llama.cpp, has no words for this model or this tokenizer; a number too large for F16.
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
        # Twice: where each tensor lies is written before the first of them.
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
