"""Jitted programs of the system, each with its input shapes, shardings and donated buffers.

All calls of `jax.jit` are in this module. The trainer and the decoder run these programs and the ledger compiles the
same ones, so what is checked is what runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import Architecture, Config, remat
from jaxllm.config import attention as attention_choice
from jaxllm.data import BATCH_FIELDS
from jaxllm.decode import generate, weights
from jaxllm.decode import state as decode_state
from jaxllm.decode.state import DecodeState
from jaxllm.decode.weights import WeightLayout
from jaxllm.model import adapter_specs, adapters, specs
from jaxllm.parallel.mesh import batch_sharding, replicated
from jaxllm.step import precision
from jaxllm.step import state as state_lib
from jaxllm.step.gradients import evaluate
from jaxllm.step.optimizers import make_optimizer, make_schedule
from jaxllm.step.placement import Layout, make_layout
from jaxllm.step.precision import policy_for
from jaxllm.step.spec import StepSpec
from jaxllm.step.state import TrainState
from jaxllm.step.train_step import train_step as train_step_function


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function with the shapes and dtypes of all its arguments.

    Attributes:
      name: Name used in messages.
      jitted: Result of `jax.jit`.
      inputs: One tree of `jax.ShapeDtypeStruct`s per argument, with shardings if the program runs on a mesh.
      donated: Positions of the donated arguments.
    """

    name: str
    jitted: Callable[..., Any]
    inputs: tuple[Any, ...]
    donated: tuple[int, ...]

    def compile(self) -> jax.stages.Compiled:
        """Compiles the executable for exactly these inputs; calling the result never recompiles."""
        return self.jitted.lower(*self.inputs).compile()  # type: ignore[attr-defined]


def make_step_spec(config: Config, model: Architecture, platform: str) -> StepSpec:
    """Builds the complete specification of a training step from the configuration.

    Raises:
      UserError: The configured attention implementation does not support this model, platform or dtype.
    """
    policy = policy_for(config.precision.policy, platform)
    return StepSpec(
        model=model,
        optimizer=make_optimizer(config.optimizer, model, config.lora),
        schedule=make_schedule(config.optimizer, config.train.steps),
        policy=policy,
        attention=attention_choice.resolve(config, model, platform, policy.compute_dtype.name),
        remat=remat.parse(config.remat.policy),
        clip_norm=config.optimizer.clip_norm,
        accumulate=config.train.accumulate,
        loss_chunk=config.train.loss_chunk,
        attention_chunk=config.train.attention_chunk,
        adapter_scale=adapters.scale_of(config.lora),
        scale_growth=config.precision.loss_scale_growth,
    )


def _create(config: Config, step_spec: StepSpec, layout: Layout) -> Callable[[], TrainState]:
    policy = step_spec.policy
    return lambda: state_lib.create(
        step_spec.model,
        config.lora,
        step_spec.optimizer,
        config.train.seed,
        (policy.param_dtype, policy.compute_dtype),
        (layout.weights, layout.frozen),
        precision.initial_scale(config.precision, policy),
    )


def abstract_state(config: Config, step_spec: StepSpec, mesh: Mesh) -> Any:
    """Returns the train state as a tree of shapes, dtypes and shardings."""
    layout = make_layout(config, step_spec.model, step_spec.policy, mesh)
    shapes = jax.eval_shape(_create(config, step_spec, layout))
    return jax.tree.map(
        lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
        shapes,
        layout.state_shardings(shapes),
    )


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of one step's batch; fields are those of `data.BATCH_FIELDS`."""
    shape = (config.train.batch_size, config.data.sequence_length)
    placed = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for name, dtype in BATCH_FIELDS.items()}


def init_state(config: Config, step_spec: StepSpec, mesh: Mesh) -> Program:
    """Builds the program () -> initial train state, created directly in its final sharding."""
    abstract = abstract_state(config, step_spec, mesh)
    layout = make_layout(config, step_spec.model, step_spec.policy, mesh)
    jitted = jax.jit(
        _create(config, step_spec, layout),
        out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    )
    return Program("init_state", jitted, (), ())


def state_from(config: Config, step_spec: StepSpec, mesh: Mesh, load: Callable[[Any, Any], Any]) -> TrainState:
    """Creates the train state before the first step with loaded weights, placed directly in their final sharding.

    With adapters, the loaded weights are the frozen ones and the adapters are freshly initialized.

    Args:
      load: Function (dtype, tree of `jax.ShapeDtypeStruct`s) -> parameters. The structs carry shardings, and their
        shapes include the padding of the mesh.
    """
    abstract = abstract_state(config, step_spec, mesh)
    scale, seed = precision.initial_scale(config.precision, step_spec.policy), config.train.seed
    if abstract.frozen is not None:
        frozen = load(step_spec.policy.compute_dtype, abstract.frozen)
        specs, placements = adapter_specs.trained_specs(step_spec.model, config.lora), _weights(config, step_spec, mesh)
        create_state = jax.jit(
            lambda: state_lib.begin(
                state_lib.initial(specs, seed, step_spec.policy.param_dtype, placements),
                step_spec.optimizer,
                seed,
                scale,
            ),
            out_shardings=jax.tree.map(lambda x: x.sharding, dataclasses.replace(abstract, frozen=None)),
        )
        return dataclasses.replace(create_state(), frozen=frozen)
    params = load(step_spec.policy.param_dtype, abstract.params)
    create_rest = jax.jit(
        lambda params: dataclasses.replace(state_lib.begin(params, step_spec.optimizer, seed, scale), params=None),
        out_shardings=jax.tree.map(lambda x: x.sharding, dataclasses.replace(abstract, params=None)),
    )
    return dataclasses.replace(create_rest(params), params=params)


