"""What a training run owns on its devices."""

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
    """What fp16's gradients are multiplied with, so that small ones are not rounded to 0.

    Attributes:
      scale: float32.
      good_steps: since the last change of the scale, all of them finite.
    """

    scale: Float[Array, ""]
    good_steps: Int[Array, ""]


@struct.dataclass
class TrainState:
    """Everything that a step changes, and all of what a checkpoint holds of the devices.

    Attributes:
      step: updates made; a step whose gradients overflowed makes none.
      params: what is trained, a tree of `adapter_specs.trained_specs`, as `parallel.mesh` stores it: padded where a
        dimension does not divide.
      opt_state: optax's.
      key: root of the run's randomness (raw key data); a step's own key is this folded with its number.
      loss_scale: of fp16; None under other policies.
      frozen: the weights that adapters stand beside, in the compute dtype; None where all parameters are trained. No
        step changes them, and a checkpoint leaves them out (`jaxllm.checkpoints.frozen`).
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
    """The state before the first step. Pure: `jax.eval_shape` of it is the abstract state.

    Args:
      dtypes: of what is trained, and of what is frozen.
      placements: two trees of `parallel.mesh.Placement`s, of these: arrays are padded with zeros to their shapes.
        Initial values do not depend on them. That of what is frozen is None where nothing is.
    """
    trained = initial(trained_specs(model, lora), seed, dtypes[0], placements[0])
    frozen = frozen_specs(model, lora)
    if frozen is not None:
        frozen = initial(frozen, seed, dtypes[1], placements[1])
    return begin(trained, optimizer, seed, loss_scale, frozen)


def initial(specs: Any, seed: int, dtype: jax.typing.DTypeLike, placements: Any) -> Any:
    """Initial values, padded to the shapes of their placements."""
    return jax.tree.map(_padded, initialize(specs, jax.random.key(seed), dtype), placements)


def begin(
    params: Any,
    optimizer: optax.GradientTransformation,
    seed: int,
    loss_scale: LossScale | None = None,
    frozen: Any = None,
) -> TrainState:
    """The state before the first step, of weights that are there, padded or not."""
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key, loss_scale, frozen)


def _padded(x: Array, placement: Placement) -> Array:
    return jnp.pad(x, [(0, stored - size) for size, stored in zip(x.shape, placement.shape, strict=True)])
