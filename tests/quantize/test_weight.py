"""Rounding to nearest, storage, and products with quantized matrices, at ordinary and at extreme values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.kernels.decode import common
from jaxllm.model.linear import OutputMajor, matmul
from jaxllm.quantize import formats, product
from jaxllm.quantize.weight import dequantize, pack, quantize, unpack

FORMATS = [
    formats.parse(kind, group) for kind in formats.KINDS for group in ("channel", "32", "64")
]  # of 64 inputs, "channel" and 64 are equal
IDS = [each.name for each in FORMATS]
INT8, INT4 = formats.parse("int8", "32"), formats.parse("int4", "32")
WIDE = formats.parse("int4-asymmetric", "32")


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def step(groups, fmt):
    """The largest distance of two codes' values, for each group."""
    top, low = groups.max(-1), groups.min(-1)
    return (top - low) / 15 if not fmt.symmetric else np.abs(groups).max(-1) / (127 if fmt.bits == 8 else 7)


def is_near(got, want, fmt):
    groups = np.asarray(want, np.float64).reshape(len(want), -1, fmt.group_size(want.shape[-1]))
    error = np.abs(np.asarray(got, np.float64).reshape(groups.shape) - groups).max(-1)
    float16 = np.abs(groups).max(-1) * 2.0**-10  # rounding of scale and offset
    return bool((error <= step(groups, fmt) / 2 + float16).all())


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_errors_are_at_most_half_a_step(fmt):
    w = random(48, 128)
    made = quantize(w, fmt, "w")
    assert made.outputs == (48,)
    assert made.inputs == 128
    assert is_near(dequantize(made), w, fmt)
    assert not is_near(dequantize(made.replace(codes=made.codes[:, :, ::-1])), w, fmt)
    assert not is_near(dequantize(made.replace(scales=made.scales * 0.9)), w, fmt)


def test_packing_keeps_the_order():
    codes = jnp.asarray(np.random.default_rng(1).integers(0, 16, (3, 2, 32)), jnp.int8)
    packed = pack(codes)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (3, 2, 16)
    np.testing.assert_array_equal(unpack(packed), codes)


@pytest.mark.parametrize("fmt", [INT8, INT4, WIDE], ids=lambda fmt: fmt.name)
def test_a_group_of_zeros_is_zeros(fmt):
    w = random(2, 64).at[0, :32].set(0)
    got = dequantize(quantize(w, fmt, "w"))
    assert (got[0, :32] == 0).all()
    assert (got[0, 32:] != 0).any()


@pytest.mark.parametrize("fmt", [INT8, INT4, WIDE], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("case", ["one 1e-30", "below float16", "subnormal", "beyond float16"])
def test_extreme_groups_stay_finite(fmt, case):
    groups = {
        "one 1e-30": jnp.zeros((1, 32)).at[0, 5].set(1e-30),
        "below float16": random(1, 32) * 1e-9,
        "subnormal": random(1, 32) * 3e-6,
        "beyond float16": random(1, 32) * 1e9,
    }
    got = dequantize(quantize(groups[case], fmt, "w"))
    assert jnp.isfinite(got).all()
    assert jnp.abs(got - groups[case]).max() <= jnp.abs(groups[case]).max()


@pytest.mark.parametrize("fmt", [INT8, INT4, WIDE], ids=lambda fmt: fmt.name)
def test_a_large_value_among_small_ones(fmt):
    w = jnp.full((1, 32), 1e-3).at[0, 7].set(6e4)
    got = dequantize(quantize(w, fmt, "w"))
    assert got[0, 7] == pytest.approx(6e4, rel=1e-3)
    assert jnp.abs(got.at[0, 7].set(0)).max() <= 1.01e-3  # an offset is rounded to float16


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(UserError, match="layer 3, weight qkv, has a NaN or an infinity"):
        quantize(random(4, 64).at[1, 2].set(bad), INT8, "layer 3, weight qkv,")


def test_large_matrices_are_quantized_in_parts(monkeypatch):
    w = random(5, 3, 64)
    whole = quantize(w, INT4, "w")
    monkeypatch.setattr("jaxllm.quantize.weight._CHUNK", 128)
    jax.tree.map(np.testing.assert_array_equal, quantize(w, INT4, "w"), whole)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("rows", [1, product.FEW_ROWS, product.FEW_ROWS + 5])
def test_products_are_those_of_the_dequantized_matrix(fmt, rows):
    weight = quantize(random(6, 4, 64), fmt, "w")
    x = random(1, rows, 2, 32, seed=2)
    want = np.asarray(x, np.float64).reshape(rows, 64) @ np.asarray(dequantize(weight), np.float64).reshape(24, 64).T
    got = matmul(x, weight, fan_in=2)
    np.testing.assert_allclose(got, want.reshape(1, rows, 6, 4), rtol=0, atol=2e-5)
    other = matmul(x, weight.replace(scales=weight.scales.at[0, 0].multiply(1.01)), fan_in=2)
    assert np.abs(other - want.reshape(1, rows, 6, 4)).max() > 1e-4


@pytest.mark.parametrize("rows", [1, 9])
def test_sums_are_float32(rows):
    weight = quantize(random(8, 4096), formats.parse("int8", "32"), "w")
    x = random(1, rows, 4096, seed=2).astype(jnp.bfloat16)
    got = matmul(x, weight)
    assert got.dtype == jnp.bfloat16
    want = matmul(x.astype(jnp.float32), OutputMajor(dequantize(weight)))
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=np.abs(want).max() * 2**-7)


def test_a_cached_vector_of_zeros_has_scale_zero():
    codes, scale = common.quantize(jnp.zeros((2, 8)).at[0].set(1.0))
    assert scale[1] == 0
    assert (codes[1] == 0).all()
    assert (common.dequantize(codes, scale)[1] == 0).all()
