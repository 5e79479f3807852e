"""Sharding of each array of a model over a mesh, and the elements that each device stores.

Thousands of runs have the same layout, so a layout and its counts are computed once and cached.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, Literal

import jax

from jaxllm.config import Architecture, LoraConfig, MeshConfig
from jaxllm.ledger.formula.exact.shard_sizes import Count, Shard
from jaxllm.ledger.formula.exact.shard_sizes import count as count_of
from jaxllm.model.adapter_specs import adapter_specs
from jaxllm.model.specs import ParamSpec, is_spec, param_specs
from jaxllm.parallel import mesh as mesh_lib
from jaxllm.parallel.mesh import Placement

Quantity = Literal["weight", "moment", "sharded", "compute"]


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter array and its placements on the devices; parameters compare by identity.

    Attributes:
      name: Path of the array, `layers.0.attn.q`.
      spec: Declaration of the array.
      weight, moment, sharded: Placements of the stored weight, of its optimizer state, and of an array that is sharded
        over `data` at any ZeRO stage.
      trained: Whether it has gradients and moments; a frozen array has its weight's placement for all three.
    """

    name: str
    spec: ParamSpec
    weight: Placement
    moment: Placement
    sharded: Placement
    trained: bool = True

    @functools.cached_property
    def group(self) -> str:
        """Group of the array: embed | layers | tail | final_norm | head."""
        return self.name.partition(".")[0]

    @functools.cached_property
    def compute_elements(self) -> int:
        """Elements on one device of the weight during compute: sharded over `tensor` only, without `data` padding."""
        sharded = self.sharded
        # If moments are unsharded (stage 0, or one device along `data`), weights compute as they are stored. Only
        # weights all-gathered from shards may have rows of padding beyond those of `tensor`.
        if sharded.zero_dim is None or self.moment.zero_dim is None:
            return self.weight.elements_per_device
        return sharded.elements_per_device // sharded.local_shape[sharded.zero_dim] * sharded.gathered

    def shard(self, quantity: Quantity, mesh: dict[str, int]) -> Shard:
        """Returns a device's shard of the array, as a placement or as computed with."""
        placement: Placement = self.sharded if quantity == "compute" else getattr(self, quantity)
        axes = {axis for names in placement.axes for axis in names}
        elements = placement.elements_per_device
        if quantity == "compute":
            elements = self.compute_elements
            if placement.zero_dim is not None:
                axes.discard("data")
        num_shards = math.prod(mesh[axis] for axis in axes)
        return Shard(self.spec.size, elements * num_shards - self.spec.size, num_shards)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Sharding of a model's arrays on one mesh at one ZeRO stage.

    Layouts compare by identity, so a layout is a cheap key for caches of other modules.

    Attributes:
      mesh: Axis -> devices.
      parameters: Every array of the model; adapters come last.
    """

    mesh: dict[str, int]
    parameters: tuple[Parameter, ...]

    @functools.cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """Arrays with gradients and moments: all arrays, or only the adapters if there are any."""
        return tuple(p for p in self.parameters if p.trained)

    @functools.cached_property
    def frozen(self) -> tuple[Parameter, ...]:
        """Arrays without gradients and moments."""
        return tuple(p for p in self.parameters if not p.trained)

    @functools.cached_property
    def stored(self) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]:
        """(name, shape, stored shape of the moments) of each trained array."""
        return tuple((p.name, p.spec.shape, p.moment.shape) for p in self.trained)

    def select(self, groups: tuple[str, ...], trained: bool = False) -> list[Parameter]:
        """Returns the arrays of some groups, of all if none is given; `trained` selects trained arrays only."""
        return _select(self, groups, trained)

    def total(self, quantity: Quantity, groups: tuple[str, ...], trained: bool = False) -> Count:
        """Returns the elements on one device of the arrays that `select` returns, together."""
        return _count(self, quantity, tuple(self.select(groups, trained)))

    def count(self, quantity: Quantity, parameters: Iterable[Parameter]) -> Count:
        """Returns the elements on one device of some of this layout's arrays together."""
        return _count(self, quantity, tuple(parameters))


@functools.lru_cache(maxsize=16384)
def _select(layout: Layout, groups: tuple[str, ...], trained: bool) -> list[Parameter]:
    found = layout.trained if trained else layout.parameters
    return [p for p in found if not groups or p.group in groups]


@functools.lru_cache(maxsize=16384)
def _count(layout: Layout, quantity: Quantity, parameters: tuple[Parameter, ...]) -> Count:
    return count_of(parameter.shard(quantity, layout.mesh) for parameter in parameters)


# (rank, targets) of low-rank adapters; (0, ()) without adapters.
Lora = tuple[int, tuple[str, ...]]
NO_LORA: Lora = (0, ())


def _declared(model: Architecture, lora: Lora) -> Any:
    """Returns the parameter specs of a model, or those of its adapters if the rank is not 0."""
    rank, targets = lora
    return adapter_specs(model, LoraConfig(rank=rank, targets=targets)) if rank else param_specs(model)


@functools.lru_cache(maxsize=16)
def _leaves(model: Architecture, lora: Lora) -> list[tuple[str, ParamSpec]]:
    paths = jax.tree_util.tree_leaves_with_path(_declared(model, lora), is_leaf=is_spec)
    return [(mesh_lib.path_name(path), spec) for path, spec in paths]


@functools.lru_cache(maxsize=1024)
def _placed(model: Architecture, axes: tuple[int, ...], stage: int, lora: Lora) -> list[Placement]:
    """Returns the placement of each array of a model, for weights stored in the compute dtype, at a ZeRO stage.

    Stage 0: unsharded over `data`. Stage 1: unsharded, but padded like their moments. Stage 3: sharded over `data`.
    """
    mesh = MeshConfig(**dict(zip(mesh_lib.AXES, axes, strict=True)), zero=stage)
    tree = mesh_lib.placements(_declared(model, lora), mesh, "weights", False)
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Placement))


@functools.lru_cache(maxsize=4096)
def layout_of(
    model: Architecture, axes: tuple[int, ...], weights: bool, moments: bool, stage: int, lora: Lora
) -> Layout:
    """Returns the layout of a model's arrays on a mesh.

    Args:
      axes: Devices along each of `mesh.AXES`.
      weights, moments: Whether trained weights and their moments are sharded over `data`.
      stage: ZeRO stage; frozen weights are unsharded over `data` below stage 3.
      lora: Adapters; with adapters, all parameters of the model are frozen.
    """

    def at(split: bool) -> list[Placement]:
        return _placed(model, axes, 3 if split else 1 if moments else 0, lora)

    frozen: tuple[Parameter, ...] = ()
    if lora != NO_LORA:
        placements = _placed(model, axes, 3 if stage == 3 else 0, NO_LORA)
        places = zip(_leaves(model, NO_LORA), placements, strict=True)
        frozen = tuple(Parameter(name, spec, place, place, place, False) for (name, spec), place in places)
    lists = zip(_leaves(model, lora), at(weights), at(moments), at(True), strict=True)
    trained = tuple(Parameter(name, spec, weight, moment, sharded) for (name, spec), weight, moment, sharded in lists)
    return Layout(dict(zip(mesh_lib.AXES, axes, strict=True)), frozen + trained)


def clear_caches() -> None:
    """Clears the cached layouts, after the rules that they are made with have changed."""
    for cached in (_select, _count, _leaves, _placed, layout_of):
        cached.cache_clear()
