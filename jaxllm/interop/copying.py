"""Tiled host copies of arrays whose memory layout changes, at about the speed of a disk.

NumPy writes a transposed copy row by row and therefore reads column by column: every element costs a cache line. Here
the copy goes tile by tile, and a cache line is still cached when its other elements are needed.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np

# Elements of a tile along the source's most contiguous axis, and elements of a tile in total. Measured; half or twice
# as many make little difference.
_RUN = 1024
_TILE = 8192
_ALIGNMENT = 64  # bytes; XLA requires arrays to start at a multiple of this


def copy_tiled(source: np.ndarray, out: np.ndarray) -> None:
    """Copies the elements of `source`, which may be any view, into `out` of the same shape.

    If the dtypes are equal, the elements are copied as unsigned integers: this preserves NaN payloads and is a fast
    path in NumPy. Otherwise they are cast.
    """
    if source.dtype == out.dtype:
        bits = np.dtype(f"u{source.dtype.itemsize}")
        source, out = source.view(bits), out.view(bits)
    source, out = _merge_axes(source, out)
    axis = min(range(source.ndim), key=lambda i: (source.shape[i] == 1, abs(source.strides[i])), default=0)
    last = source.ndim - 1
    if source.ndim < 2 or axis == last or source.shape[axis] * source.shape[last] < _TILE:
        out[...] = source
        return
    steps = [1] * source.ndim
    steps[axis] = min(_RUN, source.shape[axis])
    steps[last] = max(1, _TILE // steps[axis])
    for corner in itertools.product(*(range(0, n, step) for n, step in zip(source.shape, steps, strict=True))):
        tile = tuple(slice(i, i + step) for i, step in zip(corner, steps, strict=True))
        # Make the tile contiguous before a cast: NumPy casts strided elements one by one.
        out[tile] = source[tile] if source.dtype == out.dtype else np.ascontiguousarray(source[tile])


def empty_aligned(shape: Sequence[int], dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Allocates an uninitialized array, aligned to 64 bytes: JAX on CPU uses it without a copy."""
    numpy = np.dtype(dtype)
    size = math.prod(shape) * numpy.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(numpy).reshape(shape)


def as_contiguous(source: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the array in C order with the given dtype; returns `source` itself if it has both already."""
    if source.dtype == dtype and source.flags.c_contiguous:
        return source
    out = np.empty(source.shape, dtype)
    copy_tiled(source, out)
    return out


def _merge_axes(source: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns both arrays with adjacent axes merged wherever the axes are contiguous in both."""
    shape: list[int] = []
    strides: list[list[int]] = [[], []]
    for axis, n in enumerate(source.shape):
        here = source.strides[axis], out.strides[axis]
        if n == 1 and source.size:
            continue
        if shape and all(before[-1] == n * stride for before, stride in zip(strides, here, strict=True)):
            shape[-1] *= n
            for before, stride in zip(strides, here, strict=True):
                before[-1] = stride
            continue
        shape.append(n)
        for before, stride in zip(strides, here, strict=True):
            before.append(stride)
    assert math.prod(shape) == source.size
    views = (np.lib.stride_tricks.as_strided(x, shape, s) for x, s in zip((source, out), strides, strict=True))
    return next(views), next(views)
