"""Tile sizes of the flash attention kernels, by backend, dtype and head_dim."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile size and launch parameters of one kernel.

    Attributes:
      queries, keys: Queries and keys per tile; powers of two.
      warps: Warps of 32 threads per tile; GPU only.
      stages: Pipeline stages, the number of tiles being loaded at a time; GPU only.
      depth: Chunk size over head_dim of a matmul that contracts it, a power of two; 0 means all of head_dim. Triton
        only.
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    depth: int = 0


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of the three kernels: forward, gradient of queries, and gradients of keys and values."""

    forward: Tile
    dq: Tile
    dkv: Tile


# Triton tiles by element size in bytes and largest head_dim. No kernel spills registers on A100, H100 and B200
# (`make test-aot`). A warp keeps 16 full rows of a matmul in registers, and twice as much in float32, which tensor
# cores compute from two parts. A depth of 256 in float32 exceeds the registers, so the widest heads are chunked.
_TRITON = {
    (2, 64): Tiles(Tile(128, 128, 8), Tile(128, 64, 8), Tile(32, 32, 4)),
    (2, 128): Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 8, 3), Tile(32, 64, 8)),
    (2, 256): Tiles(Tile(64, 32, 8), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (4, 32): Tiles(Tile(64, 32, 8), Tile(32, 32, 8), Tile(32, 16, 8)),
    (4, 64): Tiles(Tile(64, 32, 8), Tile(32, 32, 8), Tile(32, 32, 8)),
    (4, 128): Tiles(Tile(32, 32, 8), Tile(16, 32, 8), Tile(32, 16, 8)),
    (4, 256): Tiles(Tile(32, 32, 8, 2, 32), Tile(32, 32, 8, 2, 32), Tile(16, 32, 8, 2, 32)),
}
# Mosaic GPU forward tiles (Hopper): 64 queries per warpgroup, and as many keys and stages as fit into a block's 227 KiB
# of shared memory and the registers of the compute warpgroups.
_MOSAIC_GPU = {
    64: Tile(128, 128, 8, 4),
    128: Tile(128, 128, 8, 2),
    192: Tile(128, 64, 8, 2),
    256: Tile(128, 64, 8, 2),
}


def tiles_for(backend: str, head_dim: int, dtype: DTypeLike) -> Tiles:
    """Returns the tiles for a backend of `flash_attention`, a head_dim up to 256 and an input dtype."""
    itemsize = jnp.dtype(dtype).itemsize
    if backend == "mosaic":
        # Multiples of 128 lanes; a tile's scores and all blocks fit into a kernel's 16 MiB of VMEM.
        size = 256 if itemsize == 4 or head_dim > 128 else 512
        return Tiles(Tile(size, size), Tile(size, size), Tile(size, size))
    tiles = next(found for (size, most), found in _TRITON.items() if size == itemsize and head_dim <= most)
    if backend == "mosaic_gpu" and head_dim in _MOSAIC_GPU:
        return dataclasses.replace(tiles, forward=_MOSAIC_GPU[head_dim])
    return tiles
