"""AWQ's search: inputs with large activations lose less, and nothing is lost where there is nothing to gain."""

import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.quantize import awq, weight
from jaxllm.quantize.formats import QuantFormat

RANDOM = np.random.default_rng(0)
OUTPUTS, INPUTS = 48, 128
WEIGHT = RANDOM.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
OUTLIERS = np.where(np.arange(INPUTS) % 32 == 5, 40.0, 1.0)  # one input in 32 is 40 times as large
FORMAT = QuantFormat(4, 32)


def error(factors, hessian):
    """Squared error of the outputs with scaled inputs."""
    rounded = weight.dequantize(weight.quantize(WEIGHT * factors, FORMAT, "w"))
    difference = np.asarray(rounded) / factors - WEIGHT
    return ((difference @ hessian) * difference).sum()


def test_outliers_are_protected():
    hessian = np.diag(OUTLIERS**2)
    factors = awq.search_scales([WEIGHT], hessian, FORMAT, "w")
    assert factors[OUTLIERS > 1].min() > factors[OUTLIERS == 1].max()
    assert error(factors, hessian) < 0.3 * error(np.ones(INPUTS, np.float32), hessian)


def test_equal_inputs_gain_nothing():
    factors = awq.search_scales([WEIGHT, 2 * WEIGHT], np.eye(INPUTS), FORMAT, "w")
    np.testing.assert_allclose(factors, 1, rtol=1e-6)


@pytest.mark.parametrize("hessian", [np.zeros((INPUTS, INPUTS)), np.diag(np.where(OUTLIERS > 1, 0, 1.0))])
def test_inputs_that_never_occur(hessian):
    factors = awq.search_scales([WEIGHT], hessian, FORMAT, "w")
    assert np.isfinite(factors).all()
    assert (factors > 0).all()


def test_a_nan_is_refused():
    with pytest.raises(UserError, match="w: calibration inputs have a NaN"):
        awq.search_scales([WEIGHT], np.full((INPUTS, INPUTS), np.nan), FORMAT, "w")
