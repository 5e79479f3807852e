"""Attention with cuDNN through `jax.nn.dot_product_attention`, for NVIDIA GPUs in 16-bit dtypes."""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

# The `implementation` argument of `jax.nn.dot_product_attention`.
IMPLEMENTATION: Literal["cudnn", "xla"] = "cudnn"


def cudnn_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    segments: Int[Array, "B T"] | None,
    *,
    window: int,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Computes causal attention, softmax(q·k·scale) · v, within each query's window and segment.

    `jaxllm.config.attention` checks which configurations are supported. Segments are passed as a mask, which JAX
    converts to a bias [B, 1, T, T] shared by all heads.

    Args:
      q: Queries.
      k, v: Keys and values; K key heads, each used by N / K query heads.
      segments: Segment of each token; tokens attend within their segment. None if each row is one segment.
      window: Number of visible keys, including the query's own position; 0 means no limit.
      scale: Factor of q·k.

    Returns:
      The attention output.

    Raises:
      NotImplementedError: From cuDNN, for an unsupported shape.
    """
    mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
    return jax.nn.dot_product_attention(
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        mask=mask,
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation=IMPLEMENTATION,
    )
