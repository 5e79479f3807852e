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
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the three kernels: output, gradient of queries, gradients of keys and values."""

    forward: Tile
    dq: Tile
    dkv: Tile


def tiles_for(platform: str, head_dim: int, dtype: DTypeLike) -> Tiles:
    """The tiles of a head dimension and input type.

    Chosen so that no kernel of 16-bit inputs spills registers on the GPUs of `make test-aot`. In float32 the backward
    kernels do above a head dimension of 64, by some hundred bytes a thread at most.
    """
    wide = jnp.dtype(dtype).itemsize == 4
    if platform == "tpu":
        # 128 lanes; a tile's scores and all blocks stay within the 16 MiB of vector memory that a kernel gets.
        size = 256 if wide or head_dim > 128 else 512
        return Tiles(Tile(size, size), Tile(size, size), Tile(size, size))
    if wide:  # a product is three of tensor cores
        if head_dim <= 64:
            return Tiles(Tile(64, 32, 8), Tile(32, 32, 8), Tile(32, 32, 8))
        if head_dim <= 128:
            return Tiles(Tile(32, 32, 8), Tile(32, 16, 8), Tile(32, 32, 8))
        return Tiles(Tile(16, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 16, 8, 1))
    if head_dim <= 64:
        return Tiles(Tile(128, 64, 8), Tile(128, 64, 8), Tile(32, 32, 4))
    if head_dim <= 128:
        return Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 8, 3), Tile(32, 64, 8))
    return Tiles(Tile(64, 32, 8), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1))
