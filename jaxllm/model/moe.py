"""Dropless mixture of experts (MoE): there is no expert capacity, and no token is dropped.

Tokens are grouped by expert and multiplied with a grouped matmul (`jaxllm.kernels.grouped`), so the output of a token
does not depend on the other tokens of the batch. A few tokens, as in decoding, are multiplied in a way that reads the
weights of the experts in place.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.config import experts as experts_choice
from jaxllm.kernels import grouped
from jaxllm.model.layers import activation
from jaxllm.model.linear import OutputMajor, matmul
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives
from jaxllm.quantize.weight import QuantizedWeight, dequantize


def route(
    x: Float[Array, "M D"], router: Float[Array, "D E"], model: Architecture
) -> tuple[Float[Array, "M X"], Int[Array, "M X"], Float[Array, "M E"]]:
    """Computes top-k routing in float32; returns (weights and ids of each token's experts, all probabilities)."""
    logits = jnp.einsum("md,de->me", x.astype(jnp.float32), router.astype(jnp.float32))
    probabilities = jax.nn.softmax(logits)
    weights, experts = jax.lax.top_k(probabilities, model.experts_per_token)
    if model.normalize_routing:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, experts, probabilities


def load_balancing_loss(
    probabilities: Float[Array, "M E"],
    experts: Int[Array, "M X"],
    token_mask: Bool[Array, " M"],
    collectives: Collectives = SINGLE_DEVICE,
) -> Float[Array, ""]:
    """Computes E · Σ_e (fraction of assignments to e) · (mean probability of e), without padding; 1 if balanced.

    Fractions and token counts are those of the whole batch. On several devices, each returns the part of the sum that
    its own tokens contribute.

    Source: Switch Transformer, Fedus et al. 2021, equation 4, for X experts per token.
    """
    E = probabilities.shape[-1]
    assigned = jax.nn.one_hot(experts, E).sum(1) * token_mask[:, None]
    count = jnp.maximum(collectives.all_reduce_batch(token_mask.sum()), 1)
    fraction = collectives.all_reduce_batch(jax.lax.stop_gradient(assigned.sum(0))) / (count * experts.shape[1])
    mean_probability = (probabilities * token_mask[:, None]).sum(0) / count
    # Devices along `tensor` have the same tokens and compute the same value, which is summed over them later.
    return E * jnp.sum(fraction * mean_probability) / collectives.tensor


def moe(
    x: Float[Array, "B T D"],
    params: dict[str, Any],
    model: Architecture,
    token_mask: Bool[Array, "B T"],
    collectives: Collectives = SINGLE_DEVICE,
) -> tuple[Float[Array, "B t D"], Float[Array, ""]]:
    """Computes the MoE MLP.

    Args:
      x: All tokens of the sequences, already all-gathered over `tensor`.
      params: The router and the expert weights; this device's shard of F. For inference, "gate" and "up" may be fused
        as "gate_up", with outputs [2, F].
      model: Architecture of the model.
      token_mask: False for padding tokens, which do not count for load balancing.
      collectives: Collectives for the mesh sizes.

    Returns:
      (this device's tokens of the output, unweighted load-balancing loss).
    """
    B, T, D = x.shape
    X = model.experts_per_token
    flat = x.reshape(B * T, D)
    weights, experts, probabilities = route(flat, params["router"], model)
    aux_loss = load_balancing_loss(probabilities, experts, token_mask.reshape(-1), collectives)
    if isinstance(params["down"], OutputMajor | QuantizedWeight):
        y = _inference_experts(flat, params, model, experts, weights, collectives)
        return collectives.reduce_scatter_tokens(y.reshape(B, T, D)), aux_loss
    # One row per (token, expert) assignment, grouped by expert.
    layout = grouped.block_layout(experts.reshape(-1), model.experts)
    rows = layout.scatter(jnp.repeat(flat, X, axis=0))

    def project(name: str, inputs: Array, num_terms: int = 1) -> Array:
        y = grouped.grouped_matmul(inputs, params[name], layout.group)
        if model.mlp_bias:
            y = y + params[f"{name}_bias"][layout.group][:, None] / num_terms
        return checkpoint_name(y, f"mlp_{name}")

    up = project("up", rows)
    hidden = activation(project("gate", rows), model.mlp) * up if model.gated else activation(up, model.mlp)
    # Outputs are summed over `tensor`, so each device adds only 1 / `tensor` of the bias.
    outputs = project("down", checkpoint_name(hidden, "mlp_hidden"), num_terms=collectives.tensor)
    outputs = layout.gather(outputs).reshape(B * T, X, D)
    y = jnp.einsum("mxd,mx->md", outputs, weights.astype(outputs.dtype)).reshape(B, T, D)
    return checkpoint_name(collectives.reduce_scatter_tokens(y), "mlp_out"), aux_loss


def _inference_experts(
    x: Float[Array, "M D"],
    params: dict[str, Any],
    model: Architecture,
    experts: Int[Array, "M X"],
    weights: Float[Array, "M X"],
    collectives: Collectives,
) -> Float[Array, "M D"]:
    """Computes the experts' MLPs with weights that are stored with the outputs first, [E, (2,) F, D] and [E, D, F].

    A loop over blocks of tokens slices one expert's matrix at a time, and XLA copies the slice before it multiplies. A
    few tokens are multiplied without one; see `config.experts`. Quantized matrices are dequantized: those of the chosen
    experts of a few tokens, or those of all experts of the layer.

    Returns:
      This device's part of the output, from its shard of F.
    """
    (M, D), X, E = x.shape, experts.shape[1], model.experts
    name = "gate_up" if model.gated else "up"
    into, out = params[name], params["down"]
    into_bias, out_bias = params.get(f"{name}_bias"), params.get("down_bias")
    if out_bias is not None:
        out_bias = out_bias / collectives.tensor  # outputs are summed over `tensor`
    method = experts_choice.method(M, X, E)
    if method == experts_choice.CHOSEN:
        index = experts.reshape(-1)
        hidden = _matvec(_expert_matrices(into, x.dtype, index), jnp.repeat(x, X, axis=0))
        hidden = _activate(hidden if into_bias is None else hidden + into_bias[index], model)
        outputs = _matvec(_expert_matrices(out, x.dtype, index), hidden)
        outputs = outputs if out_bias is None else outputs + out_bias[index]
        return jnp.einsum("mxd,mx->md", outputs.reshape(M, X, D), weights.astype(x.dtype))
    into, out = _expert_matrices(into, x.dtype), _expert_matrices(out, x.dtype)
    if method == experts_choice.ALL:
        hidden = matmul(x[None], OutputMajor(into))[0]
        hidden = _activate(hidden if into_bias is None else hidden + into_bias, model)
        outputs = jnp.einsum("mef,edf->emd", hidden, out)
        outputs = outputs if out_bias is None else outputs + out_bias[:, None]
        combined = jnp.zeros((M, E), weights.dtype).at[jnp.arange(M)[:, None], experts].set(weights)
        return jnp.einsum("emd,me->md", outputs, combined.astype(x.dtype))
    layout = grouped.block_layout(experts.reshape(-1), E)
    rows = layout.scatter_repeated(x)
    hidden = grouped.grouped_matmul_transposed(rows, into.reshape(E, -1, D), layout.group)
    hidden = hidden.reshape(*hidden.shape[:2], *into.shape[1:-1])
    hidden = _activate(hidden if into_bias is None else hidden + into_bias[layout.group][:, None], model)
    outputs = grouped.grouped_matmul_transposed(hidden, out, layout.group)
    outputs = layout.gather(outputs if out_bias is None else outputs + out_bias[layout.group][:, None])
    return jnp.einsum("mxd,mx->md", outputs.reshape(M, X, D), weights.astype(x.dtype))


def _expert_matrices(
    weight: OutputMajor | QuantizedWeight, dtype: jax.typing.DTypeLike, index: Int[Array, " R"] | None = None
) -> Float[Array, "*R_outputs_inputs"]:
    """Returns the matrices of all experts, or of those of an index, in float."""
    if isinstance(weight, OutputMajor):
        return weight.array if index is None else weight.array[index]
    return dequantize(weight if index is None else weight[index], dtype)


def _activate(y: Float[Array, "*batch outputs F"] | Float[Array, "*batch F"], model: Architecture) -> Array:
    """Applies the activation to up, or to gate and up if the MLP is gated."""
    return activation(y[..., 0, :], model.mlp) * y[..., 1, :] if model.gated else activation(y, model.mlp)


def _matvec(weights: Float[Array, "R *outputs D"], x: Float[Array, "R D"]) -> Array:
    """Multiplies each row by its own matrix, as a reduction that XLA fuses with the gather of the matrices.

    Returns:
      [R, *outputs].
    """
    rows = x.reshape(x.shape[0], *[1] * (weights.ndim - 2), x.shape[1])
    return (weights.astype(jnp.float32) * rows.astype(jnp.float32)).sum(-1).astype(x.dtype)
