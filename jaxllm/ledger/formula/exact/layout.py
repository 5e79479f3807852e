"""Sharding of each array of a model over a mesh, and the elements that each device stores.

Thousands of runs have the same layout, so a layout and its counts are computed once and cached.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax

from jaxllm.config import Architecture, LoraConfig, MeshConfig
from jaxllm.ledger.formula.exact.shard_sizes import Count, Shard
from jaxllm.ledger.formula.exact.shard_sizes import count as count_of
from jaxllm.model.adapter_specs import adapter_specs
from jaxllm.model.specs import ParamSpec, is_spec
from jaxllm.parallel import mesh as mesh_lib
from jaxllm.parallel.mesh import Placement


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter array and its placements on the devices.

    Attributes:
      name: Path of the array, `layers.0.attn.q`.
      spec: Declaration of the array.
      weight, moment, share: Placements of the stored weight, of its optimizer state, and of an array that is sharded
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


Quantity = Literal["weight", "moment", "sharded", "compute"]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Sharding of a model's arrays on one mesh at one ZeRO stage, with cached element counts.

    Layouts compare by identity, so a layout is a cheap key for caches of other modules.

    Attributes:
      mesh: Axis -> devices.
      parameters: Every array of the model; adapters come last.
    """

    mesh: dict[str, int]
    parameters: tuple[Parameter, ...]
    _totals: dict[tuple[Quantity, bool, tuple[str, ...]], Count] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    _counts: dict[tuple[Quantity | int, ...], Count] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _selected: dict[tuple[bool, tuple[str, ...]], list[Parameter]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

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

    @functools.cached_property
    def _elements(self) -> dict[int, int]:
        """Id of a placement -> elements on one device."""
        placements = (place for p in self.parameters for place in (p.weight, p.moment, p.sharded))
        return {id(place): place.elements_per_device(self.mesh) for place in placements}

    @functools.cached_property
    def _compute_elements(self) -> dict[int, int]:
        """Id of a parameter's `sharded` -> elements of the weight on one device during compute."""
        return {id(p.sharded): self._while_computing(p) for p in self.parameters}

    def _while_computing(self, parameter: Parameter) -> int:
        sharded = parameter.sharded
        # If moments are unsharded (stage 0, or one device along `data`), weights compute as they are stored. Only
        # weights all-gathered from shards may have rows of padding beyond those of `tensor`.
        if sharded.zero_dim is None or parameter.moment.zero_dim is None:
            return self.per_device(parameter.weight)
        local = sharded.shape[sharded.zero_dim] // math.prod(self.mesh[axis] for axis in sharded.axes[sharded.zero_dim])
        return self.per_device(sharded) // local * sharded.gathered

    def per_device(self, placement: Placement) -> int:
        count = self._elements.get(id(placement))
        return placement.elements_per_device(self.mesh) if count is None else count

    def compute_elements(self, parameter: Parameter) -> int:
        count = self._compute_elements.get(id(parameter.sharded))
        return self._while_computing(parameter) if count is None else count

    def select(self, groups: tuple[str, ...], trained: bool = False) -> list[Parameter]:
        """Returns the arrays of some groups, of all if none is given; `trained` selects trained arrays only."""
        if (trained, groups) not in self._selected:
            found = self.trained if trained else self.parameters
            self._selected[trained, groups] = [p for p in found if not groups or p.group in groups]
        return self._selected[trained, groups]

    def total(self, of: Quantity, groups: tuple[str, ...], trained: bool = False) -> Count:
        key = (of, trained, groups)
        if key not in self._totals:
            self._totals[key] = self.count(of, self.select(groups, trained))
        return self._totals[key]

    def count(self, of: Quantity, parameters: Iterable[Parameter]) -> Count:
        """Returns the elements on one device of some of this layout's arrays together."""
        parameters = tuple(parameters)
        key = (of, *map(id, parameters))
        if key not in self._counts:
            self._counts[key] = count_of(self.shard_of(of, parameter) for parameter in parameters)
        return self._counts[key]

    def shard_of(self, of: Quantity, parameter: Parameter) -> Shard:
        """Returns a device's shard of an array."""
        whole = parameter.spec.size
        placement = parameter.sharded if of == "compute" else getattr(parameter, of)
        axes = {axis for names in placement.axes for axis in names}
        if of == "compute" and placement.zero_dim is not None:
            axes.discard("data")
        num_shards = math.prod(self.mesh[axis] for axis in axes)
        held = self.compute_elements(parameter) if of == "compute" else self.per_device(placement)
        return Shard(whole, held * num_shards - whole, num_shards)


# (rank, targets) of low-rank adapters; (0, ()) without adapters.
Lora = tuple[int, tuple[str, ...]]
NO_LORA: Lora = (0, ())


def _declared(param_specs: Callable[[Architecture], Any], model: Architecture, lora: Lora) -> Any:
    """Returns the parameter specs of a model, or those of its adapters if the rank is not 0."""
    rank, targets = lora
    return adapter_specs(model, LoraConfig(rank=rank, targets=targets)) if rank else param_specs(model)


@functools.lru_cache(maxsize=16)
def _leaves(param_specs: Callable[[Architecture], Any], model: Architecture, lora: Lora) -> list[tuple[str, ParamSpec]]:
    paths = jax.tree_util.tree_leaves_with_path(_declared(param_specs, model, lora), is_leaf=is_spec)
    return [(mesh_lib.path_name(path), spec) for path, spec in paths]


@functools.lru_cache(maxsize=1024)
def _placed(
    param_specs: Callable[[Architecture], Any],
    placements: Callable[..., Any],
    model: Architecture,
    axes: tuple[int, ...],
    stage: int,
    lora: Lora,
) -> list[Placement]:
    """Returns the placement of each array of a model, for weights stored in the compute dtype, at a ZeRO stage.

    Stage 0: unsharded over `data`. Stage 1: unsharded, but padded like their moments. Stage 3: sharded over `data`.
    """
    mesh = MeshConfig(**dict(zip(mesh_lib.AXES, axes, strict=True)), zero=stage)
    tree = placements(_declared(param_specs, model, lora), mesh, "weights", False)
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Placement))


