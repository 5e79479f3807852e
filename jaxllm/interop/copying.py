"""Copies of arrays that lie another way than they are wanted, at about the speed of a disk.

NumPy writes a transposed copy row after row and so reads a column after a column: every number costs a line of the
cache. Here it goes tile by tile: the lines that a tile reads are still in the cache when their other numbers are due.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np

# Numbers of a tile along the axis that the source has side by side, and of a tile in all. Measured; half or twice as
# many make no difference to speak of.
_RUN = 1024
_TILE = 8192
_ALIGNED = 64  # bytes, of which XLA wants the start of an array to be a multiple


def copy(source: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` with the numbers of an array of the same shape, which may be any view of anything.

    Where the dtype stays they are copied as bits, so that NaNs keep theirs and NumPy knows how to be quick.
    """
    if source.dtype == out.dtype:
        bits = np.dtype(f"u{source.dtype.itemsize}")
        source, out = source.view(bits), out.view(bits)
    source, out = _merged(source, out)
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
        # What is to be cast is put in order first: NumPy casts numbers that lie apart one by one.
        out[tile] = source[tile] if source.dtype == out.dtype else np.ascontiguousarray(source[tile])


def aligned(shape: Sequence[int], dtype: jax.typing.DTypeLike) -> np.ndarray:
    """An array of no numbers yet that JAX on a CPU takes as its own; of one that lies elsewhere it makes a copy."""
    numpy = np.dtype(dtype)
    size = math.prod(shape) * numpy.itemsize
    room = np.empty(size + _ALIGNED, np.uint8)
    start = -room.ctypes.data % _ALIGNED
    return room[start : start + size].view(numpy).reshape(shape)


def contiguous(source: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in the order of its indices; itself if it is so already."""
    if source.dtype == dtype and source.flags.c_contiguous:
        return source
    made = np.empty(source.shape, dtype)
    copy(source, made)
    return made


def _merged(source: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both with as few axes as will do: those that follow one another in both are one."""
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
