"""Import and export of Hugging Face model folders: config.json, safetensors files and a tokenizer."""

import json
import pathlib
import re
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop import rules
from jaxllm.interop.huggingface import config_file, folder_rules, folder_tokenizer
from jaxllm.interop.huggingface.safetensors_files import TensorFiles, write
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.rules import TensorMapping

CONFIG = "config.json"
GENERATION = "generation_config.json"
_IMAGES = "gemma3"
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
    files = TensorFiles(folder)
    made = _rules(model, family, files, config["model_type"] == _IMAGES, folder)

    def load(dtype: jax.typing.DTypeLike, shardings: Any) -> Any:
        return rules.load(model, made, files.read, dtype, shardings)

    found = folder_tokenizer.read(folder, config, model.vocab_size)
    return Pretrained(str(path), model, load, files.dtype(), family, **found)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON file that contains an object.

    Raises:
      UserError: the file cannot be read, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give a folder that has it") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is no table; download it again")
    return value


def _rules(
    model: Architecture, family: str, files: TensorFiles, images: bool, folder: pathlib.Path
) -> list[TensorMapping]:
    names = files.entries.keys()
    prefix, head = folder_rules.find_prefix(family, names), folder_rules.find_head(names)
    made = folder_rules.make(model, family, prefix, head)
    constants = f"{folder_rules.CONSTANTS}|{folder_rules.OF_IMAGES}" if images else folder_rules.CONSTANTS
    ignored = {name for name in names if re.fullmatch(constants, name)} - {n for rule in made for n in rule.names}
    if model.tied_embeddings and head in names:
        _check_copy(files, folder_rules.embedding_name(family, prefix), head, folder)
        ignored.add(head)
    _check_names(made, names, folder, ignored, model, head)
    rules.check_shapes(model, made, files.shape)
    return made


def _check_names(
    made: list[TensorMapping],
    names: Collection[str],
    folder: pathlib.Path,
    ignored: set[str],
    model: Architecture,
    head: str,
) -> None:
    try:
        rules.check(made, names, str(folder), ignored)
    except UserError as error:
        if not model.tied_embeddings and head not in names:
            raise UserError(
                f"{error}; tie_word_embeddings is false, so {head} is needed; true would take the embedding for it"
            ) from error
        raise


def _check_copy(files: TensorFiles, embedding: str, head: str, folder: pathlib.Path) -> None:
    """Checks that the stored head of a model with tied embeddings equals its embedding."""
    if embedding in files.entries:
        a, b = files.read(embedding), files.read(head)
        rows = max(1, _BLOCK // max(1, a.shape[-1])) if a.ndim else 1
        if a.shape == b.shape and all(
            np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, a.shape[0], rows)
        ):
            return
    raise UserError(
        f"{folder}: tie_word_embeddings is true, and {head} is not {embedding}; set it to false in {CONFIG} if the "
        "head is the model's own, or take it out"
    )


def export(
    folder: pathlib.Path,
    model: Architecture,
    params: Any,
    dtype: np.dtype,
    *,
    shard_bytes: int,
    family: str = "",
    end_ids: tuple[int, ...] = (),
    bos_id: int | None = None,
) -> str:
    """Writes a model folder that transformers can load.

    Args:
      folder: existing folder; tokenizer files in it are left as they are.
      model: the architecture.
      params: the parameter tree.
      dtype: dtype of the tensors: float32, bfloat16 or float16.
      shard_bytes: maximum bytes of tensors per file.
      family: the family to try first.
      end_ids: end tokens for generation.
      bos_id: begin token for generation; None if there is none.
    Returns:
      The name of the family that the model is written as.
    Raises:
      UserError: no family matches the architecture.
    """
    family, config = config_file.write_config(model, family)
    ends: Any = end_ids[0] if len(end_ids) == 1 else list(end_ids) or None
    tokens = {"bos_token_id": bos_id, "eos_token_id": ends}
    # Override the family's default padding token, which may be outside this model's vocabulary.
    told = config | tokens | {"pad_token_id": None, "torch_dtype": dtype.name}
    (folder / CONFIG).write_text(json.dumps(told, indent=2) + "\n")
    (folder / GENERATION).write_text(
        json.dumps({name: v for name, v in tokens.items() if v is not None}, indent=2) + "\n"
    )
    made = folder_rules.make(model, family)
    write(folder, rules.saved_shapes(model, made), dtype, rules.save(model, made, params), shard_bytes)
    return family
