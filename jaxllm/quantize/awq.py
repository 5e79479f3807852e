"""AWQ: scales the inputs of matrices before they are rounded, so that inputs with large activations lose less.

For inputs x with typical magnitude m, a matrix W is stored as the rounding of W·diag(s) and read by x / s, with s = m^α
and the exponent α that makes the error of the outputs smallest. 1 / s is folded into what computes x, so the model does
the same work.

Source: Lin et al. 2023, section 3.2. The magnitude here is the root mean square over the calibration inputs, where the
paper takes the mean of absolute values, so that one matrix of sums, the Hessian of GPTQ, serves both methods.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.errors import UserError
from jaxllm.quantize import weight as weight_lib
from jaxllm.quantize.formats import QuantFormat

_EXPONENTS = np.linspace(0, 1, 20, endpoint=False)  # 0 is rounding alone, so the result is never worse
_SMALLEST = 1e-4


def search_scales(
    matrices: Sequence[Float[Array, "*outputs inputs"] | Float[np.ndarray, "*outputs inputs"]],
    hessian: Float[np.ndarray, "inputs inputs"],
    fmt: QuantFormat,
    name: str,
) -> Float[np.ndarray, " inputs"]:
    """Returns the factors s of the inputs that minimize the squared error of the outputs of all matrices together.

    Args:
      matrices: Matrices that read the same inputs, with the outputs first.
      hessian: Sum of x·xᵀ over the calibration inputs x.
      fmt: The format in which the matrices will be stored.
      name: Name of the tensors, for messages.

    Raises:
      UserError: A weight or the Hessian has a NaN or an infinity, or the groups do not divide the inputs.
    """
    if not np.isfinite(hessian).all():
        raise UserError(f"{name}: calibration inputs have a NaN or an infinity; use another text or checkpoint")
    inputs = hessian.shape[0]
    rows = np.concatenate([np.asarray(each, np.float32).reshape(-1, inputs) for each in matrices])
    magnitude = np.sqrt(np.diagonal(hessian) / max(float(np.diagonal(hessian).mean()), 1e-30))
    best, best_error = np.ones(inputs, np.float32), np.inf
    for exponent in _EXPONENTS:
        scales = np.maximum(magnitude, _SMALLEST) ** exponent
        scales = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
        rounded = weight_lib.dequantize(weight_lib.quantize(jnp.asarray(rows * scales), fmt, name))
        difference = np.asarray(rounded) / scales - rows
        error = float(np.sum((difference @ hessian.astype(np.float32)) * difference))
        if error < best_error:
            best, best_error = scales, error
    return best
