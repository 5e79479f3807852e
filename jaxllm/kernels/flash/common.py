"""Parts that the flash attention kernels share: inputs, mask, softcap, tile sizes, and the tiles to visit.

All kernels loop over the same tiles of scores; they differ in how they load a tile. Names follow FlashAttention-2:
s = scores, p = weights, m = row maximum, l = row sum, acc = unnormalized output, alpha = exp(m - new m), and in the
backward pass delta = rowsum(dO * O), dp and ds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
# Score of a masked key. The initial row maximum M_INIT is far above it and far below any real score, so the weight
# exp2(MASK_VALUE - m) is 0 even in a fully masked row. All three constants are finite in float32.
MASK_VALUE = -1e30
M_INIT = -1e20
# lse of a fully masked row: the weights of such a row in the backward pass are exp2 of about -1e30, which is 0.
MASKED_ROW_LSE = 1e30

Index = Int[Array, ""] | int


class Inputs(NamedTuple):
    """Inputs of attention: q, k, v and optional segments, given for both queries and keys or for neither."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    q_segments: Int[Array, "B T"] | None = None
    k_segments: Int[Array, "B S"] | None = None

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.q.shape[2] // self.k.shape[1]

    @property
    def segmented(self) -> bool:
        """True if segments are given."""
        return self.q_segments is not None


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static attention parameters: lengths, mask, scale and softcap.

    Query t has position t + keys - queries, so the last query is aligned with the last key.

    Attributes:
      queries, keys: Sequence lengths T and S.
      causal: Whether keys after the query's position are masked.
      window: Keys at a distance below this are visible (the query's own has distance 0); 0 means no limit. If not
        causal, the window extends equally in both directions.
      scale: Factor of q·k.
      softcap: Applies c·tanh(score / c); 0 disables it.
    """

    queries: int
    keys: int
    causal: bool
    window: int
    scale: float
    softcap: float

    @property
    def offset(self) -> int:
        """Position of the first query."""
        return self.keys - self.queries

    def key_range(self, first: Index, end: Index) -> tuple[Index, Index]:
        """Returns the range [low, high) of keys visible to queries [first, end); empty if high <= low."""
        low: Index = 0
        high: Index = self.keys
        if self.window:
            low = _maximum(0, first + self.offset - self.window + 1)
        if self.causal:
            high = _minimum(high, end + self.offset)
        elif self.window:
            high = _minimum(high, end + self.offset + self.window - 1)
        return low, high

    def query_range(self, first: Index, end: Index) -> tuple[Index, Index]:
        """Returns the range [low, high) of queries to which keys [first, end) are visible; empty if high <= low."""
        low: Index = 0
        high: Index = self.queries
        if self.causal:
            low = _maximum(0, first - self.offset)
        elif self.window:
            low = _maximum(0, first - self.offset - self.window + 1)
        if self.window:
            high = _minimum(high, end - self.offset + self.window - 1)
        return low, high

    def mask(
        self,
        rows: Int[Array, "..."],
        columns: Int[Array, "..."],
        row_segments: Int[Array, "..."] | None,
        column_segments: Int[Array, "..."] | None,
    ) -> Bool[Array, "..."]:
        """Returns the mask of a tile's scores, which excludes keys past the end; the arguments broadcast."""
        mask = (columns < self.keys) & (rows >= 0)
        distance = rows + self.offset - columns
        if self.causal:
            mask &= distance >= 0
        if self.window:
            mask &= distance < self.window
            if not self.causal:
                mask &= distance > -self.window
        if row_segments is not None and column_segments is not None:
            mask &= row_segments == column_segments
        return mask

    def base2_scores(self, qk: Float[Array, "..."]) -> Float[Array, "..."]:
        """Converts q·k to softcapped scores times log2(e), so that exp2 gives the weights."""
        if self.softcap:
            return jnp.tanh(qk * (self.scale / self.softcap)) * (self.softcap * LOG2_E)
        return qk * (self.scale * LOG2_E)

    def softcap_backward(self, s: Float[Array, "..."], ds: Float[Array, "..."]) -> Float[Array, "..."]:
        """Converts the gradient of the capped score to that of q·k·scale; `s` is the result of `base2_scores`."""
        if not self.softcap:
            return ds
        tanh = s * (1 / (self.softcap * LOG2_E))
        return ds * (1 - tanh * tanh)


def compute_delta(out: Float[Array, "B T N H"], d_out: Float[Array, "B T N H"]) -> Float[Array, "B N T"]:
    """Returns delta = rowsum(dO * O) of FlashAttention's backward pass, in float32; `d_out` is dO."""
    return jnp.einsum("btnh,btnh->bnt", out, d_out, preferred_element_type=jnp.float32)


def key_head(head: Index, group: int) -> Index:
    """Returns the key head of a query head; each key head serves `group` query heads."""
    return _floor_div(head, group)


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


def blocks_of(elements: tuple[Index, Index], block: int) -> tuple[Index, Index]:
    """Returns the range [first, end) of blocks that contain a range of elements; both bounds are nonnegative."""
    low, high = elements
    return _floor_div(low, block), _floor_div(_maximum(high, 0) + block - 1, block)


def key_blocks(spec: AttentionSpec, start: Index, tile: Tile) -> tuple[Index, Index]:
    """Returns the range [first, end) of key blocks visible to the block of queries that starts at `start`."""
    return blocks_of(spec.key_range(start, _minimum(start + tile.queries, spec.queries)), tile.keys)


def query_blocks(spec: AttentionSpec, start: Index, tile: Tile) -> tuple[Index, Index]:
    """Returns the range [first, end) of query blocks to which the block of keys that starts at `start` is visible."""
    return blocks_of(spec.query_range(start, _minimum(start + tile.keys, spec.keys)), tile.queries)


# Range [first, end) of blocks, and whether their scores need a mask.
MaskedRange = tuple[Index, Index, bool]


def key_ranges(spec: AttentionSpec, start: Index, tile: Tile, segmented: bool) -> Sequence[MaskedRange]:
    """Divides the `key_blocks` of a block of queries into contiguous ranges with and without a mask, for GPUs."""
    low, high = key_blocks(spec, start, tile)
    if segmented or spec.window:
        return [(low, high, True)]
    # Blocks that end at or before the first query's position, and before the last key, are fully visible.
    visible = jnp.minimum(jnp.maximum(start + spec.offset + 1, 0), spec.keys) if spec.causal else spec.keys
    unmasked = lax.div(visible, tile.keys) if spec.causal else spec.keys // tile.keys
    return [(0, unmasked, False), (unmasked, high, True)]


def query_ranges(spec: AttentionSpec, start: Index, tile: Tile, segmented: bool) -> Sequence[MaskedRange]:
    """Divides the `query_blocks` of a block of keys into contiguous ranges with and without a mask, for GPUs.

    Queries past the end need no mask because their output gradient is 0.
    """
    low, high = query_blocks(spec, start, tile)
    if segmented or spec.window:
        return [(low, high, True)]
    if not spec.causal:
        return [(low, high, False)]
    last_key = jnp.minimum(start + tile.keys, spec.keys) - 1
    unmasked = lax.div(jnp.maximum(last_key - spec.offset, 0) + tile.queries - 1, tile.queries)
    return [(low, jnp.minimum(unmasked, high), True), (jnp.minimum(unmasked, high), high, False)]


def loop(ranges: Sequence[MaskedRange], step: Callable[..., Any], carry: Any) -> Any:
    """Applies carry = step(block, carry, masked=…) to each block of the ranges in order; returns the final carry."""
    for first, end, masked in ranges:
        carry = lax.fori_loop(first, end, functools.partial(step, masked=masked), carry)
    return carry


def _floor_div(value: Index, block: int) -> Index:
    """Divides a nonnegative value, for which truncating lax.div is exact floor division in one instruction."""
    return value // block if isinstance(value, int) else lax.div(value, block)


def _minimum(a: Index, b: Index) -> Index:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _maximum(a: Index, b: Index) -> Index:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
