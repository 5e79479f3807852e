"""Products of activations with a quantized matrix.

A few rows, as in decoding, are multiplied and summed in one fusion, which reads the codes and writes only the result:
XLA converts the codes in registers. A dot cannot read int8 codes and float activations, and XLA would write the whole
matrix in the compute dtype first. For many rows, as in prefill, that is what is done: the cost of one conversion is
small beside the dot.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.quantize.formats import FEW_ROWS
from jaxllm.quantize.weight import QuantizedWeight, dequantize


def multiply(rows: Float[Array, "M inputs"], weight: QuantizedWeight) -> Float[Array, "*M_outputs"]:
    """Multiplies rows by a quantized matrix, with sums in float32; the result has the dtype of the rows."""
    M, outputs = len(rows), weight.outputs
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(outputs) :]), weight)
    # Conversions of the codes do not depend on the activations, so XLA would move those of all layers out of the decode
    # loop, and keep all weights in float. The barrier makes them depend on the activations.
    rows, flat = jax.lax.optimization_barrier((rows, flat))
    if M <= FEW_ROWS:
        y = jnp.stack([_vector_product(row.astype(jnp.float32), flat) for row in rows])
    else:
        # XLA's CPU backend drops barriers before it orders operations, and would dequantize all layers first: scales
        # that depend on the activations, by adding 0, prevent it.
        zero = jnp.minimum(jnp.abs(rows[0, 0]), 0).astype(flat.scales.dtype)
        matrix = dequantize(flat.replace(scales=flat.scales + zero), rows.dtype)
        y = jax.lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.reshape(M, *outputs).astype(rows.dtype)


def _vector_product(x: Float[Array, " inputs"], weight: QuantizedWeight) -> Float[Array, " outputs"]:
    """Multiplies a vector by a matrix [outputs, groups, size]."""
    scales = weight.scales.astype(jnp.float32)
    count, size = weight.codes.shape[-2:]
    if not weight.packed:
        if count == 1:  # one reduction of contiguous rows
            return (weight.codes[:, 0].astype(jnp.float32) * x[None]).sum(-1) * scales[:, 0]
        sums = (weight.codes.astype(jnp.float32) * x.reshape(1, count, size)).sum(-1)
        return (sums * scales).sum(-1)
    halves = x.reshape(count, 2, size)
    # A byte is 16 · high + low, so Σ low · x₀ + high · x₁ = Σ low · (x₀ - x₁ / 16) + byte · x₁ / 16: one operation on
    # integers instead of two.
    first, second = halves[:, 0] - halves[:, 1] / 16, halves[:, 1] / 16
    # XLA would move a mask by a constant out of the decode loop, and read codes and masked codes for each token. The
    # minimum is 0, which XLA does not find out.
    mask = 15 + jnp.minimum(jnp.abs(x[0]), 0).astype(jnp.uint8)
    low, byte = (weight.codes & mask).astype(jnp.float32), weight.codes.astype(jnp.float32)
    sums = (low * first[None] + byte * second[None]).sum(-1)
    totals = halves.sum((1, 2))[None]
    if weight.offsets is not None:
        return (sums * scales + weight.offsets.astype(jnp.float32) * totals).sum(-1)
    return ((sums - 8 * totals) * scales).sum(-1)
