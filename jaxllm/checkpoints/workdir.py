"""Files of a run's workdir outside its checkpoints: the lock, config.json, the tokenizer and chat template."""

import contextlib
import fcntl
import json
import pathlib
from collections.abc import Iterator

from jaxllm import architectures
from jaxllm.config import Config, overrides
from jaxllm.errors import UserError
from jaxllm.interop import text as texts
from jaxllm.interop.text import Text

OWN_FILES = (
    "model"  # value of config.data.tokenizer for a tokenizer that came with the model and is stored in the workdir
)
_FOLDER = "tokenizer"


@contextlib.contextmanager
def exclusive_lock(workdir: pathlib.Path) -> Iterator[None]:
    """Locks a workdir for one run, because two runs would delete each other's checkpoints.

    Raises:
      UserError: another run has the lock.
    """
    with (workdir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another run is training in {workdir}; wait for it, or use another --workdir") from error
        yield


def write_config(workdir: pathlib.Path, config: Config) -> None:
    """Writes the run's configuration to config.json, for users and for `from_dict`."""
    (workdir / "config.json").write_text(json.dumps(overrides.to_dict(config), indent=1) + "\n")


def write_text(workdir: pathlib.Path, text: Text) -> None:
    """Writes the tokenizer and chat template of the pretrained model into the workdir."""
    texts.save(text, workdir / _FOLDER)


def text(workdir: pathlib.Path, config: Config) -> Text:
    """Loads the tokenizer and chat template of the run in a workdir.

    Raises:
      UserError: the tokenizer is missing or not usable.
    """
    vocab_size = architectures.resolve(config.model).vocab_size
    if config.data.tokenizer != OWN_FILES:
        return texts.load(config.data.tokenizer, vocab_size)
    folder = workdir / _FOLDER
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json, which the run in {workdir} needs; restore the folder")
    return texts.load(str(folder), vocab_size)
