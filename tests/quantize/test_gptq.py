"""GPTQ against rounding to nearest: smaller errors on correlated inputs, equal ones where there is nothing to gain."""

import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.quantize import gptq, weight
from jaxllm.quantize.formats import QuantFormat

RANDOM = np.random.default_rng(0)
OUTPUTS, INPUTS, TOKENS = 48, 192, 512
WEIGHT = RANDOM.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
# Inputs in a subspace of 32 dimensions, with some noise and a few large channels, as activations are.
MIX = RANDOM.standard_normal((32, INPUTS))
X = (RANDOM.standard_normal((TOKENS, 32)) @ MIX + 0.3 * RANDOM.standard_normal((TOKENS, INPUTS))) * np.exp(
    RANDOM.standard_normal(INPUTS)
)
HESSIAN = X.T @ X
FORMATS = [QuantFormat(4, 64), QuantFormat(4, 64, symmetric=False), QuantFormat(8, 0), QuantFormat(4, 0)]


def error(found):
    """Squared error of the outputs, relative to the outputs."""
    return np.square((np.asarray(weight.dequantize(found)) - WEIGHT) @ X.T).sum() / np.square(WEIGHT @ X.T).sum()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_error_is_far_below_that_of_rounding(fmt):
    nearest, better = weight.quantize(WEIGHT, fmt, "w"), gptq.quantize(WEIGHT, HESSIAN, fmt, "w")
    assert error(better) < 0.4 * error(nearest)
    np.testing.assert_array_equal(better.scales, nearest.scales)
    assert better.codes.shape == nearest.codes.shape
    assert better.codes.dtype == nearest.codes.dtype


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("diagonal", [np.exp(RANDOM.standard_normal(INPUTS)), np.zeros(INPUTS)], ids=["some", "zero"])
def test_independent_inputs_are_rounded_to_nearest(fmt, diagonal):
    nearest, same = weight.quantize(WEIGHT, fmt, "w"), gptq.quantize(WEIGHT, np.diag(diagonal), fmt, "w")
    assert (np.asarray(same.codes) == np.asarray(nearest.codes)).mean() > 0.999  # but ties, in another precision


def test_inputs_that_never_occur_do_not_matter():
    seen = HESSIAN.copy()
    seen[:, 5] = seen[5] = 0
    found = np.asarray(weight.dequantize(gptq.quantize(WEIGHT, seen, FORMATS[0], "w")))
    nearest = np.asarray(weight.dequantize(weight.quantize(WEIGHT, FORMATS[0], "w")))
    np.testing.assert_array_equal(found[:, 5], nearest[:, 5])


def test_zeros_stay_zeros():
    zero = WEIGHT.copy()
    zero[3] = 0
    zero[:, 64:128] = 0
    found = np.asarray(weight.dequantize(gptq.quantize(zero, HESSIAN, FORMATS[0], "w")))
    assert not found[3].any()
    assert not found[:, 64:128].any()


def test_errors_name_the_tensor():
    with pytest.raises(UserError, match="layer 1 out has a NaN"):
        gptq.quantize(np.where(WEIGHT > 2, np.nan, WEIGHT), HESSIAN, FORMATS[0], "layer 1 out")
    with pytest.raises(UserError, match="layer 1 out: calibration inputs have a NaN"):
        gptq.quantize(WEIGHT, np.full_like(HESSIAN, np.nan), FORMATS[0], "layer 1 out")


def test_corrections_in_the_wrong_direction_would_be_caught(monkeypatch):
    factor = gptq._inverse_factor
    monkeypatch.setattr(gptq, "_inverse_factor", lambda hessian: 2 * np.diag(np.diagonal(f := factor(hessian))) - f)
    assert error(gptq.quantize(WEIGHT, HESSIAN, FORMATS[0], "w")) > error(weight.quantize(WEIGHT, FORMATS[0], "w"))
