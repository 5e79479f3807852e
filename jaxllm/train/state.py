"""What a training run owns on its devices."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int, UInt32

from jaxllm.config import Architecture
from jaxllm.model.specs import initialize, param_specs


@struct.dataclass
class TrainState:
    """Everything that a step changes, and all of what a checkpoint holds of the devices.

    Attributes:
      step: updates made.
      params: float32 tree of `specs.param_specs`.
      opt_state: optax's.
      key: root of the run's randomness (raw key data); a step's own key is this folded with its number.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    key: UInt32[Array, " words"]


def create(model: Architecture, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step. Pure: `jax.eval_shape` of it is the abstract state."""
    key = jax.random.key(seed)
    params = initialize(param_specs(model), key, jnp.float32)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key_data(key))
