"""Downloads models from the Hugging Face hub by id: only the needed files, into the cache of huggingface_hub."""

import pathlib
import re

import huggingface_hub
from huggingface_hub import errors

from jaxllm.errors import UserError
from jaxllm.interop.huggingface import config_file, folder_tokenizer, safetensors_files
from jaxllm.interop.huggingface import model as huggingface

_SMALL = (huggingface.CONFIG, huggingface.GENERATION, safetensors_files.INDEX, *folder_tokenizer.FILES)
# Not all *.safetensors: some repositories contain the weights a second time, in another layout.
_WEIGHTS = ("model.safetensors", "model-*.safetensors")


def is_id(spec: str) -> bool:
    """Returns True if a text has the form "organisation/name"."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", spec) is not None and not spec.startswith((".", "/"))


def download(name: str) -> pathlib.Path:
    """Downloads a model and returns its folder. Checks the configuration before it downloads the weights.

    Args:
      name: "organisation/name".
    Raises:
      UserError: the model cannot be downloaded, or is not supported.
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
    except (OSError, errors.HfHubHTTPError, ValueError) as error:  # without a network, errors of the operating system
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"{name} is no folder here, and the Hugging Face hub cannot be reached for it ({reason}); "
            "connect to the network, or give a local folder or file"
        ) from error
