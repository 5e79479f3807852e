"""Train state: all arrays of a training run that persist on the devices between steps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.config import Architecture, LoraConfig
from jaxllm.model.adapter_specs import frozen_specs, trained_specs
from jaxllm.model.specs import initialize
from jaxllm.parallel.mesh import Placement


@struct.dataclass
class LossScale:
    """Dynamic loss scale of fp16, which prevents small gradients from being rounded to 0.

    Attributes:
      scale: Factor on the loss, float32.
      good_steps: Consecutive steps with finite gradients since the last change of the scale.
    """

    scale: Float[Array, ""]
    good_steps: Int[Array, ""]


@struct.dataclass
class TrainState:
    """Train state: the input and output of a training step, and the device arrays of a checkpoint.

    Attributes:
      step: Number of updates made; a step whose gradients overflowed does not count.
      params: Trained arrays, with the structure of `adapter_specs.trained_specs`. They have the storage sharding of
        `parallel.mesh`, padded if a dimension does not divide evenly.
      opt_state: State of the optax optimizer.
      key: Root random key of the run (raw key data); the key of a step is this key folded with the step number.
      loss_scale: Loss scale of fp16; None under other policies.
      frozen: Frozen weights under the adapters, in the compute dtype; None if all parameters are trained. No step
        changes them, and checkpoints do not contain them (`jaxllm.checkpoints.frozen`).
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    key: UInt32[Array, " words"]
    loss_scale: LossScale | None = None
    frozen: Any = None


def create(
    model: Architecture,
    lora: LoraConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    dtypes: tuple[jax.typing.DTypeLike, jax.typing.DTypeLike],
    placements: tuple[Any, Any],
    loss_scale: LossScale | None = None,
) -> TrainState:
    """Creates the state before the first step; `jax.eval_shape` of this pure function is the abstract state.

    Args:
      model: Architecture of the model.
      lora: Adapter configuration.
      optimizer: Optimizer of `optimizers.make_optimizer`.
      seed: Seed of the initial values and of the run's root key.
      dtypes: Dtypes of (trained, frozen) arrays.
      placements: Trees of `parallel.mesh.Placement`s of (trained, frozen) arrays; the second is None if nothing is
        frozen. Arrays are padded with zeros to the placements' shapes; initial values do not depend on placements.
      loss_scale: Initial loss scale; None if there is none.
    """
    trained = initial(trained_specs(model, lora), seed, dtypes[0], placements[0])
    frozen = frozen_specs(model, lora)
    if frozen is not None:
        frozen = initial(frozen, seed, dtypes[1], placements[1])
    return begin(trained, optimizer, seed, loss_scale, frozen)


def initial(specs: Any, seed: int, dtype: jax.typing.DTypeLike, placements: Any) -> Any:
    """Initializes the arrays of a tree of specs, padded with zeros to the shapes of their placements."""
    return jax.tree.map(_padded, initialize(specs, jax.random.key(seed), dtype), placements)


def begin(
    params: Any,
    optimizer: optax.GradientTransformation,
    seed: int,
    loss_scale: LossScale | None = None,
    frozen: Any = None,
) -> TrainState:
    """Creates the state before the first step from given weights, padded or not."""
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key, loss_scale, frozen)


def _padded(x: Array, placement: Placement) -> Array:
    return jnp.pad(x, [(0, stored - size) for size, stored in zip(x.shape, placement.shape, strict=True)])
