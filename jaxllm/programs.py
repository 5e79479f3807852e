"""The programs of this system: what is jitted, over which inputs, with which buffers donated.

The only home of `jax.jit`. The trainer and the decoder run these objects; the ledger compiles the same
ones. What is checked is what runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import Architecture, Config, remat
from jaxllm.config import attention as attention_choice
from jaxllm.data.batch import BATCH_FIELDS
from jaxllm.decode import generate, weights
from jaxllm.decode import state as decode_state
from jaxllm.model import adapter_specs, adapters, specs
from jaxllm.parallel.mesh import batch_sharding, replicated
from jaxllm.step import precision
from jaxllm.step import state as state_lib
from jaxllm.step.gradients import evaluate
from jaxllm.step.optimizers import make_optimizer, make_schedule
from jaxllm.step.placement import Layout, make_layout
from jaxllm.step.precision import policy_for
from jaxllm.step.spec import Recipe
from jaxllm.step.state import TrainState
from jaxllm.step.train_step import train_step as train_step_function


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
    """All that a training step is made of, from the configuration.

    Raises:
      UserError: the configuration names an implementation of attention that cannot run so.
    """
    policy = policy_for(config.precision.policy, platform)
    return Recipe(
        model=model,
        optimizer=make_optimizer(config.optimizer, model, config.lora),
        schedule=make_schedule(config.optimizer, config.train.steps),
        policy=policy,
        attention=attention_choice.resolve(config, model, platform, policy.compute.name),
        remat=remat.parse(config.remat.policy),
        clip_norm=config.optimizer.clip_norm,
        accumulate=config.train.accumulate,
        loss_chunk=config.train.loss_chunk,
        attention_chunk=config.train.attention_chunk,
        adapter_scale=adapters.scale_of(config.lora),
        scale_growth=config.precision.loss_scale_growth,
    )


def _create(config: Config, recipe: Recipe, layout: Layout) -> Callable[[], TrainState]:
    policy = recipe.policy
    return lambda: state_lib.create(
        recipe.model,
        config.lora,
        recipe.optimizer,
        config.train.seed,
        (policy.store, policy.compute),
        (layout.weights, layout.frozen),
        precision.initial_scale(config.precision, policy),
    )


def abstract_state(config: Config, recipe: Recipe, mesh: Mesh) -> Any:
    """The train state as shapes, dtypes and shardings."""
    layout = make_layout(config, recipe.model, recipe.policy, mesh)
    shapes = jax.eval_shape(_create(config, recipe, layout))
    return jax.tree.map(
        lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
        shapes,
        layout.state_shardings(shapes),
    )


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """A step's batch, likewise; the fields of `jaxllm.data.batch.BATCH_FIELDS`."""
    shape = (config.train.batch_size, config.data.sequence_length)
    placed = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for name, dtype in BATCH_FIELDS.items()}


def init_state(config: Config, recipe: Recipe, mesh: Mesh) -> Program:
    """() -> the train state before the first step, made where it will live."""
    abstract = abstract_state(config, recipe, mesh)
    layout = make_layout(config, recipe.model, recipe.policy, mesh)
    jitted = jax.jit(
        _create(config, recipe, layout),
        out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    )
    return Program("init_state", jitted, (), ())


def state_from(config: Config, recipe: Recipe, mesh: Mesh, load: Callable[[Any, Any], Any]) -> TrainState:
    """The train state before the first step with weights from elsewhere, which are read straight to where they live.

    With adapters these are the frozen weights, and the adapters have initial values.

    Args:
      load: (dtype, tree of `jax.ShapeDtypeStruct`s with shardings, padded as the mesh stores them) -> the parameters.
    """
    abstract = abstract_state(config, recipe, mesh)
    scale, seed = precision.initial_scale(config.precision, recipe.policy), config.train.seed
    if abstract.frozen is not None:
        frozen = load(recipe.policy.compute, abstract.frozen)
        specs, placements = adapter_specs.trained_specs(recipe.model, config.lora), _weights(config, recipe, mesh)
        fresh = jax.jit(
            lambda: state_lib.begin(
                state_lib.initial(specs, seed, recipe.policy.store, placements), recipe.optimizer, seed, scale
            ),
            out_shardings=jax.tree.map(lambda x: x.sharding, dataclasses.replace(abstract, frozen=None)),
        )
        return dataclasses.replace(fresh(), frozen=frozen)
    params = load(recipe.policy.store, abstract.params)
    beside = jax.jit(
        lambda params: dataclasses.replace(state_lib.begin(params, recipe.optimizer, seed, scale), params=None),
        out_shardings=jax.tree.map(lambda x: x.sharding, dataclasses.replace(abstract, params=None)),
    )
    return dataclasses.replace(beside(params), params=params)


