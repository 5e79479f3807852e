"""Tile-by-tile copies equal NumPy's copies to the bit."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from jaxllm.interop import copying

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def numbers(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def plain(source, dtype):
    made = np.empty(source.shape, dtype)
    made[...] = source
    return made


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (130, 1100), (17, 40, 130), (2, 70, 1, 65)])
def test_any_order_of_axes_any_dtype(shape, source, target):
    x = numbers(shape, source)
    for axes in itertools.permutations(range(x.ndim)):
        view = x.transpose(axes)
        out = np.full(view.shape, 7, target)
        copying.copy_tiled(view, out)
        assert np.array_equal(bits(out), bits(plain(view, target))), axes
        assert np.array_equal(bits(copying.as_contiguous(view, np.dtype(target))), bits(plain(view, target)))


def test_what_a_folder_holds_as_a_model_wants_it():
    """Copies separate heads, parts of heads, and into slices of a larger array."""
    N, H, D = 6, 48, 1030
    x = numbers((N * H, D), ml_dtypes.bfloat16)
    queries = np.moveaxis(x.reshape(N, H, D), -1, 0)
    out = numbers((D, N, H), ml_dtypes.bfloat16, seed=1)
    before = out.copy()
    copying.copy_tiled(queries[100:900, 2:4], out[100:900, 2:4])
    assert np.array_equal(bits(out[100:900, 2:4]), bits(queries[100:900, 2:4]))
    out[100:900, 2:4] = before[100:900, 2:4]
    assert np.array_equal(bits(out), bits(before))  # elements outside the slice are unchanged


def test_bits_of_nans_travel_where_the_dtype_stays():
    x = np.full((200, 300), np.nan, np.float32)
    x.view(np.uint32)[...] |= np.arange(60000, dtype=np.uint32).reshape(200, 300) & 0x3FFFFF
    out = np.empty((300, 200), np.float32)
    copying.copy_tiled(x.T, out)
    assert np.array_equal(out.view(np.uint32), x.view(np.uint32).T)


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1), (5,)])
def test_small_and_empty_arrays(shape):
    x = numbers(shape, np.float32)
    out = np.full(shape, 7, np.float16)
    copying.copy_tiled(x, out)
    assert np.array_equal(out, x.astype(np.float16))


def test_an_array_in_order_is_not_copied():
    x = numbers((4, 4), np.float32)
    assert copying.as_contiguous(x, x.dtype) is x
    assert copying.as_contiguous(x.T, x.dtype) is not x


def test_a_tile_that_is_left_out_is_seen(monkeypatch):
    x = numbers((130, 1100), np.float32)
    product = itertools.product
    monkeypatch.setattr(copying.itertools, "product", lambda *ranges: list(product(*ranges))[:-1])
    out = np.full((1100, 130), 7, np.float32)
    copying.copy_tiled(x.T, out)
    assert not np.array_equal(out, x.T)
