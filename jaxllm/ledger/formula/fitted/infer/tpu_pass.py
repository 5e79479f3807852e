"""One prefill pass on a TPU, and the rule for which of its arrays are in HBM.

An array that fits vector memory takes no HBM (`hardware.spec.Device.vector_memory`). XLA prefers the arrays that are
read most. The rule here places larger arrays first, after those that stay for the whole program: a cache that fits
whole, or else a prefetched embedding table; and scales. With long layer patterns, arrays of other layers fill vector
memory.
"""

import dataclasses
import functools
import math

from jaxllm.config import Architecture
from jaxllm.ledger.formula.exact import formats, tpu_tiles
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer.forward_pass import Array
from jaxllm.model.specs import cache_slots, cache_specs, leaves

# Layers per pattern from which on arrays of its other layers fill vector memory.
_LONG = 3


def cache_arrays(model: Architecture, batch: int, capacity: int, cache_dtype: str) -> list[tuple[tuple[int, ...], int]]:
    """Returns (shape, bytes per element) of each array of a cache."""
    itemsize, scale = formats.cache_itemsize(cache_dtype)
    specs = leaves(cache_specs(model, batch, capacity, scaled=scale > 0))
    return [(spec.shape, scale if spec.role == "cache scale" else itemsize) for spec in specs]


def array(name: str, shape: tuple[int, ...], itemsize: int, kind: str = "") -> Array:
    """Returns an array of this shape with tile padding and `itemsize` bytes per element."""
    formula = " × ".join(f"{size:,}" for size in shape)
    return Array(name, tpu_tiles.padded_bytes(shape, itemsize), f"{formula} × {itemsize} B", kind)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """One prefill pass over `tokens` new tokens of each of `batch` sequences; see `workspaces.workspace_rows`.

    Attributes:
      c: bytes per element of the compute dtype.
      cached: True with a KV cache.
      vector_memory: bytes of vector memory available to a program's arrays.
    """

    model: Architecture
    batch: int
    capacity: int
    tokens: int
    c: int
    cache_dtype: str
    cached: bool
    vector_memory: int

    @property
    def count(self) -> int:
        return self.batch * self.tokens

    @property
    def group(self) -> int:
        return self.model.heads // self.model.kv_heads

    @property
    def wide_values(self) -> bool:
        """True if values are not read as stored: float32 compute, or a cache in another dtype (int8)."""
        return self.c == FLOAT32 or (self.cached and formats.cache_itemsize(self.cache_dtype)[0] != self.c)

    @property
    def lanes(self) -> int:
        """Elements of a head, rounded up to whole lanes."""
        return tpu_tiles.round_up(self.model.head_dim, tpu_tiles.LANES)

    @property
    def table(self) -> Array:
        """Row-major copy of the token embeddings or of the head, padded to whole lanes."""
        shape = (self.model.vocab_size, tpu_tiles.round_up(self.model.width, tpu_tiles.LANES))
        return array("row-major table", shape, self.c, "weights")

    @property
    def beside_cache(self) -> int:
        """Bytes of vector memory left beside the cache; all of it if the cache does not fit whole."""
        if not self.cached:
            return self.vector_memory
        arrays = cache_arrays(self.model, self.batch, self.capacity, self.cache_dtype)
        size = sum(tpu_tiles.padded_bytes(*array) for array in arrays)
        return self.vector_memory - (size if size <= self.vector_memory else 0)

    @functools.cached_property
    def scales(self) -> int:
        """Bytes of a second stack of all layers' key scales (value scales take as many); 0 if the stored stack is used.

        The kernel that writes a cache has heads along the sublanes. A stack that this layout pads further is a separate
        array.
        """
        model, size = self.model, 0
        if not self.cached or not formats.cache_itemsize(self.cache_dtype)[1]:
            return 0
        sublanes = min(1 << (model.kv_heads - 1).bit_length(), tpu_tiles.SUBLANES)
        for kind in model.pattern if model.repeats else ():
            stack = (model.repeats, self.batch, model.kv_heads, cache_slots(model, kind, self.capacity))
            written = (
                math.prod(stack[:2])
                * tpu_tiles.round_up(stack[2], sublanes)
                * tpu_tiles.round_up(stack[3], tpu_tiles.LANES)
                * FLOAT32
            )
            size += written if written > tpu_tiles.padded_bytes(stack, FLOAT32) else 0
        return size

    @functools.cached_property
    def free(self) -> int:
        """Bytes of vector memory available to the arrays of a layer."""
        if len(self.model.pattern) >= _LONG:
            return 0
        left = self.beside_cache
        kept = [self.table.size] if self.model.width % tpu_tiles.LANES == 0 and left == self.vector_memory else []
        for size in [*kept, *[self.scales] * 2]:
            left -= size if size <= left else 0
        return left

    def in_hbm(self, arrays: list[Array], free: int | None = None) -> list[Array]:
        """Returns the arrays in HBM, largest first, after vector memory is filled with the largest that fit."""
        free, left = self.free if free is None else free, []
        for one in sorted(arrays, key=lambda one: -one.size):
            if one.size <= free:
                free -= one.size
            else:
                left.append(one)
        return left
