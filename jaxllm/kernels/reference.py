"""Attention as plain JAX: the definition that kernels are tested against, and what runs on a CPU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Large, finite, and far from float32's limit, so that a difference of two of them is still finite.
_MASKED = -1e30


def attention_mask(
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"] | None,
    k_segments: Int[Array, "B S"] | None,
    window: int,
) -> Bool[Array, "B T S"]:
    """Which keys a query sees: not later, in the window, of the same segment, and there at all.

    Args:
      k_positions: a negative position marks a key that is not there (an empty cache slot).
      window: keys seen, the query's own included; 0 is all.
    """
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    mask = (distance >= 0) & (k_positions[:, None, :] >= 0)
    if window:
        mask &= distance < window
    if q_segments is not None and k_segments is not None:
        mask &= q_segments[:, :, None] == k_segments[:, None, :]
    return mask


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    *,
    scale: float,
    softcap: float,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q·k·scale)) · v over the keys of `mask`, grouped heads (Ainslie et al. 2023).

    Query head n uses key head n // (N / K). Scores and softmax are float32. A query that sees no key gets 0.

    Args:
      softcap: c·tanh(score / c) before the mask (Gemma 2); 0 is none.
    """
    B, T, N, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    # The heads of a group and their queries are one dimension, so that both products are plain batched
    # matrix products; with five-index einsums XLA's CPU backend takes four times as long for the gradients.
    grouped = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    scores = jnp.einsum("bkqh,bksh->bkqs", grouped, k, preferred_element_type=jnp.float32) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    bias = jnp.where(mask, 0.0, _MASKED)
    scores = scores.reshape(B, K, G, T, S) + bias[:, None, None]
    highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - highest)
    total = weights.sum(-1)[..., None]
    weights = weights.reshape(B, K, G * T, S).astype(v.dtype)
    out = jnp.einsum("bkqs,bksh->bkqh", weights, v, preferred_element_type=jnp.float32)
    out = out.reshape(B, K, G, T, H) / total * mask.any(-1)[:, None, None, :, None]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(v.dtype)
