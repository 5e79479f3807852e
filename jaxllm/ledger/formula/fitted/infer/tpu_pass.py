"""One run of a model's prefill on a TPU, and what of its arrays is in main memory.

An array that fits the vector memory takes no main memory (`devices.Device.vector_memory`). XLA chooses by what is read
most. Here the larger ones come first, beside what stays through the whole program: a cache that fits whole, or else a
table of words that is fetched ahead; and scales. With long patterns of layers, what is kept for other layers fills it.
"""

import dataclasses
import functools
import math

from jaxllm.config import Architecture
from jaxllm.ledger.formula.exact import formats, tpu_tiles
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer.forward_pass import Array
from jaxllm.ledger.formula.training_memory import leaves
from jaxllm.model.specs import cache_slots, cache_specs

# Layers of a pattern from which on vector memory is full of what is kept for others of them.
_LONG = 3


def cache_arrays(model: Architecture, batch: int, capacity: int, cache_dtype: str) -> list[tuple[tuple[int, ...], int]]:
    """(shape, bytes a number) of the arrays of a cache."""
    itemsize, scale = formats.cache_itemsize(cache_dtype)
    specs = leaves(cache_specs(model, batch, capacity, scaled=scale > 0))
    return [(spec.shape, scale if spec.role == "cache scale" else itemsize) for spec in specs]


def array(name: str, shape: tuple[int, ...], itemsize: int, kind: str = "") -> Array:
    """An array of so many bytes a number."""
    formula = " × ".join(f"{size:,}" for size in shape)
    return Array(name, tpu_tiles.padded_bytes(shape, itemsize), f"{formula} × {itemsize} B", kind)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """One run over `tokens` new tokens of each of `batch` sequences, as of `inference_workspaces.workspace_rows`.

    Attributes:
      c: bytes of a number that computes.
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
        """Whether values are not read as they lie: int8, or float32."""
        return self.c == FLOAT32 or (self.cached and formats.cache_itemsize(self.cache_dtype)[0] != self.c)

    @property
    def lanes(self) -> int:
        """Of a head's numbers, in whole rows of them."""
        return tpu_tiles.up(self.model.head_dim, tpu_tiles.LANES)

    @property
    def table(self) -> Array:
        """The words' embeddings, or the head, by rows."""
        shape = (self.model.vocab_size, tpu_tiles.up(self.model.width, tpu_tiles.LANES))
        return array("table by rows", shape, self.c, "weights")

    @property
    def beside_cache(self) -> int:
        """Vector memory that a cache leaves which fits it whole."""
        if not self.cached:
            return self.vector_memory
        arrays = cache_arrays(self.model, self.batch, self.capacity, self.cache_dtype)
        size = sum(tpu_tiles.padded_bytes(*array) for array in arrays)
        return self.vector_memory - (size if size <= self.vector_memory else 0)

    @functools.cached_property
    def scales(self) -> int:
        """Bytes of a second stack of all layers' scales of keys, or of values; 0 where the stored one serves.

        The kernel that writes a cache has heads along the sublanes: a stack that is padded so is another array.
        """
        model, size = self.model, 0
        if not self.cached or not formats.cache_itemsize(self.cache_dtype)[1]:
            return 0
        sublanes = min(1 << (model.kv_heads - 1).bit_length(), tpu_tiles.SUBLANES)
        for kind in model.pattern if model.repeats else ():
            stack = (model.repeats, self.batch, model.kv_heads, cache_slots(model, kind, self.capacity))
            written = (
                math.prod(stack[:2])
                * tpu_tiles.up(stack[2], sublanes)
                * tpu_tiles.up(stack[3], tpu_tiles.LANES)
                * FLOAT32
            )
            size += written if written > tpu_tiles.padded_bytes(stack, FLOAT32) else 0
        return size

    @functools.cached_property
    def free(self) -> int:
        """Vector memory that arrays of a layer may have."""
        if len(self.model.pattern) >= _LONG:
            return 0
        left = self.beside_cache
        kept = [self.table.size] if self.model.width % tpu_tiles.LANES == 0 and left == self.vector_memory else []
        for size in [*kept, *[self.scales] * 2]:
            left -= size if size <= left else 0
        return left

    def outside(self, arrays: list[Array], free: int | None = None) -> list[Array]:
        """Those in main memory, the largest first."""
        free, left = self.free if free is None else free, []
        for one in sorted(arrays, key=lambda one: -one.size):
            if one.size <= free:
                free -= one.size
            else:
                left.append(one)
        return left
