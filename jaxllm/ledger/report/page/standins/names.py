"""Placeholder names of modules that the page does not embed, and the modules that contain them."""

import sys
from collections.abc import Iterator
from typing import Any

_Module: Any = type(sys)


class Standin:
    """Placeholder for a name of an absent module; it can be called and combined, but has no value."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Standin(f"{self.name}.{attribute}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        # As a decorator it returns its argument unchanged.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else Standin(f"{self.name}()")

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    def __ror__(self, other: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        raise TypeError(f"{self.name} is not part of the page")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"{self.name} is not part of the page")


def module(name: str, **names: Any) -> Any:
    """Installs and returns a module with the given names, and a `Standin` for any other name."""
    made: Any = sys.modules.get(name) or _Module(name)
    made.__path__ = []
    made.__getattr__ = lambda attribute: Standin(f"{name}.{attribute}")
    for key, value in names.items():
        setattr(made, key, value)
    sys.modules[name] = made
    parent, _, leaf = name.rpartition(".")
    if parent and not parent.startswith("jaxllm"):  # packages of jaxllm are present and import it themselves
        setattr(sys.modules.get(parent) or module(parent), leaf, made)
    return made
