"""What a training run owns on its devices."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.config import Architecture
from jaxllm.mesh import Placement
from jaxllm.model.specs import initialize, param_specs


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
      params: tree of `specs.param_specs`, as `jaxllm.mesh` stores it: padded where a dimension does not divide.
      opt_state: optax's.
      key: root of the run's randomness (raw key data); a step's own key is this folded with its number.
      loss_scale: of fp16; None under other policies.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    key: UInt32[Array, " words"]
    loss_scale: LossScale | None = None


def create(
    model: Architecture,
    optimizer: optax.GradientTransformation,
    seed: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    placements: Any = None,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """The state before the first step. Pure: `jax.eval_shape` of it is the abstract state.

    Args:
      dtype: of the stored weights.
      placements: tree of `jaxllm.mesh.Placement`s: weights are padded with zeros to their shapes. Initial values do
        not depend on them.
    """
    key = jax.random.key(seed)
    params = initialize(param_specs(model), key, dtype)
    if placements is not None:
        params = jax.tree.map(_padded, params, placements)
    return begin(params, optimizer, seed, loss_scale)


def begin(
    params: Any, optimizer: optax.GradientTransformation, seed: int, loss_scale: LossScale | None = None
) -> TrainState:
    """The state before the first step, of weights that are there, padded or not."""
    key = jax.random.key_data(jax.random.key(seed))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key, loss_scale)


def _padded(x: Array, placement: Placement) -> Array:
    return jnp.pad(x, [(0, stored - size) for size, stored in zip(x.shape, placement.shape, strict=True)])
