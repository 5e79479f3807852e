"""What a checkpoint's tensors and the arrays of our parameter tree have to do with each other, as data.

A format of checkpoints is a list of `Rule`s. Everything else follows from it: loading, straight to where each array
lies; saving; and the account of what is missing and what nobody asked for.
"""

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop import copying
from jaxllm.model.specs import ParamSpec, is_spec, map_specs, param_specs
from jaxllm.parallel.mesh import path_name

Tensors = Sequence[np.ndarray]


def _same(tensors: Tensors) -> Tensors:
    return tensors


@dataclasses.dataclass(frozen=True)
class Rule:
    """Some tensors of a checkpoint, and the arrays that are made of them and of nothing else.

    Attributes:
      names: of the tensors.
      paths: of the arrays: "embed.tokens" in the tree or, in a layer, "attn.q".
      layer: the layer that `paths` are in, counted as the model counts; None: they are in no layer.
      load: tensors in the order of `names` -> arrays, of one layer, in the order of `paths`.
      save: its inverse, to the bit.
      expert: the arrays are this expert's, each a row of what stands at `paths`; None: they are all of it.
    """

    names: tuple[str, ...]
    paths: tuple[str, ...]
    layer: int | None = None
    load: Callable[[Tensors], Tensors] = _same
    save: Callable[[Tensors], Tensors] = _same
    expert: int | None = None


def check(rules: Sequence[Rule], names: Collection[str], where: str, ignored: Collection[str] = ()) -> None:
    """Every tensor is used, and every one that is needed is there.

    Args:
      names: of the tensors that the checkpoint has.
      where: the checkpoint, for the message.
      ignored: tensors that say nothing of their own: constants, or copies of others that have been compared.
    Raises:
      UserError: lists all names that are missing, and all that are left over.
    """
    wanted = {name for rule in rules for name in rule.names}
    missing, extra = sorted(wanted - set(names)), sorted(set(names) - wanted - set(ignored))
    if missing or extra:
        parts = [f"{len(found)} {kind}: {', '.join(found)}" for kind, found in _told(missing, extra) if found]
        raise UserError(
            f"{where} does not hold what its configuration says ({'; '.join(parts)}); use the files of one release"
        )


def _told(missing: list[str], extra: list[str]) -> list[tuple[str, list[str]]]:
    near = {name: difflib.get_close_matches(name, extra, n=1, cutoff=0.9) for name in missing}
    named = [f"{name} (there is {found[0]})" if found else name for name, found in near.items()]
    return [("missing", named), ("unexpected", extra)]


def check_shapes(model: Architecture, rules: Sequence[Rule], shape: Callable[[str], tuple[int, ...]]) -> None:
    """Every tensor is of the shape that the model makes it, before any of them is read.

    Args:
      shape: of a tensor, by name.
    Raises:
      UserError: one is of another shape.
    """
    pieces = _Pieces(rules, lambda name: np.broadcast_to(np.zeros((), np.uint8), shape(name)))
    for path, spec in jax.tree_util.tree_leaves_with_path(param_specs(model), is_leaf=is_spec):
        layers, name = _place(model, path)
        for layer in layers:
            pieces.get(layer, name, spec.shape[_stacked(path) :])


def load(
    model: Architecture,
    rules: Sequence[Rule],
    read: Callable[[str], np.ndarray],
    dtype: jax.typing.DTypeLike,
    shardings: Any = None,
) -> Any:
    """The parameter tree of a model, array by array: beside what is done there is never more than one array.

    Args:
      read: a tensor by name; may be a view of a file.
      dtype: of the arrays.
      shardings: a tree of shardings like the parameters: each device's part is read and put there; None is the
        default device. `jax.ShapeDtypeStruct`s in their place have a shape too, to which arrays are padded with zeros.
    Raises:
      UserError: a tensor of another shape than the configuration says.
    """
    pieces = _Pieces(rules, read)

    def whole(path: Any, spec: ParamSpec, target: Any) -> jax.Array:
        layers, name = _place(model, path)
        shape = spec.shape[_stacked(path) :]
        stored = target.shape if isinstance(target, jax.ShapeDtypeStruct) else spec.shape

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            shares = [len(range(*s.indices(n))) for s, n in zip(index, stored, strict=True)]
            # What a training step is to write over has to be JAX's own, so that it is not to be had without a copy.
            made = copying.aligned(shares, dtype) if target is None else np.empty(shares, dtype)
            index = tuple(slice(*s.indices(n)) for s, n in zip(index, spec.shape, strict=True))  # without padding
            sizes = [len(range(s.start, s.stop)) for s in index]
            out = made[tuple(slice(0, size) for size in sizes)]
            if out.size < made.size:
                made[...] = 0
            if not out.size:
                return made
            if not _stacked(path):
                pieces.copy(out, layers[0], name, shape, index)
                return made
            for row, layer in zip(out, layers[index[0]], strict=True):
                pieces.copy(row, layer, name, shape, index[1:])
            return made

        if target is None:
            return jax.device_put(part(tuple(slice(0, n) for n in spec.shape)), may_alias=True)
        sharding = target.sharding if isinstance(target, jax.ShapeDtypeStruct) else target
        # Waited for, or the host would hold what is still on its way beside what is read next.
        return jax.block_until_ready(jax.make_array_from_callback(stored, sharding, part))

    specs = param_specs(model)
    if shardings is None:
        return jax.tree_util.tree_map_with_path(lambda p, s: whole(p, s, None), specs, is_leaf=is_spec)
    return jax.tree_util.tree_map_with_path(whole, specs, shardings, is_leaf=is_spec)


