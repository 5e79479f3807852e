"""Which dtype stores, which computes, and the loss scale that fp16 needs. Statistics and the loss are float32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.config import PrecisionConfig
from jaxllm.step.state import LossScale

# A larger scale adds nothing: 2^24 lifts the smallest float16 number above 1.
_HIGHEST_SCALE = 2.0**24
_LOWEST_SCALE = 1.0


@dataclasses.dataclass(frozen=True)
class Policy:
    """Attributes:
    name: fp32 | bf16 | fp16 | bf16_pure.
    compute: dtype of activations, of the weights they are multiplied with, and of their gradients.
    store: dtype of the weights between steps.
    """

    name: str
    compute: jnp.dtype
    store: jnp.dtype

    @property
    def mixed(self) -> bool:
        """Whether the stored weights are float32 masters of those that compute."""
        return self.store != self.compute

    @property
    def scaled(self) -> bool:
        """Whether gradients are those of a scaled loss."""
        return self.compute == jnp.float16

    def cast(self, params: Any) -> Any:
        """The weights that compute."""
        return jax.tree.map(lambda x: x.astype(self.compute), params)


_DTYPES = {
    "fp32": (jnp.float32, jnp.float32),
    "bf16": (jnp.bfloat16, jnp.float32),
    "fp16": (jnp.float16, jnp.float32),
    "bf16_pure": (jnp.bfloat16, jnp.bfloat16),
}


def policy_for(name: str, platform: str) -> Policy:
    """The policy of `config.precision.policy` on a platform ("cpu", "gpu", "tpu").

    `auto` is fp32 on a CPU, whose bfloat16 products are many times slower, and bf16 elsewhere.
    """
    if name == "auto":
        name = "fp32" if platform == "cpu" else "bf16"
    compute, store = _DTYPES[name]
    return Policy(name, jnp.dtype(compute), jnp.dtype(store))


def initial_scale(config: PrecisionConfig, policy: Policy) -> LossScale | None:
    """The loss scale before the first step; None where the policy has none."""
    if not policy.scaled:
        return None
    return LossScale(jnp.asarray(config.loss_scale, jnp.float32), jnp.zeros((), jnp.int32))


def adjust(scale: LossScale, finite: Bool[Array, ""], growth: int) -> LossScale:
    """The scale of the next step: half after an overflow, twice after `growth` finite steps on end.

    Source: Micikevicius et al. 2018, section 3.2. flax's DynamicScale differentiates the loss itself, once a step;
    here gradients may be those of several micro-batches, on several devices.
    """
    good = jnp.where(finite, scale.good_steps + 1, 0)
    grown = good >= growth
    factor = jnp.where(finite, jnp.where(grown, 2.0, 1.0), 0.5)
    return LossScale(
        jnp.clip(scale.scale * factor, _LOWEST_SCALE, _HIGHEST_SCALE).astype(jnp.float32),
        jnp.where(grown, 0, good).astype(jnp.int32),
    )


def loss_factor(scale: LossScale | None, tokens: int) -> Float[Array, ""] | float:
    """What the sum of token losses is multiplied with before it is differentiated.

    With a loss scale: the scale over the tokens of the step, so that the scale means what it does for a mean loss,
    and sums of gradients over many tokens stay in range.
    """
    return 1.0 if scale is None else scale.scale / tokens
