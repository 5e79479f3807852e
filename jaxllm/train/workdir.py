"""The folder that a run lives in: one run at a time, described by its configuration."""

import contextlib
import fcntl
import json
import pathlib
from collections.abc import Iterator

from jaxllm import config as config_lib
from jaxllm.config import Config
from jaxllm.errors import UserError


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
    (workdir / "config.json").write_text(json.dumps(config_lib.to_dict(config), indent=1) + "\n")
