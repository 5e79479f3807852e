"""Turns a plan into overrides for a command line, or into a config file."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config import Config, overrides
from jaxllm.plan.space import Choice, SearchSpace

# Fields that define a run of a published model, besides those that a choice sets.
_RUN = ("model.name", "data.sequence_length", "train.batch_size", "optimizer.name")


def fields(space: SearchSpace, choice: Choice, typed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the overrides, dotted path -> value, that turn a run into the planned one.

    Args:
      typed: overrides of the config file from the command line, which are kept unless the choice sets the same field.
        None if there is no file: the fields that define the run are then included.
    """
    before = overrides.field_paths(space.base)
    if typed is not None:
        return {**typed, **{path: value for path, value in choice.fields.items() if before[path] != value}}
    return {path: before[path] for path in _RUN} | choice.fields


def arguments(values: Mapping[str, Any]) -> list[str]:
    """Returns overrides as command-line arguments."""
    return [f"--config.{path}={value}" for path, value in values.items()]


def file_of(space: SearchSpace, choice: Choice, told: str) -> str:
    """Returns the text of a config file for `--config`, with every field that differs from its default.

    Args:
      told: first line of the file's docstring.
    """
    config = dataclasses.replace(space.configured(choice))
    default = overrides.field_paths(Config())
    changed = {path: value for path, value in overrides.field_paths(config).items() if value != default[path]}
    lines = [f'"""{told}"""', "", "from jaxllm.config import Config", "", "", "def get_config() -> Config:"]
    lines += ["    config = Config()", *(f"    config.{path} = {value!r}" for path, value in changed.items())]
    return "\n".join([*lines, "    return config", ""])
