"""Reference attention in float64 NumPy, written from the definition; the device's kernels are checked against it."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float


def attention_mask(queries: int, keys: int, causal: bool, window: int) -> Bool[np.ndarray, "T S"]:
    """Returns the mask of keys that each query attends to; query t is at position t + S - T."""
    position, key = np.arange(queries)[:, None] + keys - queries, np.arange(keys)[None]
    mask = np.ones((queries, keys), bool)
    if causal:
        mask &= key <= position
    if window:
        mask &= np.abs(position - key) < window
    return mask


def attention(
    q: Any, k: Any, v: Any, d_out: Any, mask: Bool[np.ndarray, "B T S"], scale: float, softcap: float
) -> tuple[Float[np.ndarray, "..."], ...]:
    """Returns output [B,T,N,H] and the gradients of sum(output · d_out) for q [B,T,N,H], k and v [B,K,S,H].

    A query with no visible key has output 0 and zero gradients.
    """
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    B, T, N, H = q.shape
    K = k.shape[1]
    # Heads grouped by KV head: queries [B, K, G, T, H], keys and values [B, K, 1, S, H].
    queries, d_outs = (x.transpose(0, 2, 1, 3).reshape(B, K, N // K, T, H) for x in (q, d_out))
    keys, values = k[:, :, None], v[:, :, None]
    raw = queries @ keys.swapaxes(-1, -2) * scale
    capped = softcap * np.tanh(raw / softcap) if softcap else raw
    slope = 1 - (capped / softcap) ** 2 if softcap else 1.0
    masked = np.where(mask[:, None, None], capped, -np.inf)
    m = np.where(mask.any(-1)[:, None, None], masked.max(-1), 0.0)
    weights = np.exp(masked - m[..., None])
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    d_weights = d_outs @ values.swapaxes(-1, -2)
    scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * slope * scale

    def by_query(x: np.ndarray) -> np.ndarray:
        return x.reshape(B, N, T, H).transpose(0, 2, 1, 3)

    dk = (scores.swapaxes(-1, -2) @ queries).sum(2)
    dv = (weights.swapaxes(-1, -2) @ d_outs).sum(2)
    return by_query(weights @ values), by_query(scores @ keys), dk, dv


def decode(
    q: Any, k: Any, v: Any, lengths: np.ndarray, window: int, scale: float, softcap: float
) -> Float[np.ndarray, "B T N H"]:
    """Returns the output of each row's last T tokens over a cache [B,K,S,H] with position p in slot p mod S."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N, _ = q.shape
    K, S = k.shape[1:3]
    out = np.zeros(q.shape)
    for b, t in np.ndindex(B, T):
        position = int(lengths[b]) - T + t
        earliest = max(0, int(lengths[b]) - S, position - window + 1 if window else 0)
        slots = np.arange(earliest, position + 1) % S
        if not len(slots):
            continue
        for n in range(N):
            scores = k[b, n // (N // K), slots] @ q[b, t, n] * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights / weights.sum() @ v[b, n // (N // K), slots]
    return out


def error(got: Any, want: np.ndarray) -> float:
    """Returns the largest difference, relative to max(1, largest magnitude of `want`); inf if it is not finite."""
    difference = np.abs(np.asarray(got, np.float64) - want).max() / max(1.0, np.abs(want).max())
    return float(difference) if np.isfinite(difference) else float("inf")
