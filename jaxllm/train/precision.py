"""Which dtype computes. Weights, optimizer state, statistics and the loss are float32 in every policy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Policy:
    """Attributes:
    name: "fp32" or "bf16".
    compute: dtype of activations and of the weights they are multiplied with.
    """

    name: str
    compute: jnp.dtype

    def cast(self, params: Any) -> Any:
        """The parameters as the forward pass wants them; gradients flow back to the float32 ones."""
        return jax.tree.map(lambda x: x.astype(self.compute), params)


def policy_for(name: str, platform: str) -> Policy:
    """The policy of `config.precision.policy` on a platform (`jax.default_backend()`).

    `auto` is fp32 on a CPU, whose bfloat16 products are many times slower, and bf16 elsewhere.
    """
    if name == "auto":
        name = "fp32" if platform == "cpu" else "bf16"
    return Policy(name, jnp.dtype({"fp32": jnp.float32, "bf16": jnp.bfloat16}[name]))
