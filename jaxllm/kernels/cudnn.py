"""Attention by cuDNN, as JAX offers it: for NVIDIA GPUs, in 16 bit."""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

# Of `jax.nn.dot_product_attention`.
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
    """softmax(q·k·scale) · v over the keys before each query, in its window and segment; what it can do,
    `jaxllm.config.attention` says.

    The segments go in as a mask, which JAX makes a bias of [B, 1, T, T] of: one number a pair, whatever the heads.

    Args:
      segments: tokens see their own only; None where a row is one.
      window: keys seen, the query's own included; 0 is all.
    Raises:
      NotImplementedError: cuDNN's own, for a shape that it has not got.
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
