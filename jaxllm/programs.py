"""The programs of this system: what is jitted, over which inputs, with which buffers donated.

The only home of `jax.jit`. The trainer and the decoder run these objects; the ledger compiles the same
ones. What is checked is what runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.config import Architecture, Config
from jaxllm.data.pipeline import BATCH_FIELDS
from jaxllm.mesh import replicated, sharding
from jaxllm.train import state as state_lib
from jaxllm.train import step as step_lib
from jaxllm.train.optimizer import make_optimizer, make_schedule
from jaxllm.train.precision import policy_for
from jaxllm.train.step import Recipe


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function with the abstract values of all its arguments.

    Attributes:
      name: for messages.
      jitted: the result of `jax.jit`.
      inputs: `jax.ShapeDtypeStruct` trees, one an argument, with shardings where there is a mesh.
      donated: positions of the arguments whose buffers the program takes over.
    """

    name: str
    jitted: Callable[..., Any]
    inputs: tuple[Any, ...]
    donated: tuple[int, ...]

    def compile(self) -> jax.stages.Compiled:
        """The executable for these inputs and no others: calling it can never compile again."""
        return self.jitted.lower(*self.inputs).compile()  # type: ignore[attr-defined]


def make_recipe(config: Config, model: Architecture, platform: str) -> Recipe:
    """All that a training step is made of, from the configuration."""
    return Recipe(
        model=model,
        optimizer=make_optimizer(config.optimizer, model),
        schedule=make_schedule(config.optimizer, config.train.steps),
        policy=policy_for(config.precision.policy, platform),
        clip_norm=config.optimizer.clip_norm,
        accumulate=config.train.accumulate,
        remat=config.remat.policy,
        loss_chunk=config.train.loss_chunk,
    )


def abstract_state(config: Config, recipe: Recipe, mesh: Mesh) -> Any:
    """The train state as shapes, dtypes and shardings."""
    shapes = jax.eval_shape(lambda: state_lib.create(recipe.model, recipe.optimizer, config.train.seed))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), shapes)


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """A step's batch, likewise; the fields of `jaxllm.data.pipeline.BATCH_FIELDS`."""
    shape = (config.train.batch_size, config.data.sequence_length)
    placed = sharding(mesh, ("batch", "sequence"))
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for name, dtype in BATCH_FIELDS.items()}


def init_state(config: Config, recipe: Recipe, mesh: Mesh) -> Program:
    """() -> the train state before the first step, made where it will live."""
    abstract = abstract_state(config, recipe, mesh)
    jitted = jax.jit(
        lambda: state_lib.create(recipe.model, recipe.optimizer, config.train.seed),
        out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    )
    return Program("init_state", jitted, (), ())


def train_step(config: Config, recipe: Recipe, mesh: Mesh) -> Program:
    """(state, batch) -> (state, metrics), the state donated."""
    state, batch = abstract_state(config, recipe, mesh), abstract_batch(config, mesh)
    jitted = jax.jit(
        lambda state, batch: step_lib.train_step(state, batch, recipe),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), replicated(mesh)),
    )
    return Program("train_step", jitted, (state, batch), (0,))


def eval_step(config: Config, recipe: Recipe, mesh: Mesh) -> Program:
    """(params, batch) -> sums of losses and tokens."""
    state, batch = abstract_state(config, recipe, mesh), abstract_batch(config, mesh)
    jitted = jax.jit(lambda params, batch: step_lib.eval_step(params, batch, recipe), out_shardings=replicated(mesh))
    return Program("eval_step", jitted, (state.params, batch), ())
