"""Models of the Hugging Face hub, by id: the files that are needed, kept where its own library keeps them."""

import pathlib
import re

import huggingface_hub
from huggingface_hub import errors

from jaxllm.errors import UserError
from jaxllm.interop.huggingface import config_file, folder_tokenizer, safetensors_files
from jaxllm.interop.huggingface import model as huggingface

_SMALL = (huggingface.CONFIG, huggingface.GENERATION, safetensors_files.INDEX, *folder_tokenizer.FILES)
# Not every file of safetensors: some repositories have the weights a second time in a layout of their own.
_WEIGHTS = ("model.safetensors", "model-*.safetensors")


def is_id(spec: str) -> bool:
    """Whether a text may be "organisation/name"."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", spec) is not None and not spec.startswith((".", "/"))


def download(name: str) -> pathlib.Path:
    """The folder of a model. What it is, is looked at before its weights are fetched.

    Args:
      name: "organisation/name".
    Raises:
      UserError: it cannot be had, or there is no model for it.
    """
    folder = _snapshot(name, _SMALL)
    config = huggingface.read_json(folder / huggingface.CONFIG)
    config_file.read_config(config, f"{name}: {huggingface.CONFIG}")
    return _snapshot(name, (*_SMALL, *_WEIGHTS))


def _snapshot(name: str, patterns: tuple[str, ...]) -> pathlib.Path:
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} is a gated model of the Hugging Face hub; accept its terms there and sign in (hf auth login)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{name} is no folder here and no public model of the Hugging Face hub; check the name"
        ) from error
    except (OSError, errors.HfHubHTTPError, ValueError) as error:  # no network raises what the system raises
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"{name} is no folder here, and the Hugging Face hub cannot be reached for it ({reason}); "
            "connect to the network, or give a local folder or file"
        ) from error
