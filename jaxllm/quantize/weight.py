"""Quantized matrices: storage, rounding to nearest, and the way back.

A weight of output o and group n of inputs is scales[o, n] · code, plus offsets[o, n] if the format is asymmetric.

Scales and offsets are float16, as in the GGUF files of llama.cpp, so that a group of 32 4-bit weights takes 18 bytes;
float32 would make it 20. Codes are rounded with the stored scale, so that its own rounding adds no error to the codes.
Scales below float16's smallest number become 0, and those above its largest one become the largest.
"""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Shaped, UInt8

from jaxllm.errors import UserError
from jaxllm.quantize.formats import QuantFormat

SCALE_DTYPE = jnp.float16
_LARGEST = float(np.finfo(np.float16).max)
_BIAS = 8  # a symmetric 4-bit code is stored as code + 8
_CHUNK = 1 << 24  # weights quantized at a time; bounds the temporaries in float32


class QuantizedWeight(flax.struct.PyTreeNode):
    """Matrix in 8 or 4 bits, with the outputs first: all inputs of an output are contiguous, as in `OutputMajor`.

    Attributes:
      codes: int8 codes; or two 4-bit codes in each uint8, of which the low one belongs to the first half of the group's
        inputs and the high one to the second half. Unpacking is then two contiguous halves and no interleaving.
      scales: Scale of each group.
      offsets: Offset of each group in an asymmetric format, whose 4-bit codes are 0..15; None in a symmetric one.
    """

    codes: Shaped[Array, "*outputs groups bytes"]
    scales: Float[Array, "*outputs groups"]
    offsets: Float[Array, "*outputs groups"] | None = None

    @property
    def outputs(self) -> tuple[int, ...]:
        """Dimensions of the outputs."""
        return self.scales.shape[:-1]

    @property
    def packed(self) -> bool:
        """True if a byte has two codes."""
        return self.codes.dtype == jnp.uint8

    @property
    def inputs(self) -> int:
        """Number of inputs."""
        return math.prod(self.codes.shape[-2:]) * (2 if self.packed else 1)

    def __getitem__(self, index: Any) -> "QuantizedWeight":
        """Indexes the first dimension of the outputs."""
        return jax.tree.map(lambda x: x[index], self)


def pack(codes: Int8[Array, "*groups size"]) -> UInt8[Array, "*groups size/2"]:
    """Packs codes in 0..15, two in a byte: code i of the first half of a group with code i of the second half."""
    low, high = jnp.split(codes.astype(jnp.uint8), 2, -1)
    return low | (high << 4)


def unpack(packed: UInt8[Array, "*groups bytes"]) -> Int8[Array, "*groups 2*bytes"]:
    """Unpacks codes in 0..15; the inverse of `pack`."""
    return jnp.concatenate([packed & 15, packed >> 4], -1).astype(jnp.int8)


def quantize(weight: Float[Array, "*outputs inputs"], fmt: QuantFormat, name: str) -> QuantizedWeight:
    """Quantizes a matrix to the nearest codes.

    The largest error is half a step: 1/254 of a group's largest magnitude in int8 and 1/14 in int4, and 1/30 of its
    range in asymmetric int4; plus the rounding of scale and offset, which are float16.

    Args:
      weight: Matrix with the outputs first.
      fmt: The format; its groups divide the inputs.
      name: Name of the tensor, for messages.

    Raises:
      UserError: The weight has a NaN or an infinity, or the groups do not divide the inputs.
    """
    outputs, inputs = weight.shape[:-1], weight.shape[-1]
    if not fmt.divides(inputs):
        raise UserError(f"{name} has {inputs} inputs, which groups of {fmt.group} do not divide; use another group")
    rows = weight.reshape(-1, inputs)
    traced = isinstance(weight, jax.core.Tracer)
    step = len(rows) if traced else max(1, _CHUNK // inputs)
    parts = []
    for first in range(0, len(rows), step):
        part = jnp.asarray(rows[first : first + step]).astype(jnp.float32)
        if not traced and not jnp.isfinite(part).all():
            raise UserError(f"{name} has a NaN or an infinity, which cannot be quantized; use another checkpoint")
        parts.append(_quantize(part.reshape(len(part), -1, fmt.group_size(inputs)), fmt))
    whole = parts[0] if len(parts) == 1 else jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
    return jax.tree.map(lambda x: x.reshape(*outputs, *x.shape[1:]), whole)


def _quantize(groups: Float[Array, "rows groups size"], fmt: QuantFormat) -> QuantizedWeight:
    if fmt.symmetric:
        limit = 127 if fmt.bits == 8 else 7
        scales = _stored(jnp.abs(groups).max(-1) / limit)
        codes = _codes(groups, scales, -limit, limit)
        return QuantizedWeight(codes if fmt.bits == 8 else pack(codes + _BIAS), scales)
    low, high = groups.min(-1), groups.max(-1)
    scales, offsets = _stored(high / 15 - low / 15), _stored(low)
    codes = _codes(groups - offsets.astype(jnp.float32)[..., None], scales, 0, 15)
    return QuantizedWeight(pack(codes), scales, offsets)


def _stored(x: Array) -> Array:
    return jnp.clip(x, -_LARGEST, _LARGEST).astype(SCALE_DTYPE)


def _codes(x: Array, scales: Array, low: int, high: int) -> Array:
    step = scales.astype(jnp.float32)[..., None]
    codes = jnp.round(x / jnp.where(step > 0, step, 1.0))
    return jnp.where(step > 0, jnp.clip(codes, low, high), 0).astype(jnp.int8)


def dequantize(weight: QuantizedWeight, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "*outputs inputs"]:
    """Returns the matrix that a quantized weight stands for, computed in float32."""
    codes = signed_codes(weight).astype(jnp.float32)
    values = codes * weight.scales.astype(jnp.float32)[..., None]
    if weight.offsets is not None:
        values = values + weight.offsets.astype(jnp.float32)[..., None]
    return values.reshape(*weight.outputs, weight.inputs).astype(dtype)


def signed_codes(weight: QuantizedWeight) -> Int8[Array, "*outputs groups size"]:
    """Returns the codes that scales multiply: -128..127, -8..7, or 0..15 in an asymmetric format."""
    if not weight.packed:
        return weight.codes
    codes = unpack(weight.codes)
    return codes if weight.offsets is not None else codes - jnp.int8(_BIAS)


def with_codes(weight: QuantizedWeight, codes: Int8[Array, "*outputs groups size"]) -> QuantizedWeight:
    """Returns a quantized weight with other codes, signed as in `signed_codes`, and the same scales and offsets."""
    if not weight.packed:
        return weight.replace(codes=codes)
    return weight.replace(codes=pack(codes if weight.offsets is not None else codes + jnp.int8(_BIAS)))
