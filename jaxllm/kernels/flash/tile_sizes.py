"""Sizes of the tiles that attention kernels work in."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Tile:
    """Attributes:
    queries, keys: of a tile; powers of two.
    warps: of 32 threads that share it; GPU only.
    stages: tiles on the way from memory at a time; GPU only.
    depth: of the head dimension, how much a product of rows takes at a time; a power of 2, 0 is all. Triton only.
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    depth: int = 0


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the three kernels: output, gradient of queries, gradients of keys and values."""

    forward: Tile
    dq: Tile
    dkv: Tile


# On NVIDIA through Triton, by bytes of a number and the largest head_dim. No kernel spills a register on A100, H100 and
# B200 (`make test-aot`). A warp holds 16 rows of a product whole, and in float32 twice, as the two parts of which
# tensor cores make it: a depth of 256 is more than there are registers, so that the widest heads are taken in parts.
_TRITON = {
    (2, 64): Tiles(Tile(128, 128, 8), Tile(128, 64, 8), Tile(32, 32, 4)),
    (2, 128): Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 8, 3), Tile(32, 64, 8)),
    (2, 256): Tiles(Tile(64, 32, 8), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (4, 32): Tiles(Tile(64, 32, 8), Tile(32, 32, 8), Tile(32, 16, 8)),
    (4, 64): Tiles(Tile(64, 32, 8), Tile(32, 32, 8), Tile(32, 32, 8)),
    (4, 128): Tiles(Tile(32, 32, 8), Tile(16, 32, 8), Tile(32, 16, 8)),
    (4, 256): Tiles(Tile(32, 32, 8, 2, 32), Tile(32, 32, 8, 2, 32), Tile(16, 32, 8, 2, 32)),
}
# The output on Hopper through Mosaic: 64 queries a warp group, and as many keys and stages as a block's 227 KiB of
# shared memory and the computing groups' registers hold.
_MOSAIC_GPU = {
    64: Tile(128, 128, 8, 4),
    128: Tile(128, 128, 8, 2),
    192: Tile(128, 64, 8, 2),
    256: Tile(128, 64, 8, 2),
}


def tiles_for(backend: str, head_dim: int, dtype: DTypeLike) -> Tiles:
    """The tiles of a head dimension, up to 256, and input type; of the backends of `flash_attention`."""
    itemsize = jnp.dtype(dtype).itemsize
    if backend == "mosaic":
        # 128 lanes; a tile's scores and all blocks stay within the 16 MiB of vector memory that a kernel gets.
        size = 256 if itemsize == 4 or head_dim > 128 else 512
        return Tiles(Tile(size, size), Tile(size, size), Tile(size, size))
    tiles = next(found for (size, most), found in _TRITON.items() if size == itemsize and head_dim <= most)
    if backend == "mosaic_gpu" and head_dim in _MOSAIC_GPU:
        return dataclasses.replace(tiles, forward=_MOSAIC_GPU[head_dim])
    return tiles
