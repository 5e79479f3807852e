"""Keys and values in 8 bits: symmetric, with one float32 scale for each token and head."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

_LARGEST = 127


def quantize(x: Float[Array, "*batch H"]) -> tuple[Int8[Array, "*batch H"], Float[Array, "*batch"]]:
    """(numbers in -127..127, scale): x ≈ numbers · scale, off by half a scale at most.

    The scale is the largest magnitude over 127; of a vector of zeros it is 0.
    """
    wide = x.astype(jnp.float32)
    scale = jnp.abs(wide).max(-1) / _LARGEST
    steps = wide / jnp.where(scale > 0, scale, 1.0)[..., None]
    return jnp.clip(jnp.round(steps), -_LARGEST, _LARGEST).astype(jnp.int8), scale


def dequantize(numbers: Int8[Array, "*batch H"], scale: Float[Array, "*batch"]) -> Float[Array, "*batch H"]:
    """numbers · scale, float32."""
    return numbers.astype(jnp.float32) * scale[..., None]
