"""Stand-in for dataclasses; the annotated fields of a class are in its `__fields__` (see `page.sources`)."""

from typing import Any

MISSING: Any = object()


class Field:
    """One field of a dataclass, with its default or default factory, if any."""

    def __init__(self, default: Any, default_factory: Any, init: bool, compare: bool) -> None:
        self.default, self.default_factory, self.init, self.compare = default, default_factory, init, compare
        self.name, self.type = "", None

    def value(self) -> Any:
        if self.default is MISSING and self.default_factory is MISSING:
            raise TypeError(f"no value for the field {self.name}")
        return self.default if self.default is not MISSING else self.default_factory()


def field(
    default: Any = MISSING, default_factory: Any = MISSING, init: bool = True, compare: bool = True, **_: Any
) -> Field:
    return Field(default, default_factory, init, compare)


def _made(cls: Any, frozen: bool, eq: bool) -> Any:
    held: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        held.update(getattr(base, "__dataclass_fields__", {}))
    for name, annotation in cls.__dict__.get("__fields__", {}).items():
        given = cls.__dict__.get(name, MISSING)
        held[name] = given if isinstance(given, Field) else field(given)
        held[name].name, held[name].type = name, annotation
        if held[name].default is not MISSING:
            setattr(cls, name, held[name].default)
    names = tuple(name for name in held if held[name].init)
    compared = tuple(name for name in held if held[name].compare)
    checked = hasattr(cls, "__post_init__")

    def initialize(self: Any, *values: Any, **named: Any) -> None:
        if len(values) == len(held) and not named:  # fast path for by far the most common call
            self.__dict__.update(zip(held, values, strict=True))
            if checked:
                self.__post_init__()
            return
        given = dict(zip(names, values, strict=False), **named)
        wrong = [name for name in given if name not in names]
        if wrong or len(given) < len(values) + len(named):
            raise TypeError(f"{cls.__name__} has no such fields: {wrong or values}")
        for name in held:
            self.__dict__[name] = given[name] if name in given else held[name].value()
        if checked:
            self.__post_init__()

    def values_of(self: Any) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in compared])

    def equal(self: Any, other: Any) -> bool:
        return self is other or (self.__class__ is other.__class__ and values_of(self) == values_of(other))

    def hashed(self: Any) -> int:  # cached: frozen instances do not change
        if "_hash" not in self.__dict__:
            self.__dict__["_hash"] = hash(values_of(self))
        return self.__dict__["_hash"]

    cls.__dataclass_fields__, cls.__init__ = held, initialize
    if eq and "__eq__" not in cls.__dict__:
        cls.__eq__ = equal
        if frozen:
            cls.__hash__ = hashed
    return cls


def dataclass(cls: Any = None, frozen: bool = False, eq: bool = True, **_: Any) -> Any:
    return _made(cls, frozen, eq) if cls is not None else lambda later: _made(later, frozen, eq)


def fields(thing: Any) -> tuple[Field, ...]:
    return tuple(thing.__dataclass_fields__.values())


def replace(thing: Any, **changes: Any) -> Any:
    there = {name: getattr(thing, name) for name, declared in thing.__dataclass_fields__.items() if declared.init}
    return type(thing)(**(there | changes))


def make_dataclass(name: str, declared: Any, **named: Any) -> Any:
    space: dict[str, Any] = {"__fields__": {entry[0]: entry[1] for entry in declared}}
    space.update({entry[0]: entry[2] for entry in declared if len(entry) > 2})
    return dataclass(type(name, (), space), **named)


def is_dataclass(thing: Any) -> bool:
    return hasattr(thing, "__dataclass_fields__")


def asdict(thing: Any) -> Any:
    if is_dataclass(thing):
        return {name: asdict(getattr(thing, name)) for name in thing.__dataclass_fields__}
    if isinstance(thing, list | tuple):
        return type(thing)([asdict(entry) for entry in thing])
    return {key: asdict(value) for key, value in thing.items()} if isinstance(thing, dict) else thing
