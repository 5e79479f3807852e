"""Precision policies (storage and compute dtypes) and the dynamic loss scale of fp16.

Statistics and the loss are always float32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.config import PrecisionConfig
from jaxllm.config.precision import POLICY_DTYPES
from jaxllm.step.state import LossScale

# A larger scale has no benefit: times 2^24, the smallest positive float16 value (2^-24) is 1.
_MAX_SCALE = 2.0**24
_MIN_SCALE = 1.0


@dataclasses.dataclass(frozen=True)
class Policy:
    """Precision policy: compute and storage dtypes.

    Attributes:
      name: fp32 | bf16 | fp16 | bf16_pure.
      compute_dtype: Dtype of activations, of the weights they are multiplied with, and of their gradients.
      param_dtype: Dtype of the weights between steps.
    """

    name: str
    compute_dtype: jnp.dtype
    param_dtype: jnp.dtype

    @property
    def mixed(self) -> bool:
        """True if the stored weights are float32 master copies of the compute weights."""
        return self.param_dtype != self.compute_dtype

    @property
    def scaled(self) -> bool:
        """True if the loss is scaled before differentiation (fp16)."""
        return self.compute_dtype == jnp.float16

    def cast(self, params: Any) -> Any:
        """Casts weights to the compute dtype."""
        return jax.tree.map(lambda x: x.astype(self.compute_dtype), params)


def policy_for(name: str, platform: str) -> Policy:
    """Returns the policy that `config.precision.policy` names.

    `auto` is fp32 on a CPU, where bfloat16 matmuls are many times slower, and bf16 elsewhere.

    Args:
      name: auto | fp32 | bf16 | fp16 | bf16_pure.
      platform: cpu | gpu | tpu.
    """
    if name == "auto":
        name = "fp32" if platform == "cpu" else "bf16"
    compute_dtype, param_dtype = POLICY_DTYPES[name]
    return Policy(name, jnp.dtype(compute_dtype), jnp.dtype(param_dtype))


def initial_scale(config: PrecisionConfig, policy: Policy) -> LossScale | None:
    """Returns the loss scale before the first step, or None if the policy does not scale the loss."""
    if not policy.scaled:
        return None
    return LossScale(jnp.asarray(config.loss_scale, jnp.float32), jnp.zeros((), jnp.int32))


def adjust(scale: LossScale, finite: Bool[Array, ""], growth: int) -> LossScale:
    """Returns the next step's loss scale: halved after an overflow, doubled after `growth` consecutive finite steps.

    Source: Micikevicius et al. 2018, section 3.2. flax's DynamicScale is not used because it differentiates the loss
    itself, once per step; here gradients may come from several micro-batches on several devices.

    Args:
      scale: Loss scale of this step.
      finite: Whether the gradients of this step are finite.
      growth: Number of consecutive finite steps before the scale doubles.
    """
    good = jnp.where(finite, scale.good_steps + 1, 0)
    grown = good >= growth
    factor = jnp.where(finite, jnp.where(grown, 2.0, 1.0), 0.5)
    return LossScale(
        jnp.clip(scale.scale * factor, _MIN_SCALE, _MAX_SCALE).astype(jnp.float32),
        jnp.where(grown, 0, good).astype(jnp.int32),
    )


def loss_factor(scale: LossScale | None, tokens: int) -> Float[Array, ""] | float:
    """Returns the factor on the summed token losses before differentiation; 1 without a loss scale.

    With a loss scale, the factor is the scale divided by the tokens of the step. The scale then has the same meaning as
    for a mean loss, and gradients summed over many tokens stay in range.
    """
    return 1.0 if scale is None else scale.scale / tokens
