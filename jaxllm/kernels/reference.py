"""Attention as plain JAX: the definition that kernels are tested against, and what runs on a CPU."""

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
    K = k.shape[1]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bksh->bkgts", grouped, k, preferred_element_type=jnp.float32) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = mask[:, None, None]
    scores = jnp.where(seen, scores, _MASKED)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = jnp.einsum("bkgts,bksh->btkgh", weights.astype(v.dtype), v)
    return out.reshape(B, T, N, H)
