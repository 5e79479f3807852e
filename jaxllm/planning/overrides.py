"""A plan as a person uses it: overrides for a command line, or a file of a run."""

import dataclasses
from typing import Any

from jaxllm import config as config_lib
from jaxllm.config import Config
from jaxllm.planning.space import Choice, Space

# What makes a run of a published model, beside what a choice sets.
_RUN = ("model.name", "data.sequence_length", "train.batch_size", "optimizer.name")


def fields(space: Space, choice: Choice, is_file: bool) -> dict[str, Any]:
    """Dotted path -> value of what a choice sets.

    Args:
      is_file: whether the run is a file's, which has the rest: then only what is not as the file has it.
    """
    before = config_lib.field_paths(space.base)
    if is_file:
        return {path: value for path, value in choice.fields.items() if before[path] != value}
    return {path: before[path] for path in _RUN} | choice.fields


def arguments(values: dict[str, Any]) -> list[str]:
    """As a shell takes them."""
    return [f"--config.{path}={value}" for path, value in values.items()]


def file_of(space: Space, choice: Choice, told: str) -> str:
    """The text of a file for `--config`: every field that is not the default's.

    Args:
      told: the first line of its docstring.
    """
    config = dataclasses.replace(space.configured(choice))
    default = config_lib.field_paths(Config())
    changed = {path: value for path, value in config_lib.field_paths(config).items() if value != default[path]}
    lines = [f'"""{told}"""', "", "from jaxllm.config import Config", "", "", "def get_config() -> Config:"]
    lines += ["    config = Config()", *(f"    config.{path} = {value!r}" for path, value in changed.items())]
    return "\n".join([*lines, "    return config", ""])