def _weights(config: Config, step_spec: StepSpec, mesh: Mesh) -> Any:
    """Returns the placements of the trained weights."""
    return make_layout(config, step_spec.model, step_spec.policy, mesh).weights


def train_step(config: Config, step_spec: StepSpec, mesh: Mesh) -> Program:
    """Builds the program (state, batch) -> (state, metrics), which donates the state."""
    state, batch = abstract_state(config, step_spec, mesh), abstract_batch(config, mesh)
    layout = make_layout(config, step_spec.model, step_spec.policy, mesh)
    jitted = jax.jit(
        lambda state, batch: train_step_function(state, batch, step_spec, layout),
        donate_argnums=0,
        # Otherwise XLA drops the unread entries of Adafactor's state and reports fewer bytes than the state has.
        keep_unused=True,
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), replicated(mesh)),
    )
    return Program("train_step", jitted, (state, batch), (0,))


def eval_step(config: Config, step_spec: StepSpec, mesh: Mesh) -> Program:
    """Builds the program ((trained weights, frozen weights), batch) -> sums of losses and tokens."""
    state, batch = abstract_state(config, step_spec, mesh), abstract_batch(config, mesh)
    layout = make_layout(config, step_spec.model, step_spec.policy, mesh)
    jitted = jax.jit(
        lambda weights, batch: evaluate(weights[0], weights[1], batch, step_spec, layout),
        out_shardings=replicated(mesh),
    )
    return Program("eval_step", jitted, ((state.params, state.frozen), batch), ())


def _inference_params(model: Architecture, dtype: jax.typing.DTypeLike, layout: WeightLayout) -> Any:
    """Returns the abstract parameters for inference: in the compute dtype, without float32 master copies."""
    params = specs.abstract(specs.param_specs(model), dtype)
    return jax.eval_shape(lambda params: weights.arrange(params, model, layout), params)


def prefill(
    model: Architecture,
    batch: int,
    chunk: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
    cache_dtype: jax.typing.DTypeLike | None = None,
    layout: WeightLayout = WeightLayout.TRAINING,
) -> Program:
    """Builds the program (params, state, tokens [B, C], valid [B, C]) -> state, which donates the state.

    Args:
      batch: Rows B.
      chunk: Tokens C per row and call.
      capacity: Maximum tokens per row.
      dtype: Dtype of the parameters.
      cache_dtype: Dtype of the cached keys and values; None means `dtype`.
      layout: Layout of the parameters and the cache.
    """
    tokens = jax.ShapeDtypeStruct((batch, chunk), jnp.int32)
    valid = jax.ShapeDtypeStruct((batch, chunk), bool)
    params = _inference_params(model, dtype, layout)
    model = weights.model_in(model, layout)
    state = decode_state.abstract(model, batch, capacity, dtype if cache_dtype is None else cache_dtype)

    def run(params: Any, state: DecodeState, tokens: jax.Array, valid: jax.Array) -> DecodeState:
        return generate.prefill(weights.restore(params, layout), state, tokens, valid, model)

    inputs = (params, state, tokens, valid)
    return Program("prefill", jax.jit(run, donate_argnums=1), inputs, (1,))


def decode(
    model: Architecture,
    batch: int,
    steps: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
    cache_dtype: jax.typing.DTypeLike | None = None,
    layout: WeightLayout = WeightLayout.TRAINING,
) -> Program:
    """Builds the program (params, state, limit) -> (state, tokens [B, steps]), which runs at most `limit` steps.

    The state is donated.

    Args:
      batch: Rows B.
      steps: Static maximum number of steps, the width of the returned tokens.
      capacity: Maximum tokens per row.
      dtype: Dtype of the parameters.
      cache_dtype: Dtype of the cached keys and values; None means `dtype`.
      layout: Layout of the parameters and the cache.
    """
    params = _inference_params(model, dtype, layout)
    model = weights.model_in(model, layout)
    state = decode_state.abstract(model, batch, capacity, dtype if cache_dtype is None else cache_dtype)

    def run(params: Any, state: DecodeState, limit: jax.Array) -> tuple[DecodeState, jax.Array]:
        return generate.decode(weights.restore(params, layout), state, limit, model, steps)

    inputs = (params, state, jax.ShapeDtypeStruct((), jnp.int32))
    return Program("decode", jax.jit(run, donate_argnums=1), inputs, (1,))


def decode_without_cache(
    model: Architecture,
    batch: int,
    steps: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
    layout: WeightLayout = WeightLayout.TRAINING,
) -> Program:
    """Builds the `decode` program with a full forward pass per token; its state stores tokens instead of a cache."""
    params = _inference_params(model, dtype, layout)
    model = weights.model_in(model, layout)
    state = decode_state.abstract(model, batch, capacity, dtype, with_cache=False)

    def run(params: Any, state: DecodeState, limit: jax.Array) -> tuple[DecodeState, jax.Array]:
        return generate.decode_without_cache(weights.restore(params, layout), state, limit, model, steps)

    inputs = (params, state, jax.ShapeDtypeStruct((), jnp.int32))
    return Program("decode_without_cache", jax.jit(run, donate_argnums=1), inputs, (1,))
