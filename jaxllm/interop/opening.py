"""Opens a pretrained model by name: a Hugging Face folder, a GGUF file, or a Hugging Face hub id.

From the hub, only the needed files are downloaded, into the cache of huggingface_hub.
"""

import dataclasses
import pathlib
import re

import huggingface_hub
from huggingface_hub import errors

from jaxllm.errors import UserError
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.huggingface import config_fields, config_file, safetensors_files
from jaxllm.interop.huggingface import model as huggingface
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.text import FOLDER_FILES, GENERATION

_SMALL = (huggingface.CONFIG, GENERATION, safetensors_files.INDEX, *FOLDER_FILES)
# Not all *.safetensors: some repositories contain the weights a second time, in another layout.
_WEIGHTS = ("model.safetensors", "model-*.safetensors")


def open_model(spec: str) -> Pretrained:
    """Opens a pretrained model without reading its weights.

    Args:
      spec: a folder with config.json, a .gguf file, or an id "organisation/name" of the Hugging Face hub.
    Raises:
      UserError: `spec` is none of these, or cannot be read.
    """
    path = pathlib.Path(spec).expanduser()
    if path.is_dir():
        if (path / huggingface.CONFIG).is_file():
            return dataclasses.replace(huggingface.open_folder(path), source=spec)
        files = sorted(path.glob("*.gguf"))
        also = f"; give a file in it, such as {files[0]}" if files else ""
        raise UserError(
            f"{spec} is neither the workdir of a training run (no checkpoints/) nor a Hugging Face folder "
            f"(no {huggingface.CONFIG}){also or '; give one of these'}"
        )
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return gguf.open_file(path)
        raise UserError(f"{spec} is not a .gguf file; give the folder of a model, or a .gguf file")
    if path.suffix.lower() != ".gguf" and _is_id(spec):
        return dataclasses.replace(huggingface.open_folder(_download(spec)), source=spec)
    raise UserError(
        f"{spec} not found; give the workdir of a training run, a Hugging Face folder, a .gguf file, or an id of the "
        "Hugging Face hub (organisation/name)"
    )


def _is_id(spec: str) -> bool:
    """Returns True if a text has the form "organisation/name"."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", spec) is not None and not spec.startswith((".", "/"))


def _download(name: str) -> pathlib.Path:
    """Downloads a model and returns its folder. Checks the configuration before it downloads the weights.

    Args:
      name: "organisation/name".
    Raises:
      UserError: the model cannot be downloaded, or is not supported.
    """
    folder = _snapshot(name, _SMALL)
    config = config_fields.read_json(folder / huggingface.CONFIG)
    config_file.read_config(config, f"{name}: {huggingface.CONFIG}")
    return _snapshot(name, (*_SMALL, *_WEIGHTS))


def _snapshot(name: str, patterns: tuple[str, ...]) -> pathlib.Path:
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} is a gated model on the Hugging Face hub; accept its terms there and sign in (hf auth login)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{name} is neither a local folder nor a public model on the Hugging Face hub; check the name"
        ) from error
    except (OSError, errors.HfHubHTTPError, ValueError) as error:  # OSError: no network
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"{name} is not a local folder, and the Hugging Face hub cannot be reached ({reason}); "
            "connect to the network, or give a local folder or file"
        ) from error
