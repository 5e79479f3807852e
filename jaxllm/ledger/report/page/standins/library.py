"""Stand-ins for functools, json, copy, difflib and bisect.

JSON output has all digits of an integer. JSON input comes from the page only.
"""

from collections.abc import Callable
from typing import Any

from jaxllm.ledger.report.page.standins.records import is_dataclass


def cache(function: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[Any, Any] = {}

    def cached(*arguments: Any) -> Any:
        if arguments not in made:
            made[arguments] = function(*arguments)
        return made[arguments]

    return cached


def lru_cache(maxsize: Any = None, **_: Any) -> Any:
    return cache(maxsize) if callable(maxsize) else cache


class cached_property:  # noqa: N801, named like the original
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.name = function, ""

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name = name

    def __get__(self, thing: Any, owner: Any = None) -> Any:
        if thing is None:
            return self
        if self.name not in thing.__dict__:
            thing.__dict__[self.name] = self.function(thing)
        return thing.__dict__[self.name]


def partial(function: Callable[..., Any], *first: Any, **fixed: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: function(*first, *arguments, **(fixed | named))


def dumps(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join([f"{dumps(str(key))}:{dumps(entry)}" for key, entry in value.items()]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join([dumps(entry) for entry in value]) + "]"
    if isinstance(value, str):
        for sign, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
            value = value.replace(sign, escaped)
        return f'"{value}"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def loads(text: str) -> Any:
    return eval(text, {"null": None, "true": True, "false": False})


def deepcopy(thing: Any) -> Any:
    if is_dataclass(thing):
        return type(thing)(**{name: deepcopy(getattr(thing, name)) for name in thing.__dataclass_fields__})
    if isinstance(thing, list | tuple):
        return type(thing)([deepcopy(entry) for entry in thing])
    return {key: deepcopy(value) for key, value in thing.items()} if isinstance(thing, dict) else thing


def closest(word: str, possibilities: Any, n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Replaces difflib's get_close_matches with the first `n` candidates: the form offers only valid values."""
    return list(possibilities)[:n]


def bisect_left(values: list[Any], value: Any) -> int:
    """Returns the insertion index of a value in an ascending list, before equal entries."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low
