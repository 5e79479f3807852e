"""Mixture of experts without a capacity: every token reaches its experts, none is dropped.

Tokens are laid out by expert and multiplied in groups (`jaxllm.kernels.grouped`), so a token's result does not depend
on which others are in the batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.kernels import grouped
from jaxllm.model.layers import activation
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives


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
    probabilities: Float[Array, "M E"],
    experts: Int[Array, "M X"],
    real: Bool[Array, " M"],
    collectives: Collectives = SINGLE_DEVICE,
) -> Float[Array, ""]:
    """E · Σ_e (share of assignments to e) · (mean probability of e), over real tokens; 1 when even.

    Both are of the whole batch. On several devices each has its own tokens' part of the sum.

    Source: Switch Transformer, Fedus et al. 2021, equation 4, for X experts a token.
    """
    E = probabilities.shape[-1]
    assigned = jax.nn.one_hot(experts, E).sum(1) * real[:, None]
    count = jnp.maximum(collectives.all_reduce_batch(real.sum()), 1)
    share = collectives.all_reduce_batch(jax.lax.stop_gradient(assigned.sum(0))) / (count * experts.shape[1])
    mean_probability = (probabilities * real[:, None]).sum(0) / count
    # Devices along `tensor` have the same tokens and say the same.
    return E * jnp.sum(share * mean_probability) / collectives.tensor


def moe(
    x: Float[Array, "B T D"],
    params: dict[str, Any],
    model: Architecture,
    real: Bool[Array, "B T"],
    collectives: Collectives = SINGLE_DEVICE,
) -> tuple[Float[Array, "B t D"], Float[Array, ""]]:
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
    # One row for each token and expert that it is sent to, laid out by expert.
    blocks = grouped.lay_out(experts.reshape(-1), model.experts)
    rows = blocks.lay_out(jnp.repeat(flat, X, axis=0))

    def project(name: str, inputs: Array, parts: int = 1) -> Array:
        y = grouped.grouped_matmul(inputs, params[name], blocks.group)
        if model.mlp_bias:
            y = y + params[f"{name}_bias"][blocks.group][:, None] / parts
        return checkpoint_name(y, f"mlp_{name}")

    up = project("up", rows)
    hidden = activation(project("gate", rows), model.mlp) * up if model.gated else activation(up, model.mlp)
    # Each device along `tensor` has a part of the sum over the hidden layer, so it adds a part of the bias.
    outputs = project("down", checkpoint_name(hidden, "mlp_hidden"), parts=collectives.tensor)
    back = blocks.take_back(outputs).reshape(B * T, X, D)
    mixed = jnp.einsum("mxd,mx->md", back, weights.astype(back.dtype)).reshape(B, T, D)
    aux_loss = load_balancing_loss(probabilities, experts, real.reshape(-1), collectives)
    return checkpoint_name(collectives.reduce_scatter_tokens(mixed), "mlp_out"), aux_loss
