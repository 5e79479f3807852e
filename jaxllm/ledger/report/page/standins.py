"""Stand-ins for modules that the HTML page lacks; the first program that runs in the browser.

Brython's own library serves bisect, collections, difflib, functools, JSON and types. These are left:

- `dataclasses` and `typing`. Brython's own would take 1.8 times as long to the first bill as stand-ins for everything,
  these two stand-ins 1.4 times (`experiments/LOG.md`), and its `make_dataclass` fails.
- JAX's trees (dicts with sorted keys, lists and tuples) and dtypes, as far as the closed forms need them.
- Placeholders for the names of all other modules. They can be imported, called as a decorator and combined, but have no
  value to compute with, so they cannot produce a wrong figure silently.
"""

import collections
import sys
from collections.abc import Iterator
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


def dataclass(cls: Any = None, frozen: bool = False, eq: bool = True, **_: Any) -> Any:
    if cls is None:
        return lambda later: dataclass(later, frozen, eq)
    declared: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        declared.update(getattr(base, "__dataclass_fields__", {}))
    for name, annotation in getattr(cls, "__annotations__", {}).items():
        default = cls.__dict__.get(name, MISSING)
        declared[name] = default if isinstance(default, Field) else field(default)
        declared[name].name, declared[name].type = name, annotation
        if declared[name].default is not MISSING:
            setattr(cls, name, declared[name].default)
    names = tuple(name for name in declared if declared[name].init)
    compared = tuple(name for name in declared if declared[name].compare)
    has_post_init = hasattr(cls, "__post_init__")

    def initialize(self: Any, *values: Any, **named: Any) -> None:
        if len(values) == len(declared) and not named:  # fast path for by far the most common call
            self.__dict__.update(zip(declared, values, strict=True))
        else:
            given = dict(zip(names, values, strict=False), **named)
            unknown = [name for name in given if name not in names]
            if unknown or len(given) < len(values) + len(named):
                raise TypeError(f"{cls.__name__} has no such fields: {unknown or values}")
            for name in declared:
                self.__dict__[name] = given[name] if name in given else declared[name].value()
        if has_post_init:
            self.__post_init__()

    def values_of(self: Any) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in compared])

    def equal(self: Any, other: Any) -> bool:
        return self is other or (self.__class__ is other.__class__ and values_of(self) == values_of(other))

    def hashed(self: Any) -> int:  # cached: frozen instances do not change
        if "_hash" not in self.__dict__:
            self.__dict__["_hash"] = hash(values_of(self))
        return self.__dict__["_hash"]

    cls.__dataclass_fields__, cls.__init__ = declared, initialize
    if eq and "__eq__" not in cls.__dict__:
        cls.__eq__ = equal
        if frozen:
            cls.__hash__ = hashed
    return cls


def fields(thing: Any) -> tuple[Field, ...]:
    return tuple(thing.__dataclass_fields__.values())


def replace(thing: Any, **changes: Any) -> Any:
    unchanged = {entry.name: getattr(thing, entry.name) for entry in fields(thing) if entry.init}
    return type(thing)(**(unchanged | changes))


def make_dataclass(name: str, declared: Any, **named: Any) -> Any:
    space: dict[str, Any] = {"__annotations__": {entry[0]: entry[1] for entry in declared}}
    space.update({entry[0]: entry[2] for entry in declared if len(entry) > 2})
    return dataclass(type(name, (), space), **named)


def is_dataclass(thing: Any) -> bool:
    return hasattr(thing, "__dataclass_fields__")


def asdict(thing: Any) -> Any:
    if is_dataclass(thing):
        return {name: asdict(getattr(thing, name)) for name in thing.__dataclass_fields__}
    if isinstance(thing, list | tuple):
        return _sequence(thing, [asdict(entry) for entry in thing])
    return {key: asdict(value) for key, value in thing.items()} if isinstance(thing, dict) else thing


def _sequence(like: Any, entries: list[Any]) -> Any:
    """Returns a list, tuple or named tuple of the same type with other entries."""
    return type(like)(*entries) if hasattr(like, "_fields") else type(like)(entries)


