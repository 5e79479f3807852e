"""Symmetric int8 quantization of cached keys and values, with one float32 scale per token and head."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

_LARGEST = 127


def quantize(x: Float[Array, "*batch H"]) -> tuple[Int8[Array, "*batch H"], Float[Array, "*batch"]]:
    """Quantizes vectors to int8 in -127..127, such that x ≈ values · scale with an error of at most scale / 2.

    Returns:
      The int8 values, and the float32 scale of each vector: its largest magnitude / 127, 0 for a zero vector.
    """
    wide = x.astype(jnp.float32)
    scale = jnp.abs(wide).max(-1) / _LARGEST
    steps = wide / jnp.where(scale > 0, scale, 1.0)[..., None]
    return jnp.clip(jnp.round(steps), -_LARGEST, _LARGEST).astype(jnp.int8), scale


def dequantize(values: Int8[Array, "*batch H"], scale: Float[Array, "*batch"]) -> Float[Array, "*batch H"]:
    """Dequantizes int8 values to float32: numbers · scale."""
    return values.astype(jnp.float32) * scale[..., None]