@functools.lru_cache(maxsize=4096)
def layout_of(
    param_specs: Callable[[Architecture], Any],
    placements: Callable[..., Any],
    model: Architecture,
    axes: tuple[int, ...],
    weights: bool,
    moments: bool,
    stage: int,
    lora: Lora,
) -> Layout:
    """Returns the layout of a model's arrays on a mesh.

    Args:
      param_specs, placements: Functions that declare and place arrays. They are arguments, and so part of the cache
        key: a test's replacements never hit cached results of the real ones.
      axes: Devices along each of `mesh.AXES`.
      weights, moments: Whether trained weights and their moments are sharded over `data`.
      stage: ZeRO stage; frozen weights are unsharded over `data` below stage 3.
      lora: Adapters; with adapters, all parameters of the model are frozen.
    """

    def placed(stage: int, lora: Lora) -> list[Placement]:
        return _placed(param_specs, placements, model, axes, stage, lora)

    def at(split: bool) -> list[Placement]:
        return placed(3 if split else 1 if moments else 0, lora)

    frozen: tuple[Parameter, ...] = ()
    if lora != NO_LORA:
        places = zip(_leaves(param_specs, model, NO_LORA), placed(3 if stage == 3 else 0, NO_LORA), strict=True)
        frozen = tuple(Parameter(name, spec, place, place, place, False) for (name, spec), place in places)
    lists = zip(_leaves(param_specs, model, lora), at(weights), at(moments), at(True), strict=True)
    trained = tuple(Parameter(name, spec, weight, moment, sharded) for (name, spec), weight, moment, sharded in lists)
    return Layout(dict(zip(mesh_lib.AXES, axes, strict=True)), frozen + trained)
