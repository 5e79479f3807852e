"""Configuration as dotted paths and as dictionaries, with checks of keys and of value types.

Relations between fields are checked in `jaxllm.config.validate`.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from jaxllm.config import CHOICES, Config
from jaxllm.errors import UserError, nearest


def field_paths(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the configuration as a flat dictionary: {dotted path: value}."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= field_paths(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def unknown_key(path: str) -> UserError:
    """Builds the error for an unknown key, which suggests the nearest known one."""
    known = list(field_paths(Config()))
    section, _, leaf = path.partition(".")
    sections = [field.name for field in dataclasses.fields(Config)]
    # A known field in the wrong section, or without its section, is a more common mistake than a misspelling.
    candidates = [key for key in known if key.split(".")[-1] == (leaf or section)]
    if not candidates and not leaf:
        candidates = [nearest(section, sections)]
    elif not candidates and section in sections:
        leaves = [key.split(".")[-1] for key in known if key.startswith(f"{section}.")]
        candidates = [f"{section}.{nearest(leaf, leaves)}"]
    suggestion = candidates[0] if candidates else nearest(path, known)
    return UserError(f"config has no field '{path}'; did you mean '{suggestion}'?")


def to_dict(config: Config) -> dict[str, Any]:
    """Returns the configuration as nested plain dictionaries, for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Builds a configuration from nested dictionaries; the inverse of `to_dict`.

    Raises:
      UserError: a key is unknown, or a value has the wrong type.
    """
    config = Config()
    for section, fields in values.items():
        if not hasattr(config, section):
            raise unknown_key(section)
        if not dataclasses.is_dataclass(getattr(config, section)):
            setattr(config, section, fields)
            continue
        if not isinstance(fields, Mapping):
            raise UserError(f"config.{section} is {fields!r}; it must be a mapping of the section's fields")
        for name, value in fields.items():
            target = getattr(config, section)
            if not hasattr(target, name):
                raise unknown_key(f"{section}.{name}")
            setattr(target, name, tuple(value) if isinstance(value, list) else value)
    check_types(config)
    return config


def split_lists(config: Config) -> None:
    """Splits comma-separated strings inside tuple fields in place: `("q,v",)` becomes `("q", "v")`."""
    for section in dataclasses.fields(config):
        node = getattr(config, section.name)
        for name, value in list(vars(node).items()) if dataclasses.is_dataclass(node) else ():
            if isinstance(value, tuple) and any(isinstance(item, str) for item in value):
                words = [word.strip() for item in value for word in str(item).split(",")]
                setattr(node, name, tuple(word for word in words if word))


def check_types(config: Config) -> None:
    """Checks that every field has its annotated type, and that string fields hold one of their `CHOICES`.

    Raises:
      UserError: names the field, its value and the accepted type or values.
    """
    for extra in vars(config).keys() - {f.name for f in dataclasses.fields(config)}:
        raise unknown_key(extra)
    default = Config()
    for section in dataclasses.fields(config):
        node = getattr(config, section.name)
        expected = type(getattr(default, section.name))
        if type(node) is not expected:
            raise UserError(f"config.{section.name} is {node!r}; it must be a {expected.__name__}")
        if dataclasses.is_dataclass(node):
            _check_section(section.name, node)


def _check_section(name: str, node: Any) -> None:
    for extra in vars(node).keys() - {f.name for f in dataclasses.fields(node)}:
        raise unknown_key(f"{name}.{extra}")
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        path = f"{name}.{field.name}"
        if not _is_instance(value, field.type):
            wanted = getattr(field.type, "__name__", str(field.type))
            raise UserError(f"config.{path} is {value!r} ({type(value).__name__}); it must be {wanted}")
        if path in CHOICES and value is not None and value not in CHOICES[path]:
            raise UserError(
                f"config.{path} is {value!r}; it must be one of {', '.join(CHOICES[path])} "
                f"(did you mean {nearest(value, CHOICES[path])!r}?)"
            )


def _is_instance(value: Any, annotation: Any) -> bool:
    """Implements isinstance for the annotations in use: scalars, tuples of scalars, and optional forms of both."""
    if isinstance(annotation, types.UnionType):
        return any(_is_instance(value, option) for option in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return isinstance(value, tuple) and all(_is_instance(item, typing.get_args(annotation)[0]) for item in value)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)
