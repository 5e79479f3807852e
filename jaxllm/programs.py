"""Jitted programs of the system, each with its input shapes, shardings and donated buffers.

All calls of `jax.jit` are in this module. The trainer and the decoder run these programs and the ledger compiles the
same ones, so what is checked is what runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxllm.config import Architecture, Config, remat
from jaxllm.config import attention as attention_choice
from jaxllm.data import BATCH_FIELDS
from jaxllm.decode import generate, sharding, weights
from jaxllm.decode.state import DecodeState
from jaxllm.decode.weights import WeightLayout
from jaxllm.model import adapter_specs, adapters
from jaxllm.parallel.collectives import Collectives
from jaxllm.parallel.mesh import batch_sharding, replicated
from jaxllm.quantize.formats import QuantFormat
from jaxllm.step import precision
from jaxllm.step import state as state_lib
from jaxllm.step.gradients import evaluate
from jaxllm.step.optimizers import make_optimizer, make_schedule
from jaxllm.step.placement import Layout, make_layout
from jaxllm.step.precision import policy_for
from jaxllm.step.spec import StepSpec
from jaxllm.step.state import TrainState
from jaxllm.step.train_step import train_step as train_step_function

# Partition of inputs and outputs of inference with one row per sequence, and the argument `limit` of decoding.
_ROWS = PartitionSpec("data")
_LIMIT = ((jax.ShapeDtypeStruct((), jnp.int32), PartitionSpec()),)


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


def _inference(
    name: str,
    function: Callable[..., Any],
    model: Architecture,
    batch: int,
    capacity: int,
    arguments: tuple[tuple[Any, PartitionSpec], ...],
    out_rows: int,
    dtype: jax.typing.DTypeLike,
    cache_dtype: jax.typing.DTypeLike | None,
    layout: WeightLayout,
    mesh: Mesh | AbstractMesh | None,
    quantize: QuantFormat | None,
    with_cache: bool = True,
) -> Program:
    """Builds a program (params, state, *arguments) -> state, or (state, tokens), which donates the state.

    On a mesh, the function runs on each device's shards inside `jax.shard_map`, with explicit collectives.

    Args:
      function: Function (params, state, *arguments, architecture, collectives).
      arguments: (shape and dtype, partition on a mesh) of each further argument.
      out_rows: Number of outputs after the state, with one row per row of the batch.
    """
    params = sharding.abstract_params(model, dtype, layout, mesh, quantize)
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    state = sharding.abstract_state(model, batch, capacity, cache_dtype, layout, mesh, with_cache)
    declared, collectives = weights.model_in(model, layout), sharding.collectives(mesh)

    def run(params: Any, state: DecodeState, *arguments: jax.Array) -> Any:
        return function(weights.restore(params, layout), state, *arguments, declared, collectives)

    inputs = [argument for argument, _ in arguments]
    if mesh is not None:
        inputs = [x.update(sharding=NamedSharding(mesh, partition)) for x, partition in arguments]
        kept = sharding.partitions(state)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(sharding.partitions(params), kept, *(partition for _, partition in arguments)),
            out_specs=(kept, *[_ROWS] * out_rows) if out_rows else kept,
            check_vma=False,
        )
    return Program(name, jax.jit(run, donate_argnums=1), (params, state, *inputs), (1,))


def prefill(
    model: Architecture,
    batch: int,
    chunk: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
    cache_dtype: jax.typing.DTypeLike | None = None,
    layout: WeightLayout = WeightLayout.TRAINING,
    mesh: Mesh | AbstractMesh | None = None,
    quantize: QuantFormat | None = None,
) -> Program:
    """Builds the program (params, state, tokens [B, C], valid [B, C]) -> state, which donates the state.

    Args:
      model: Architecture of the model.
      batch: Rows B, over all devices.
      chunk: Tokens C per row and call.
      capacity: Maximum tokens per row.
      dtype: Dtype of the parameters.
      cache_dtype: Dtype of the cached keys and values; None means `dtype`.
      layout: Layout of the parameters and the cache.
      mesh: Device mesh; None for one device.
      quantize: Format of the matrices of layers; None does not quantize.
    """
    shape = (batch, chunk)
    arguments = ((jax.ShapeDtypeStruct(shape, jnp.int32), _ROWS), (jax.ShapeDtypeStruct(shape, bool), _ROWS))
    options = (dtype, cache_dtype, layout, mesh, quantize)
    return _inference("prefill", generate.prefill, model, batch, capacity, arguments, 0, *options)


def decode(
    model: Architecture,
    batch: int,
    steps: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
    cache_dtype: jax.typing.DTypeLike | None = None,
    layout: WeightLayout = WeightLayout.TRAINING,
    mesh: Mesh | AbstractMesh | None = None,
    quantize: QuantFormat | None = None,
) -> Program:
    """Builds the program (params, state, limit) -> (state, tokens [B, steps]), which donates the state.

    It runs at most `limit` steps; `steps` is their static maximum. The other arguments are those of `prefill`.
    """

    def run(params: Any, state: DecodeState, limit: jax.Array, model: Architecture, collectives: Collectives) -> Any:
        return generate.decode(params, state, limit, model, steps, collectives)

    return _inference("decode", run, model, batch, capacity, _LIMIT, 1, dtype, cache_dtype, layout, mesh, quantize)


def decode_without_cache(
    model: Architecture,
    batch: int,
    steps: int,
    capacity: int,
    dtype: jax.typing.DTypeLike,
    layout: WeightLayout = WeightLayout.TRAINING,
    mesh: Mesh | AbstractMesh | None = None,
    quantize: QuantFormat | None = None,
) -> Program:
    """Builds the `decode` program with a full forward pass per token; its state stores tokens instead of a cache."""

    def run(params: Any, state: DecodeState, limit: jax.Array, model: Architecture, collectives: Collectives) -> Any:
        return generate.decode_without_cache(params, state, limit, model, steps, collectives)

    sizes = (model, batch, capacity, _LIMIT, 1)
    return _inference("decode_without_cache", run, *sizes, dtype, dtype, layout, mesh, quantize, with_cache=False)
