"""Linear maps of a layer and the ways in which their weights are stored."""

import math
from typing import Any

import flax.struct
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.model.adapters import ADAPTERS
from jaxllm.quantize.product import multiply
from jaxllm.quantize.weight import QuantizedWeight


class OutputMajor(flax.struct.PyTreeNode):
    """Weight stored with the outputs first, [*outputs, *inputs], so that all inputs of an output are contiguous.

    Inference stores its weights so: a matrix–vector product reads them row by row, in place. See `decode.weights`.
    """

    array: Float[Array, "*outputs_inputs"]


def matmul(x: Float[Array, "B T *inputs"], weight: Array | OutputMajor | QuantizedWeight, fan_in: int = 1) -> Array:
    """Multiplies x by a weight, contracting the last `fan_in` dimensions of x: [B, T, *outputs].

    This is one 2D matmul with flattened dimensions. On XLA's CPU backend, the gradient of the equivalent einsum, which
    sums over batch and time separately, takes twice as long.

    Args:
      x: Activations.
      weight: [*inputs, *outputs], or an `OutputMajor` or quantized weight.
      fan_in: Number of input dimensions.
    """
    B, T = x.shape[:2]
    inputs = math.prod(x.shape[2:])
    rows = x.reshape(B * T, inputs)
    if isinstance(weight, QuantizedWeight):
        outputs, y = weight.outputs, multiply(rows, weight)
    elif isinstance(weight, OutputMajor):
        outputs = weight.array.shape[: weight.array.ndim - fan_in]
        y = jax.lax.dot_general(rows, weight.array.reshape(-1, inputs), (((1,), (1,)), ((), ())))
    else:
        outputs = weight.shape[fan_in:]
        y = rows @ weight.reshape(inputs, -1)
    return y.reshape(B, T, *outputs)


def project(x: Float[Array, "B T *inputs"], params: dict[str, Any], name: str, fan_in: int = 1) -> Array:
    """Multiplies x by the named weight and adds the output of its low-rank adapter, if it has one.

    The adapter is applied to activations and not added to the weight, which would need a copy of the weight.
    See `jaxllm.model.adapters`.
    """
    y = matmul(x, params[name], fan_in)
    pair = params.get(ADAPTERS, {}).get(name)
    if pair is None:
        return y
    return y + matmul(checkpoint_name(matmul(x, pair["a"], fan_in), ADAPTERS), pair["b"])