class _Pieces:
    """The arrays of single layers, made of tensors by rules."""

    def __init__(self, rules: Sequence[Rule], read: Callable[[str], np.ndarray]):
        self._by_path = {
            (rule.layer, path, rule.expert): (rule, i) for rule in rules for i, path in enumerate(rule.paths)
        }
        self._read = read

    def get(self, layer: int | None, path: str, shape: tuple[int, ...]) -> None:
        """Makes an array and throws it away: what there is to complain of is found."""
        for expert, rows in self._parts(layer, path, shape):
            self._made(layer, path, expert, rows)

    def copy(
        self, out: np.ndarray, layer: int | None, path: str, shape: tuple[int, ...], index: tuple[slice, ...]
    ) -> None:
        """Fills `out` with a part of an array.

        Args:
          shape: of the whole array.
          index: of the part.
        """
        experts = range(*index[0].indices(shape[0])) if index else range(0)
        for expert, rows in self._parts(layer, path, shape):
            if expert is None:
                copying.copy(self._made(layer, path, None, rows)[index], out)
            elif expert in experts:
                copying.copy(self._made(layer, path, expert, rows)[index[1:]], out[experts.index(expert)])

    def _parts(
        self, layer: int | None, path: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[int | None, tuple[int, ...]]]:
        """(expert or None, shape) of the arrays that the rules give for one of ours."""
        if (layer, path, None) in self._by_path:
            yield None, shape
        else:
            yield from ((expert, shape[1:]) for expert in range(shape[0]))

    def _made(self, layer: int | None, path: str, expert: int | None, shape: tuple[int, ...]) -> np.ndarray:
        rule, i = self._by_path[layer, path, expert]
        tensors = [self._read(name) for name in rule.names]
        try:
            made = rule.load(tensors)[i]
            reason = ""
        except ValueError as error:  # a reshape, or a split, of other numbers than there are
            made, reason = np.empty(()), f" ({error})"
        if made.shape != shape:
            told = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(rule.names, tensors, strict=True))
            raise UserError(
                f"{told}: the configuration makes {path} {list(shape)} of it{reason}; they do not belong together"
            )
        return made


def save(model: Architecture, rules: Sequence[Rule], params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of every tensor of a checkpoint, one rule's at a time."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def array(rule: Rule, path: str) -> np.ndarray:
        index: tuple[int, ...] = () if rule.expert is None else (rule.expert,)
        if rule.layer is None:
            return np.asarray(leaves[path])[index]
        period = len(model.pattern)
        repeat, place = divmod(rule.layer, period)
        if repeat < model.repeats:
            return np.asarray(leaves[f"layers.{place}.{path}"])[(repeat, *index)]
        return np.asarray(leaves[f"tail.{rule.layer - model.repeats * period}.{path}"])[index]

    for rule in rules:
        yield from zip(rule.names, rule.save([array(rule, path) for path in rule.paths]), strict=True)


def saved_shapes(model: Architecture, rules: Sequence[Rule]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that `save` would give, in its order."""
    nothing = map_specs(lambda spec: np.broadcast_to(np.zeros((), np.uint8), spec.shape), param_specs(model))
    return {name: tensor.shape for name, tensor in save(model, rules, nothing)}


def _stacked(path: Any) -> bool:
    return path_name(path).startswith("layers.")


def _place(model: Architecture, path: Any) -> tuple[Sequence[int | None], str]:
    """(the layers whose arrays stand at a path of the tree, stacked or alone; its path in a rule)."""
    parts = path_name(path).split(".")
    if parts[0] == "layers":
        return range(int(parts[1]), model.repeats * len(model.pattern), len(model.pattern)), ".".join(parts[2:])
    if parts[0] == "tail":
        return [model.repeats * len(model.pattern) + int(parts[1])], ".".join(parts[2:])
    return [None], ".".join(parts)
