"""Sharding and memory placement of the train state and the gradients: ZeRO, tensor parallelism, host offload."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.config import Architecture, Config, validate
from jaxllm.model.adapter_specs import frozen_specs, trained_specs
from jaxllm.model.specs import ParamSpec, is_spec, leaves
from jaxllm.parallel import mesh as mesh_lib
from jaxllm.parallel.mesh import Kind, Placement
from jaxllm.step.optimizers import map_state
from jaxllm.step.precision import Policy
from jaxllm.step.state import TrainState

HOST = "pinned_host"
_KINDS: tuple[Kind, ...] = ("weights", "moments")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placement of every array of the train state on the devices of a run.

    Attributes:
      mesh: Device mesh of the run.
      stage: ZeRO stage, 0 to 3.
      specs: Specs of the trained arrays.
      weights: `Placement`s of the stored weights, a tree like `specs`.
      moments: `Placement`s of the optimizer moments, a tree like `specs`. Reduced gradients have the same placements:
        stage 1 keeps gradients unsharded during the backward pass and reduce-scatters their sum.
      sharded: `Placement`s of the trained arrays when sharded over `data`, whatever the stage.
      frozen: `Placement`s of the frozen weights, sharded over `data` only in stage 3; None if all weights are trained.
      host_moments: Whether moments are stored in host memory between updates.
      host_weights: Whether weights are stored in host memory between updates.
    """

    mesh: Mesh
    stage: int
    specs: Any
    weights: Any
    moments: Any
    sharded: Any
    frozen: Any
    host_moments: bool
    host_weights: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Number of devices along each mesh axis."""
        return dict(self.mesh.shape)

    def constrain(self, tree: Any, placements: Any) -> Any:
        """Constrains the sharding of the arrays of a tree to the given placements."""
        if self.mesh.size == 1:
            return tree

        def one(placement: Placement, x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, mesh_lib.named_sharding(self.mesh, placement))

        return jax.tree.map(one, placements, tree)

    def state_shardings(self, state: TrainState, on_device: bool = False) -> TrainState:
        """Returns the sharding, including the memory kind, of every array of a train state.

        Args:
          state: The train state; abstract arrays suffice.
          on_device: Whether to return the shardings during an update, when offloaded arrays are in device memory.
        """

        def memory(host: bool) -> str | None:
            return ("device" if on_device else HOST) if host else None

        def moment(leaf: Any, _: str, spec: ParamSpec | None) -> Any:
            if spec is None or leaf.ndim == 0:
                return replicated
            placement = by_spec[id(spec)]
            if leaf.shape != placement.shape:  # a factored moment or its placeholder: replicated
                placement = Placement(leaf.shape, ((),) * leaf.ndim, leaf.shape)
            return mesh_lib.named_sharding(self.mesh, placement, memory(self.host_moments))

        specs = leaves(self.specs)
        placements = jax.tree.leaves(self.moments)
        by_spec = {id(spec): placement for spec, placement in zip(specs, placements, strict=True)}
        replicated: Any = mesh_lib.replicated(self.mesh)
        return TrainState(
            step=replicated,
            params=jax.tree.map(
                lambda placement: mesh_lib.named_sharding(self.mesh, placement, memory(self.host_weights)),
                self.weights,
            ),
            opt_state=map_state(moment, state.opt_state, self.specs),
            key=replicated,
            loss_scale=jax.tree.map(lambda _: replicated, state.loss_scale),
            frozen=jax.tree.map(lambda placement: mesh_lib.named_sharding(self.mesh, placement), self.frozen),
        )

    def params_on_device(self, state: TrainState) -> Any:
        """Returns the stored weights, copied to device memory if they are offloaded to the host."""
        if not self.host_weights:
            return state.params
        return jax.device_put(state.params, self.state_shardings(state, on_device=True).params)


def make_layout(config: Config, model: Architecture, policy: Policy, mesh: Mesh) -> Layout:
    """Builds the layout of a configuration.

    Args:
      config: Configuration of the run.
      model: Architecture of the model.
      policy: Precision policy.
      mesh: Device mesh of the run.

    Raises:
      UserError: The configuration is not supported; the message names the tensor, the axis and the sizes.
    """
    offload, specs, base = config.optimizer.offload, trained_specs(model, config.lora), frozen_specs(model, config.lora)
    kinds = {kind: mesh_lib.placements(specs, config.mesh, kind, policy.mixed) for kind in _KINDS}
    paths = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    arrays = (
        (mesh_lib.path_name(path), spec.shape, placement.shape)
        for (path, spec), placement in zip(paths, jax.tree.leaves(kinds["moments"]), strict=True)
    )
    validate.check_update(config.optimizer, policy.name, policy.mixed, arrays)
    frozen = None
    if base is not None:  # no gradients or moments: only stage 3 shards frozen weights
        frozen_mesh = dataclasses.replace(config.mesh, zero=3 if config.mesh.zero == 3 else 0)
        frozen = mesh_lib.placements(base, frozen_mesh, "weights", mixed=False)
    return Layout(
        mesh=mesh,
        stage=config.mesh.zero,
        specs=specs,
        weights=kinds["weights"],
        moments=kinds["moments"],
        sharded=mesh_lib.placements(specs, dataclasses.replace(config.mesh, zero=3), "weights", policy.mixed),
        frozen=frozen,
        host_moments=offload != "none",
        host_weights=offload == "all",
    )
