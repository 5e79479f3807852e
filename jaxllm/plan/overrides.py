"""A plan as a person uses it: overrides for a command line, or a file of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config import Config, overrides
from jaxllm.plan.space import Choice, Space

# What makes a run of a published model, beside what a choice sets.
_RUN = ("model.name", "data.sequence_length", "train.batch_size", "optimizer.name")


def fields(space: Space, choice: Choice, typed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Dotted path -> value of what a command line has to say for a run to be the planned one.

    Args:
      typed: what the person has overridden in the run's file already, which has the rest; the choice has the last
        word. None where there is no file.
    """
    before = overrides.field_paths(space.base)
    if typed is not None:
        return {**typed, **{path: value for path, value in choice.fields.items() if before[path] != value}}
    return {path: before[path] for path in _RUN} | choice.fields


def arguments(values: Mapping[str, Any]) -> list[str]:
    """As a shell takes them."""
    return [f"--config.{path}={value}" for path, value in values.items()]


def file_of(space: Space, choice: Choice, told: str) -> str:
    """The text of a file for `--config`: every field that is not the default's.

    Args:
      told: the first line of its docstring.
    """
    config = dataclasses.replace(space.configured(choice))
    default = overrides.field_paths(Config())
    changed = {path: value for path, value in overrides.field_paths(config).items() if value != default[path]}
    lines = [f'"""{told}"""', "", "from jaxllm.config import Config", "", "", "def get_config() -> Config:"]
    lines += ["    config = Config()", *(f"    config.{path} = {value!r}" for path, value in changed.items())]
    return "\n".join([*lines, "    return config", ""])
