"""Whole models with quantized matrices compute what the dequantized matrices compute, experts included."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from jaxllm.decode import weights
from jaxllm.decode.weights import WeightLayout
from jaxllm.errors import UserError
from jaxllm.model import specs, transformer
from jaxllm.model.linear import OutputMajor
from jaxllm.quantize import formats, product
from jaxllm.quantize.weight import QuantizedWeight, dequantize

LAYOUT = WeightLayout.PER_LAYER


@functools.cache
def trees(name, kind):
    """Returns (weights with quantized matrices, the same weights in float)."""
    model = models.ALL[name]
    params = specs.initialize(specs.param_specs(model), jax.random.key(0), jnp.float32)
    quantized = weights.arrange(params, model, LAYOUT, quantize=formats.parse(kind, "channel"))
    exact = weights.arrange(params, model, LAYOUT)

    def is_quantized(x):
        return isinstance(x, QuantizedWeight)

    def in_float(x, like):
        return OutputMajor(dequantize(x).reshape(like.array.shape)) if is_quantized(x) else x

    return quantized, jax.tree.map(in_float, quantized, exact, is_leaf=is_quantized)


@pytest.mark.parametrize("tokens", [2, 12], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", ["int8", "int4-asymmetric"])
@pytest.mark.parametrize("name", ["rotary", "learned", "experts"])
def test_outputs_are_those_of_dequantized_matrices(name, kind, tokens):
    assert (tokens <= product.FEW_ROWS) == (tokens == 2)
    model = weights.model_in(models.ALL[name], LAYOUT)
    ids = np.arange(tokens, dtype=np.int32)[None] % model.vocab_size
    positions = jnp.arange(tokens)[None]
    quantized, exact = trees(name, kind)
    found, wanted = (transformer.forward(tree, ids, positions, model)[0] for tree in (quantized, exact))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * float(jnp.abs(wanted).max()))
    assert any(isinstance(x, QuantizedWeight) for x in quantized["tail"][0]["mlp"].values())


def test_tpus_are_refused():
    with pytest.raises(UserError, match="not supported in the layout tpu"):
        weights.check_quantization(models.ROTARY, WeightLayout.TPU, formats.parse("int8"))