def _weights(config: Config, recipe: Recipe, mesh: Mesh) -> Any:
    """Placements of what is trained."""
    return make_layout(config, recipe.model, recipe.policy, mesh).weights


def train_step(config: Config, recipe: Recipe, mesh: Mesh) -> Program:
    """(state, batch) -> (state, metrics), the state donated."""
    state, batch = abstract_state(config, recipe, mesh), abstract_batch(config, mesh)
    layout = make_layout(config, recipe.model, recipe.policy, mesh)
    jitted = jax.jit(
        lambda state, batch: train_step_function(state, batch, recipe, layout),
        donate_argnums=0,
        # Else places of Adafactor's state that no update reads are no arguments, and XLA counts less than the state.
        keep_unused=True,
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), replicated(mesh)),
    )
    return Program("train_step", jitted, (state, batch), (0,))


def eval_step(config: Config, recipe: Recipe, mesh: Mesh) -> Program:
    """((what is trained, what is frozen), batch) -> sums of losses and tokens."""
    state, batch = abstract_state(config, recipe, mesh), abstract_batch(config, mesh)
    layout = make_layout(config, recipe.model, recipe.policy, mesh)
    jitted = jax.jit(
        lambda weights, batch: evaluate(weights[0], weights[1], batch, recipe, layout), out_shardings=replicated(mesh)
    )
    return Program("eval_step", jitted, ((state.params, state.frozen), batch), ())


def _inference_params(model: Architecture, dtype: jax.typing.DTypeLike, turned: bool) -> Any:
    """Parameters as inference holds them: in the compute dtype, with no float32 copy beside."""
    params = specs.abstract(specs.param_specs(model), dtype)
    return jax.eval_shape(weights.turn, params) if turned else params


def _reading(function: Callable[..., Any], turned: bool) -> Callable[..., Any]:
    """A function of (params, …) as one of parameters that lie as `_inference_params` says."""
    return (lambda params, *rest: function(weights.straighten(params), *rest)) if turned else function


def prefill(
    model: Architecture,
    batch: int,
    chunk: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
    cache_dtype: jax.typing.DTypeLike | None = None,
    turned: bool = False,
) -> Program:
    """(params, state, tokens [B, C], valid [B, C]) -> state, the state donated.

    Args:
      cache_dtype: of keys and values; None is `dtype`.
      turned: whether the parameters are those of `decode.weights.turn`.
    """
    state = decode_state.abstract(model, batch, capacity, dtype if cache_dtype is None else cache_dtype)
    tokens = jax.ShapeDtypeStruct((batch, chunk), jnp.int32)
    valid = jax.ShapeDtypeStruct((batch, chunk), bool)
    run = _reading(lambda params, state, tokens, valid: generate.prefill(params, state, tokens, valid, model), turned)
    inputs = (_inference_params(model, dtype, turned), state, tokens, valid)
    return Program("prefill", jax.jit(run, donate_argnums=1), inputs, (1,))


def decode(
    model: Architecture,
    batch: int,
    steps: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
    cache_dtype: jax.typing.DTypeLike | None = None,
    turned: bool = False,
) -> Program:
    """(params, state, limit) -> (state, tokens [B, steps]), the state donated; `limit` steps at most are made.

    Args:
      cache_dtype, turned: as of `prefill`.
    """
    state = decode_state.abstract(model, batch, capacity, dtype if cache_dtype is None else cache_dtype)
    run = _reading(lambda params, state, limit: generate.decode(params, state, limit, model, steps), turned)
    inputs = (_inference_params(model, dtype, turned), state, jax.ShapeDtypeStruct((), jnp.int32))
    return Program("decode", jax.jit(run, donate_argnums=1), inputs, (1,))


def decode_without_cache(
    model: Architecture, batch: int, steps: int, capacity: int, dtype: jax.typing.DTypeLike, turned: bool = False
) -> Program:
    """The same by a full forward pass for every token; its state has the tokens in the cache's place."""
    state = decode_state.abstract(model, batch, capacity, dtype, with_cache=False)
    run = _reading(
        lambda params, state, limit: generate.decode_without_cache(params, state, limit, model, steps), turned
    )
    inputs = (_inference_params(model, dtype, turned), state, jax.ShapeDtypeStruct((), jnp.int32))
    return Program("decode_without_cache", jax.jit(run, donate_argnums=1), inputs, (1,))