class _NamedTupleType(type):
    """Makes a class with fields a subclass of `collections.namedtuple`."""

    def __new__(cls, name: str, bases: Any, space: dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, space)
        names = list(space["__annotations__"])
        defaults = [space.pop(entry) for entry in names if entry in space]
        namedtuple: Any = collections.namedtuple  # mypy accepts only literal fields
        return type(name, (namedtuple(name, names, defaults=defaults),), space)


class NamedTuple(metaclass=_NamedTupleType):
    """Stand-in for typing.NamedTuple."""


class Key:
    """One entry of a pytree path: `key` in a dictionary, `idx` in a sequence."""

    def __init__(self, **place: Any) -> None:
        self.__dict__.update(place)


def map_with_path(function: Any, tree: Any, *rest: Any, is_leaf: Any = None, path: Any = ()) -> Any:
    assert not rest, "one tree at a time"
    if is_leaf is None or not is_leaf(tree):
        if tree is None:
            return None
        if isinstance(tree, dict):
            keys = sorted(tree)
            return {k: map_with_path(function, tree[k], is_leaf=is_leaf, path=(*path, Key(key=k))) for k in keys}
        if isinstance(tree, list | tuple):
            paths = [(*path, Key(idx=i)) for i in range(len(tree))]
            entries = zip(tree, paths, strict=True)
            return _sequence(tree, [map_with_path(function, v, is_leaf=is_leaf, path=p) for v, p in entries])
    return function(path, tree)


def leaves_with_path(tree: Any, is_leaf: Any = None) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    map_with_path(lambda path, leaf: found.append((path, leaf)), tree, is_leaf=is_leaf)
    return found


def leaves(tree: Any, is_leaf: Any = None) -> list[Any]:
    return [leaf for _, leaf in leaves_with_path(tree, is_leaf)]


def tree_map(function: Any, tree: Any, *rest: Any, is_leaf: Any = None) -> Any:
    return map_with_path(lambda _, leaf: function(leaf), tree, *rest, is_leaf=is_leaf)


class DType:
    """A dtype that has only a name."""

    def __init__(self, dtype: Any) -> None:
        self.name = dtype if isinstance(dtype, str) else dtype.name


class Placeholder:
    """A name of an absent module; it can be called and combined, but has no value."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Placeholder(f"{self.name}.{attribute}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        # As a decorator it returns its argument unchanged.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else Placeholder(f"{self.name}()")

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
    """Installs and returns a module with the given names, and a `Placeholder` for any other name."""
    new: Any = sys.modules.get(name) or type(sys)(name)
    new.__path__ = []
    new.__getattr__ = lambda attribute: Placeholder(f"{name}.{attribute}")
    for key, value in names.items():
        setattr(new, key, value)
    sys.modules[name] = new
    parent, _, leaf = name.rpartition(".")
    if parent and not parent.startswith("jaxllm"):  # packages of jaxllm are present and import it themselves
        setattr(sys.modules.get(parent) or module(parent), leaf, new)
    return new


def install(absent: list[str], jax_version: tuple[int, ...], environment: dict[str, str]) -> None:
    """Installs the stand-in modules, and a module of placeholders for each other absent one.

    Args:
      absent: names of modules that the page does not embed.
      jax_version: value of `jax.__version_info__`.
      environment: variables that the closed forms read, from the process that wrote the page.
    """
    for name in absent:
        module(name)
    own = (dataclass, field, fields, replace, make_dataclass, is_dataclass, asdict)
    module("dataclasses", MISSING=MISSING, **{function.__name__: function for function in own})
    module(
        "typing",
        TYPE_CHECKING=False,
        NamedTuple=NamedTuple,
        Protocol=object,
        get_origin=lambda annotation: getattr(annotation, "__origin__", None),
        get_args=lambda annotation: getattr(annotation, "__args__", ()),
    )
    module("os", environ=environment)
    module("jax", __version_info__=jax_version)
    module("jax.tree", leaves=leaves, map=tree_map)
    module("jax.tree_util", tree_leaves_with_path=leaves_with_path, tree_map_with_path=map_with_path)
    names = ("float32", "bfloat16", "float16", "int32", "uint32", "int8")
    module("jax.numpy", dtype=DType, **{name: DType(name) for name in names})
