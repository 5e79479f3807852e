"""Mixture of experts without a capacity: every token reaches its experts, none is dropped.

Tokens are sorted by expert and multiplied in ragged groups (the idea of MegaBlocks, Gale et al. 2022), so
a token's result does not depend on which others are in the batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.model.layers import activation


def route(
    x: Float[Array, "M D"], router: Float[Array, "D E"], model: Architecture
) -> tuple[Float[Array, "M X"], Int[Array, "M X"], Float[Array, "M E"]]:
    """Top-k routing in float32: weights and ids of each token's experts, and all probabilities."""
    logits = jnp.einsum("md,de->me", x.astype(jnp.float32), router.astype(jnp.float32))
    probabilities = jax.nn.softmax(logits)
    weights, experts = jax.lax.top_k(probabilities, model.experts_per_token)
    if model.normalize_routing:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, experts, probabilities


def load_balancing_loss(
    probabilities: Float[Array, "M E"], experts: Int[Array, "M X"], real: Bool[Array, " M"]
) -> Float[Array, ""]:
    """E · Σ_e (share of assignments to e) · (mean probability of e), over real tokens; 1 when even.

    Source: Switch Transformer, Fedus et al. 2021, equation 4, for X experts a token.
    """
    E = probabilities.shape[-1]
    count = jnp.maximum(real.sum(), 1)
    assigned = jax.nn.one_hot(experts, E).sum(1) * real[:, None]
    share = assigned.sum(0) / (count * experts.shape[1])
    mean_probability = (probabilities * real[:, None]).sum(0) / count
    return E * jnp.sum(jax.lax.stop_gradient(share) * mean_probability)


def moe(
    x: Float[Array, "B T D"], params: dict[str, Any], model: Architecture, real: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
    """The sparse MLP.

    Args:
      real: which tokens count for load balancing (padding does not).
    Returns:
      (output, load-balancing loss before its weight).
    """
    B, T, D = x.shape
    X = model.experts_per_token
    flat = x.reshape(B * T, D)
    weights, experts, probabilities = route(flat, params["router"], model)

    order = jnp.argsort(experts.reshape(-1), stable=True)  # assignments, by expert
    sorted_experts = experts.reshape(-1)[order]
    group_sizes = jnp.bincount(experts.reshape(-1), length=model.experts).astype(jnp.int32)
    tokens = flat[order // X]

    def project(name: str, inputs: Array) -> Array:
        y = jax.lax.ragged_dot(inputs, params[name], group_sizes)
        if model.mlp_bias:
            y = y + params[f"{name}_bias"][sorted_experts]
        return checkpoint_name(y, f"mlp_{name}")

    up = project("up", tokens)
    hidden = activation(project("gate", tokens), model.mlp) * up if model.gated else activation(up, model.mlp)
    outputs = project("down", hidden)
    back = jnp.zeros_like(outputs).at[order].set(outputs, unique_indices=True).reshape(B * T, X, D)
    mixed = jnp.einsum("mxd,mx->md", back, weights.astype(back.dtype)).reshape(B, T, D)
    return checkpoint_name(mixed, "mlp_out"), load_balancing_loss(probabilities, experts, real.reshape(-1))
