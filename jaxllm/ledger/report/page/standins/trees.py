"""Stand-ins for JAX's pytrees (dicts with sorted keys, lists and tuples) and dtypes."""

from typing import Any


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
            return type(tree)(
                [map_with_path(function, v, is_leaf=is_leaf, path=(*path, Key(idx=i))) for i, v in enumerate(tree)]
            )
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

    def __init__(self, named: Any) -> None:
        self.name = named if isinstance(named, str) else named.name
