"""Declarative mapping between the tensors of a checkpoint and the arrays of the parameter tree.

A checkpoint format is a list of `TensorMapping`s. Loading (directly into each array's sharding), saving, and the
check for missing and unexpected tensors are all derived from that list.
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


def _unchanged(tensors: Tensors) -> Tensors:
    return tensors


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """Mapping between some tensors of a checkpoint and the arrays that are built from exactly these tensors.

    Attributes:
      names: names of the tensors.
      paths: paths of the arrays: "embed.tokens" in the tree or, within a layer, "attn.q".
      layer: index in the model of the layer that contains `paths`; None if they are in no layer.
      load: tensors in the order of `names` -> arrays of one layer in the order of `paths`.
      save: inverse of `load`, bit-exact.
      expert: index of the expert: the arrays are this row of the arrays at `paths`. None: all rows.
    """

    names: tuple[str, ...]
    paths: tuple[str, ...]
    layer: int | None = None
    load: Callable[[Tensors], Tensors] = _unchanged
    save: Callable[[Tensors], Tensors] = _unchanged
    expert: int | None = None


def check(rules: Sequence[TensorMapping], names: Collection[str], where: str, ignored: Collection[str] = ()) -> None:
    """Checks that the rules use every tensor of a checkpoint and that no required tensor is missing.

    Args:
      rules: the rules of the model.
      names: names of the tensors in the checkpoint.
      where: the checkpoint, for messages.
      ignored: tensors without information: constants, or verified copies of other tensors.
    Raises:
      UserError: tensors are missing or unexpected; the message lists all of them.
    """
    wanted = {name for rule in rules for name in rule.names}
    missing, extra = sorted(wanted - set(names)), sorted(set(names) - wanted - set(ignored))
    if missing or extra:
        parts = [f"{len(found)} {kind}: {', '.join(found)}" for kind, found in _format_names(missing, extra) if found]
        raise UserError(f"{where} does not match its configuration ({'; '.join(parts)}); use the files of one release")


def _format_names(missing: list[str], extra: list[str]) -> list[tuple[str, list[str]]]:
    similar = {name: difflib.get_close_matches(name, extra, n=1, cutoff=0.9) for name in missing}
    named = [f"{name} (found {found[0]})" if found else name for name, found in similar.items()]
    return [("missing", named), ("unexpected", extra)]


def check_shapes(model: Architecture, rules: Sequence[TensorMapping], shape: Callable[[str], tuple[int, ...]]) -> None:
    """Checks every tensor's shape against the architecture, without reading any tensor.

    Args:
      model: the architecture.
      rules: its rules.
      shape: returns the shape of a tensor by name.
    Raises:
      UserError: a shape differs.
    """
    builder = _LayerBuilder(rules, lambda name: np.broadcast_to(np.zeros((), np.uint8), shape(name)))
    for path, spec in jax.tree_util.tree_leaves_with_path(param_specs(model), is_leaf=is_spec):
        layers, name = _locate(model, path)
        for layer in layers:
            builder.check(layer, name, spec.shape[_is_stacked(path) :])


def load(
    model: Architecture,
    rules: Sequence[TensorMapping],
    read: Callable[[str], np.ndarray],
    dtype: jax.typing.DTypeLike,
    shardings: Any = None,
) -> Any:
    """Loads the parameter tree one array at a time, with at most one array in host memory besides the loaded ones.

    Args:
      model: the architecture.
      rules: its rules.
      read: returns a tensor by name; may be a view of a file.
      dtype: dtype of the arrays.
      shardings: tree of shardings with the structure of the parameters: each device's shard is read and placed on it.
        None is the default device. Leaves may be `jax.ShapeDtypeStruct`s, to whose shapes arrays are zero-padded.
    Returns:
      The parameter tree.
    Raises:
      UserError: the shape of a tensor differs from the configuration.
    """
    builder = _LayerBuilder(rules, read)

    def load_array(path: Any, spec: ParamSpec, target: Any) -> jax.Array:
        layers, name = _locate(model, path)
        layer_shape = spec.shape[_is_stacked(path) :]
        padded_shape = target.shape if isinstance(target, jax.ShapeDtypeStruct) else spec.shape

        def load_shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            shard_shape = [len(range(*s.indices(n))) for s, n in zip(index, padded_shape, strict=True)]
            # JAX aliases an aligned array. Buffers that a training step overwrites must be owned by JAX: copied.
            shard = copying.empty_aligned(shard_shape, dtype) if target is None else np.empty(shard_shape, dtype)
            index = tuple(slice(*s.indices(n)) for s, n in zip(index, spec.shape, strict=True))  # without padding
            out = shard[tuple(slice(0, len(range(s.start, s.stop))) for s in index)]
            if out.size < shard.size:
                shard[...] = 0
            if not out.size:
                return shard
            if not _is_stacked(path):
                builder.copy(out, layers[0], name, layer_shape, index)
                return shard
            for row, layer in zip(out, layers[index[0]], strict=True):
                builder.copy(row, layer, name, layer_shape, index[1:])
            return shard

        if target is None:
            return jax.device_put(load_shard(tuple(slice(0, n) for n in spec.shape)), may_alias=True)
        sharding = target.sharding if isinstance(target, jax.ShapeDtypeStruct) else target
        # Block, or the host keeps arrays in transfer in memory while the next one is read.
        return jax.block_until_ready(jax.make_array_from_callback(padded_shape, sharding, load_shard))

    specs = param_specs(model)
    if shardings is None:
        return jax.tree_util.tree_map_with_path(lambda p, s: load_array(p, s, None), specs, is_leaf=is_spec)
    return jax.tree_util.tree_map_with_path(load_array, specs, shardings, is_leaf=is_spec)


class _LayerBuilder:
    """Builds the arrays of single layers from tensors, according to the rules."""

    def __init__(self, rules: Sequence[TensorMapping], read: Callable[[str], np.ndarray]):
        self._by_path = {
            (rule.layer, path, rule.expert): (rule, i) for rule in rules for i, path in enumerate(rule.paths)
        }
        self._read = read

    def check(self, layer: int | None, path: str, shape: tuple[int, ...]) -> None:
        """Builds an array and discards it, to raise the errors that loading would raise."""
        for expert, expert_shape in self._experts(layer, path, shape):
            self._build(layer, path, expert, expert_shape)

    def copy(
        self, out: np.ndarray, layer: int | None, path: str, shape: tuple[int, ...], index: tuple[slice, ...]
    ) -> None:
        """Copies a slice of an array into `out`.

        Args:
          out: destination.
          layer: the layer; None if the array is in no layer.
          path: path of the array.
          shape: shape of the array before slicing.
          index: the slice.
        """
        wanted = range(*index[0].indices(shape[0])) if index else range(0)
        for expert, expert_shape in self._experts(layer, path, shape):
            if expert is None:
                copying.copy_tiled(self._build(layer, path, None, expert_shape)[index], out)
            elif expert in wanted:
                copying.copy_tiled(self._build(layer, path, expert, expert_shape)[index[1:]], out[wanted.index(expert)])

    def _experts(
        self, layer: int | None, path: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[int | None, tuple[int, ...]]]:
        """Yields (expert or None, shape) of each array that the rules build for one array of the tree."""
        if (layer, path, None) in self._by_path:
            yield None, shape
        else:
            yield from ((expert, shape[1:]) for expert in range(shape[0]))

    def _build(self, layer: int | None, path: str, expert: int | None, shape: tuple[int, ...]) -> np.ndarray:
        rule, i = self._by_path[layer, path, expert]
        tensors = [self._read(name) for name in rule.names]
        try:
            array = rule.load(tensors)[i]
            reason = ""
        except ValueError as error:  # a reshape or split that does not match the number of elements
            array, reason = np.empty(()), f" ({error})"
        if array.shape != shape:
            found = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(rule.names, tensors, strict=True))
            raise UserError(
                f"{found} cannot be loaded into {path} {list(shape)} of the configuration{reason}; use the weights and "
                "the configuration of one release"
            )
        return array


def save(model: Architecture, rules: Sequence[TensorMapping], params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, tensor) of every tensor of a checkpoint, one rule at a time."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def array(rule: TensorMapping, path: str) -> np.ndarray:
        index = [] if rule.expert is None else [rule.expert]
        if rule.layer is not None:
            prefix, row = layer_location(model, rule.layer)
            path, index = f"{prefix}.{path}", index if row is None else [row, *index]
        return np.asarray(leaves[path])[tuple(index)]

    for rule in rules:
        yield from zip(rule.names, rule.save([array(rule, path) for path in rule.paths]), strict=True)


def saved_shapes(model: Architecture, rules: Sequence[TensorMapping]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors that `save` yields, in the same order."""
    empty = map_specs(lambda spec: np.broadcast_to(np.zeros((), np.uint8), spec.shape), param_specs(model))
    return {name: tensor.shape for name, tensor in save(model, rules, empty)}


def layer_kinds(model: Architecture) -> list[str]:
    """Lists the kind of every layer."""
    return [model.pattern[i % len(model.pattern)] for i in range(model.layers)]


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest pattern that repeats to these layer kinds."""
    return next(
        tuple(kinds[:n]) for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
    )


def layer_location(model: Architecture, layer: int) -> tuple[str, int | None]:
    """Returns (path of a layer in the tree, its row in the stacked arrays there; None if they are not stacked)."""
    repeat, position = divmod(layer, len(model.pattern))
    return (f"layers.{position}", repeat) if repeat < model.repeats else (f"tail.{position}", None)


def _is_stacked(path: Any) -> bool:
    return path_name(path).startswith("layers.")


def _locate(model: Architecture, path: Any) -> tuple[Sequence[int | None], str]:
    """Returns (layers whose arrays are stored at a path of the tree, the path within a rule)."""
    parts = path_name(path).split(".")
    if parts[0] == "layers":
        return range(int(parts[1]), model.repeats * len(model.pattern), len(model.pattern)), ".".join(parts[2:])
    if parts[0] == "tail":
        return [model.repeats * len(model.pattern) + int(parts[1])], ".".join(parts[2:])
    return [None], ".".join(parts)
