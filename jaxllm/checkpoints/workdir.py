"""The folder that a run lives in: one run at a time, described by its configuration."""

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

OWN = "model"  # config.data.tokenizer of a run whose model came with one: it lies in the workdir
_FOLDER = "tokenizer"


@contextlib.contextmanager
def only_run_in(workdir: pathlib.Path) -> Iterator[None]:
    """Two runs in one workdir would each delete what the other has saved.

    Raises:
      UserError: there is another.
    """
    with (workdir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another run is training in {workdir}; wait for it, or use another --workdir") from error
        yield


def write_config(workdir: pathlib.Path, config: Config) -> None:
    """Writes the run's configuration where a person and `from_dict` find it."""
    (workdir / "config.json").write_text(json.dumps(overrides.to_dict(config), indent=1) + "\n")


def write_text(workdir: pathlib.Path, text: Text) -> None:
    """Writes a model's own tokenizer and chat template beside the run that started from it."""
    texts.save(text, workdir / _FOLDER)


def text(workdir: pathlib.Path, config: Config) -> Text:
    """The tokenizer and chat template of the run in a workdir.

    Raises:
      UserError: there is none, or it is not what it should be.
    """
    vocab_size = architectures.resolve(config.model).vocab_size
    if config.data.tokenizer != OWN:
        return texts.load(config.data.tokenizer, vocab_size)
    folder = workdir / _FOLDER
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json, which the run in {workdir} needs; bring the folder back")
    return texts.load(str(folder), vocab_size)
