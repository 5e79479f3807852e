"""Bytes that an array takes in TPU memory, where XLA stores it in tiles and pads partial tiles.

A tile has 8 × 128 elements of 32 bits (Jouppi et al. 2023, "TPU v4", and the Cloud TPU performance guide: sublanes and
lanes of the vector unit). XLA lays one dimension along the 128 lanes and another along the sublanes, and chooses the
two that need the least padding. A last dimension of 64 thus does not double the bytes if another dimension is a
multiple of 128. An array with fewer than 8 rows gets a tile of 1, 2 or 4 rows. Elements of fewer than 32 bits are
packed along the sublanes: two bfloat16 make one 32-bit word, so one row of them takes as much as two.

The rule equals XLA's buffer assignment to the byte for 636 arrays on a v5e (libtpu of JAX 0.10.2; 1 to 5 dimensions;
1, 2 and 4 bytes per element).
"""

import functools
import math
from collections.abc import Iterator

from jaxllm.config.optimizers import OPTIMIZERS
from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact.layout import Layout
from jaxllm.ledger.formula.exact.run import FLOAT32, TrainingRun
from jaxllm.ledger.rows import Row

LANES = 128
SUBLANES = 8
_WORD = 4  # bytes of one lane of one sublane
# XLA's buffer sizes are multiples of this many bytes.
ALIGNMENT = LANES * _WORD
# Kind of the rows of bytes that are not elements of an array.
PADDING = "tile padding"

Array = tuple[tuple[int, ...], int]


@functools.lru_cache(maxsize=16384)
def padded_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the bytes that an array takes on a TPU, tile padding included.

    Args:
      shape: Shape on one device.
      itemsize: Bytes per element: 1, 2 or 4.
    """
    count = math.prod(shape)
    if len(shape) < 2:
        tile = min(max(_power_of_two(count), LANES), SUBLANES * LANES)
        return round_up(round_up(count, tile) * itemsize, ALIGNMENT)
    packed = _WORD // itemsize
    least = min(
        count
        // (shape[lane] * shape[row])
        * round_up(shape[lane], LANES)
        * round_up(shape[row], _tile_rows(shape[row], packed))
        for lane in range(len(shape))
        for row in range(len(shape))
        if lane != row
    )
    return round_up(least * itemsize, ALIGNMENT)


def _tile_rows(count: int, packed: int) -> int:
    return max(min(_power_of_two(count), SUBLANES), packed)


def _power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length() if count > 1 else 1


def round_up(count: int, multiple: int) -> int:
    """Rounds `count` up to a multiple of `multiple`."""
    return -(-count // multiple) * multiple


def padding(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the bytes of tile padding of an array."""
    return padded_bytes(shape, itemsize) - math.prod(shape) * itemsize


def state_padding(run: TrainingRun) -> Row:
    """Returns the row of tile padding of device arrays that persist between steps; host arrays are not tiled."""
    optimizer = run.config.optimizer
    arrays, size = _weights(run.layout, run.param_bytes) if optimizer.offload != "all" else (0, 0)
    if optimizer.offload == "none":
        more, beside = _slots(optimizer.name, run.layout, run.moment_bytes)
        arrays, size = arrays + more, size + beside
    more, beside = _frozen(run.layout, run.compute_bytes)
    arrays, size = arrays + more, size + beside
    few: list[Array] = [((), FLOAT32), ((2,), FLOAT32)]  # the step and the PRNG key
    few += [(shape, FLOAT32) for shape in OPTIMIZERS[optimizer.name].counters]
    if run.policy == "fp16":
        few += [((), FLOAT32), ((), FLOAT32)]  # loss scale and its counter
    arrays, size = arrays + len(few), size + sum(padding(*array) for array in few)
    return Row("tile padding", PADDING, rows.PERSISTENT, size, f"{size:,} B, in {arrays} arrays")


def batch_padding(run: TrainingRun, phase: str) -> Iterator[Row]:
    """Yields the row of tile padding of the batch's five arrays, if a device's sequences do not fill tiles."""
    size = padding((run.step_tokens // run.length, run.length), FLOAT32)
    if size:
        yield Row("tile padding of the batch", PADDING, phase, 5 * size, f"5 × {size:,} B")


@functools.lru_cache(maxsize=4096)
def weights_padding(layout: Layout, groups: tuple[str, ...], itemsize: int) -> int:
    """Returns the bytes of tile padding of copies of trained weights; `itemsize` is that of the copies."""
    chosen = layout.select(groups, trained=True)
    return sum(padding(parameter.weight.local_shape, itemsize) for parameter in chosen)


@functools.lru_cache(maxsize=4096)
def _weights(layout: Layout, itemsize: int) -> tuple[int, int]:
    """Returns (number of arrays, bytes of tile padding) of the trained weights."""
    return len(layout.trained), weights_padding(layout, (), itemsize)


@functools.lru_cache(maxsize=4096)
def _frozen(layout: Layout, itemsize: int) -> tuple[int, int]:
    """Returns (number of arrays, bytes of tile padding) of the frozen weights."""
    return len(layout.frozen), sum(padding(p.weight.local_shape, itemsize) for p in layout.frozen)


@functools.lru_cache(maxsize=4096)
def _slots(name: str, layout: Layout, itemsize: int) -> tuple[int, int]:
    """Returns (number of arrays, bytes of tile padding) of an optimizer's slots."""
    sizes = []
    for slot in OPTIMIZERS[name].slots:
        for parameter in layout.trained:
            shape = slot.shape(parameter.spec)
            if shape == parameter.spec.shape:
                shape = parameter.moment.local_shape
            if shape is not None:
                sizes.append(padding(shape, itemsize))
    return len(sizes), sum(sizes)
