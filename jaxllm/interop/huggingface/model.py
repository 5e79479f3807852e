"""Import and export of Hugging Face model folders: config.json, safetensors files and a tokenizer."""

import json
import pathlib
import re
from typing import Any

import jax
import numpy as np

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop import rules
from jaxllm.interop import text as texts
from jaxllm.interop.huggingface import config_file, folder_rules, packed_weights
from jaxllm.interop.huggingface.config_fields import read_json
from jaxllm.interop.huggingface.packed_weights import PackedFiles
from jaxllm.interop.huggingface.safetensors_files import TensorFiles, open_tensors, write_checkpoint
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.rules import TensorMapping
from jaxllm.interop.text import FOLDER_FILES, GENERATION, Text

CONFIG = "config.json"
_MULTIMODAL = "gemma3"
# Elements compared at a time, which bounds the size of temporary copies.
_BLOCK = 1 << 24


def open_folder(path: str | pathlib.Path) -> Pretrained:
    """Opens the model of a folder: checks all files, but reads no weights except a tied head, to verify it.

    Args:
      path: the folder.
    Raises:
      UserError: the folder is missing, the configuration is not supported, files are truncated, or tensors are
        missing, unexpected, of the wrong shape, or in contradiction to the configuration.
    """
    folder = pathlib.Path(path).expanduser()
    config = read_json(folder / CONFIG)
    family, model = config_file.read_config(config, str(folder / CONFIG))
    files = packed_weights.open_packed(open_tensors(folder), config, str(folder / CONFIG))
    mappings = _rules(model, family, files, config["model_type"] == _MULTIMODAL, folder)

    def load(dtype: jax.typing.DTypeLike, shardings: Any) -> Any:
        return rules.load(model, mappings, files.read, dtype, shardings)

    return Pretrained(
        str(path),
        model,
        load,
        files.dtype(),
        family,
        text=texts.load_folder(folder, config, model.vocab_size),
        tokenizer_files=tuple(folder / name for name in FOLDER_FILES if (folder / name).is_file()),
    )


def _rules(
    model: Architecture, family: str, files: TensorFiles, images: bool, folder: pathlib.Path
) -> list[TensorMapping]:
    names = files.entries.keys()
    prefix, head = folder_rules.name_prefix(family, names), folder_rules.head_name(names)
    mappings = folder_rules.build_rules(model, family, prefix, head)
    constants = f"{folder_rules.CONSTANTS}|{folder_rules.IMAGE_TENSORS}" if images else folder_rules.CONSTANTS
    ignored = {name for name in names if re.fullmatch(constants, name)} - {n for rule in mappings for n in rule.names}
    if model.tied_embeddings and head in names:
        _check_tied_head(files, folder_rules.embedding_name(family, prefix), head, folder)
        ignored.add(head)
    if isinstance(files, PackedFiles):
        ignored |= files.unused_biases({name for rule in mappings for name in rule.names})
    try:
        rules.check(mappings, names, str(folder), ignored)
    except UserError as error:
        if model.tied_embeddings or head in names:
            raise
        raise UserError(
            f"{error}; tie_word_embeddings is false, so {head} is needed: set it to true to use the embedding"
        ) from error
    rules.check_shapes(model, mappings, lambda name: files.entries[name].shape)
    return mappings


def _check_tied_head(files: TensorFiles, embedding: str, head: str, folder: pathlib.Path) -> None:
    """Checks that the stored head of a model with tied embeddings equals its embedding."""
    if embedding in files.entries:
        a, b = files.read(embedding), files.read(head)
        rows = max(1, _BLOCK // max(1, a.shape[-1])) if a.ndim else 1
        if a.shape == b.shape and all(
            np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, a.shape[0], rows)
        ):
            return
    raise UserError(
        f"{folder}: tie_word_embeddings is true, but {head} differs from {embedding}; set it to false in {CONFIG} to "
        f"use the head, or remove {head}"
    )


def export(
    folder: pathlib.Path,
    model: Architecture,
    params: Any,
    dtype: np.dtype,
    *,
    shard_bytes: int,
    family: str = "",
    text: Text | None = None,
) -> str:
    """Writes a model folder that transformers can load.

    Args:
      folder: existing folder; tokenizer files in it are left as they are.
      model: the architecture.
      params: the parameter tree.
      dtype: dtype of the tensors: float32, bfloat16 or float16.
      shard_bytes: maximum bytes of tensors per file.
      family: the family to try first.
      text: settings whose begin and end tokens are written; the tokenizer itself is not. None writes none.
    Returns:
      The name of the family that the model is written as.
    Raises:
      UserError: no family matches the architecture.
    """
    family, config = config_file.write_config(model, family)
    text = text or Text()
    ends: Any = text.end_ids[0] if len(text.end_ids) == 1 else list(text.end_ids) or None
    tokens = {"bos_token_id": text.tokenizer.bos_id if text.tokenizer else None, "eos_token_id": ends}
    # Override the family's default padding token, which may be outside this model's vocabulary.
    content = config | tokens | {"pad_token_id": None, "torch_dtype": dtype.name}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    (folder / GENERATION).write_text(
        json.dumps({name: v for name, v in tokens.items() if v is not None}, indent=2) + "\n"
    )
    mappings = folder_rules.build_rules(model, family)
    write_checkpoint(
        folder, rules.saved_shapes(model, mappings), dtype, rules.save(model, mappings, params), shard_bytes
    )
    return family
