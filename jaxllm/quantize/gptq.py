"""GPTQ: rounds the weights of a matrix one input at a time, and corrects those not yet rounded for the error made.

Source: Frantar et al. 2022, algorithm 1, with inputs in decreasing order of the Hessian's diagonal ("act-order", from
the authors' code). The scales of all groups are computed before any weight changes, so groups stay consecutive inputs
in the stored matrix, and no permutation has to be stored.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.errors import UserError
from jaxllm.quantize import weight as weight_lib
from jaxllm.quantize.formats import QuantFormat
from jaxllm.quantize.weight import QuantizedWeight

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it (the paper's value)
_BLOCK = 128  # inputs whose corrections to later inputs are applied together


def quantize(
    matrix: Float[Array, "*outputs inputs"], hessian: Float[np.ndarray, "inputs inputs"], fmt: QuantFormat, name: str
) -> QuantizedWeight:
    """Quantizes a matrix so that the squared error of its outputs on calibration inputs is small.

    Args:
      matrix: Weights with the outputs first.
      hessian: Sum of x·xᵀ over the calibration inputs x.
      fmt: The format; its groups divide the inputs.
      name: Name of the tensor, for messages.

    Raises:
      UserError: The weight or the Hessian has a NaN or an infinity, or the groups do not divide the inputs.
    """
    nearest = weight_lib.quantize(jnp.asarray(matrix), fmt, name)
    if not np.isfinite(hessian).all():
        raise UserError(f"{name}: calibration inputs have a NaN or an infinity; use another text or checkpoint")
    inputs = hessian.shape[0]
    weights = np.asarray(matrix, np.float64).reshape(-1, inputs)
    scales = _per_input(nearest.scales, fmt, inputs)
    offsets = None if nearest.offsets is None else _per_input(nearest.offsets, fmt, inputs)
    low, high = (0, 2**fmt.bits - 1) if offsets is not None else (1 - 2 ** (fmt.bits - 1), 2 ** (fmt.bits - 1) - 1)
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    upper = _inverse_factor(np.asarray(hessian, np.float64)[np.ix_(order, order)])

    left, codes = weights[:, order], np.zeros(weights.shape, np.int8)
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        errors = np.zeros((len(left), end - begin))
        for i in range(begin, end):
            column = order[i]
            scale = np.where(scales[:, column] > 0, scales[:, column], 1.0)
            offset = 0.0 if offsets is None else offsets[:, column]
            code = np.clip(np.round((left[:, i] - offset) / scale), low, high)
            code = np.where(scales[:, column] > 0, code, 0)
            codes[:, column] = code
            error = (left[:, i] - (code * scales[:, column] + offset)) / upper[i, i]
            left[:, i:end] -= error[:, None] * upper[i, i:end]
            errors[:, i - begin] = error
        left[:, end:] -= errors @ upper[begin:end, end:]
    return weight_lib.with_codes(nearest, jnp.asarray(codes).reshape(*nearest.scales.shape, -1))


def _per_input(x: Array, fmt: QuantFormat, inputs: int) -> Float[np.ndarray, "outputs inputs"]:
    """Returns the scale or offset of each weight."""
    return np.repeat(np.asarray(x, np.float64).reshape(-1, x.shape[-1]), fmt.group_size(inputs), 1)


def _inverse_factor(hessian: Float[np.ndarray, "inputs inputs"]) -> Float[np.ndarray, "inputs inputs"]:
    """Returns the upper triangular U with UᵀU the inverse of the damped Hessian.

    Inputs that are zero in all of the calibration text get a diagonal of one: their weights are rounded alone.
    """
    diagonal = np.diagonal(hessian)
    damping = DAMPING * diagonal.mean() or 1.0
    damped = hessian + np.diag(np.where(diagonal > 0, damping, 1.0))
    return np.linalg.cholesky(np.linalg.inv(damped)).T
