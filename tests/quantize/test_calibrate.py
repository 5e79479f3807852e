"""Quantization of whole models with calibration text, on models whose weights leave something to gain."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from jaxllm.decode import weights
from jaxllm.decode.weights import WeightLayout
from jaxllm.errors import UserError
from jaxllm.model import specs, transformer
from jaxllm.quantize import calibrate, weight
from jaxllm.quantize.formats import QuantFormat
from jaxllm.quantize.weight import QuantizedWeight

FORMAT = QuantFormat(4, 0)
FINE = QuantFormat(8, 0)  # errors so small that those of layers add up, and do not saturate
TOKENS = np.random.default_rng(0).integers(0, 64, (16, 48)).astype(np.int32)
MODELS = {name: model for name, model in models.ALL.items() if not model.experts}


def arranged(model):
    """Returns weights with inputs of very different magnitudes: norms' scales are spread."""
    params = specs.initialize(specs.param_specs(model), jax.random.key(0), jnp.float32)

    def spread(path, x):
        if "norm" in str(path) and path[-1].key == "scale":
            return x + jnp.exp(jax.random.normal(jax.random.key(1), x.shape)) - 1
        return x

    params = jax.tree_util.tree_map_with_path(spread, params)
    return weights.arrange(params, model, WeightLayout.PER_LAYER)


def hidden(params, model):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    return transformer.forward(params, TOKENS, positions, weights.model_in(model, WeightLayout.PER_LAYER))[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("rotary", "learned") else [pytest.mark.slow]) for name in MODELS]
)
def test_calibrated_models_are_closer_than_rounded_ones(name):
    model = MODELS[name]
    params = arranged(model)
    exact, errors = hidden(params, model), {}
    for method in calibrate.METHODS:
        found = calibrate.quantize(params, model, TOKENS, FINE, method)
        errors[method] = float(jnp.square(hidden(found, model) - exact).mean())
    # A random model has few large activations, so the gain is small; experiments/quantization.py has a trained one.
    assert errors["gptq"] < 0.95 * errors["nearest"], errors
    if name == "rotary":
        assert errors["awq"] < 0.95 * errors["nearest"], errors


@pytest.mark.parametrize("name", ["rotary", "learned", "sliding"])
def test_folded_factors_do_not_change_the_model(name, monkeypatch):
    """With matrices that are scaled and not rounded, the outputs are those of the model."""
    model = MODELS[name]
    params = arranged(model)

    def only_scaled(layer, hessians, fmt, name):
        return layer

    monkeypatch.setattr(calibrate, "_quantized", only_scaled)
    found = calibrate.quantize(params, model, TOKENS[:2], FORMAT, "awq")
    changed = [not jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True)]
    assert any(changed)
    exact = hidden(params, model)
    np.testing.assert_allclose(hidden(found, model), exact, rtol=0, atol=2e-4 * float(jnp.abs(exact).max()))


def test_every_matrix_is_quantized_and_nothing_else():
    model = MODELS["sliding"]
    params = arranged(model)
    found = calibrate.quantize(params, model, TOKENS[:2], FORMAT, "gptq")
    assert found["embed"] is params["embed"]
    for layer in found["tail"]:
        quantized = {
            name for group in ("attn", "mlp") for name, x in layer[group].items() if isinstance(x, QuantizedWeight)
        }
        assert quantized == {"qkv", "out", "gate_up", "down"}
        assert layer["attn"]["out"].outputs == (model.width,)
    assert weight.dequantize(found["tail"][0]["mlp"]["down"]).shape == (model.width, model.mlp_width)


def test_experts_are_refused():
    with pytest.raises(UserError, match="models with experts"):
        calibrate.quantize({}, models.EXPERTS, TOKENS, FORMAT, "gptq")
