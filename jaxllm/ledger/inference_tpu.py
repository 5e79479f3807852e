"""What prefill holds in a TPU's main memory beside weights and cache: its compiler's choice, stated as rules.

Attention is plain products, and its scores are arrays of all heads. Of one layer, with K heads of keys of H numbers,
G heads of queries for each, T new tokens and S slots:

| array | numbers | there |
|---|---|---|
| scores, and their exponentials | B · K · G·T · S | once where one fusion makes both, else twice |
| masks of keys | B · T · S | always |
| masks of keys, for each head | B · G · T · S | where heads share keys |
| values, in float32 | B · K · S · H, in whole lanes | where they do not lie in the cache as bfloat16 |
| the stack of values, turned | L · B · K · S · H, in whole lanes | likewise, where a head does not fill the lanes |

Of the last two: XLA then has a kernel of its own ("online-softmax") that reads scores and values once, so that no
exponentials are written. It wants a head's numbers along the lanes, where such a cache has its slots, and XLA turns the
stack of all layers in each of them. Scores take its place, if they fit there; else they lie behind the values.

An array that fits the vector memory takes no main memory (`devices.Device.vector_memory`). XLA chooses by what is read
most. Here the larger ones come first, beside what stays through the whole program: a cache that fits whole, or else a
table of words that is fetched ahead. With long patterns of layers, what is kept for other layers fills it.

Read from the buffer assignments of 40 programs for a v5e, v5p and v6e (libtpu of JAX 0.10.2). Held against no program:
experts, of which all arrays are counted, and a forward pass without a cache.
"""

import dataclasses
import math
from collections.abc import Iterator

from jaxllm.config import Architecture
from jaxllm.ledger import formats, rows, tiles
from jaxllm.ledger.dataflow import rows_of_experts
from jaxllm.ledger.memory import leaves
from jaxllm.ledger.rows import PERSISTENT, PREFILL, Row
from jaxllm.ledger.setting import FLOAT32
from jaxllm.model.specs import cache_slots, cache_specs, param_specs

_BFLOAT16 = 2
# Slots of which scores and exponentials may be two arrays: more than the first, fewer than the second.
_WRITTEN_TWICE = (1024, 12288)
_EXPONENTIALS = "exponentials of scores"
# Arrays of logits while a token is drawn; as in decoding.
_CHOICE = 8
# Layers of a pattern from which on vector memory is full of what is kept for others of them.
_LONG = 3


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of one moment.

    Attributes:
      kind: of its row.
    """

    name: str
    size: int
    kind: str = f"{PREFILL} workspace"


@dataclasses.dataclass(frozen=True)
class _Prefill:
    """One run over `tokens` new tokens of each of `batch` sequences, as of `inference_workspaces.workspace_rows`."""

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
        return tiles.up(self.model.head_dim, tiles.LANES)

    @property
    def table(self) -> int:
        """Bytes of the words' embeddings, or of the head, by rows."""
        return self.model.vocab_size * tiles.up(self.model.width, tiles.LANES) * self.c

    @property
    def beside_cache(self) -> int:
        """Vector memory that a cache leaves which fits it whole."""
        if not self.cached:
            return self.vector_memory
        size = sum(
            tiles.padded_bytes(*array) for array in _cache(self.model, self.batch, self.capacity, self.cache_dtype)
        )
        return self.vector_memory - (size if size <= self.vector_memory else 0)

    @property
    def free(self) -> int:
        """Vector memory that arrays of a layer may have."""
        if len(self.model.pattern) >= _LONG:
            return 0
        left = self.beside_cache
        kept = [self.table] if self.model.width % tiles.LANES == 0 and left == self.vector_memory else []
        for size in [*kept, *[_scales(self)] * 2]:
            left -= size if size <= left else 0
        return left

    def outside(self, arrays: list[Array], free: int | None = None) -> list[Array]:
        """Those in main memory, the largest first."""
        free, left = self.free if free is None else free, []
        for array in sorted(arrays, key=lambda array: -array.size):
            if array.size <= free:
                free -= array.size
            else:
                left.append(array)
        return left


def state_padding(model: Architecture, batch: int, capacity: int, weight_dtype: str, cache_dtype: str) -> Row:
    """What tiles add to weights and cache, where programs compute with weights as they are stored.

    Args:
      cache_dtype: "" where there is no cache.
    """
    itemsize = formats.compute_itemsize(weight_dtype, "tpu")
    arrays = [(spec.shape, itemsize) for spec in leaves(param_specs(model))]
    arrays += _cache(model, batch, capacity, cache_dtype) if cache_dtype else []
    size = sum(tiles.padding(*array) for array in [*arrays, ((batch, model.vocab_size), 1)])
    return rows.row("padding of tiles", tiles.PADDING, PERSISTENT, f"{size:,} B, in {len(arrays) + 1} arrays", size)


def _cache(model: Architecture, batch: int, capacity: int, cache_dtype: str) -> list[tuple[tuple[int, ...], int]]:
    """(shape, bytes a number) of its arrays."""
    itemsize, scale = formats.cache_itemsize(cache_dtype)
    specs = leaves(cache_specs(model, batch, capacity, scaled=scale > 0))
    return [(spec.shape, scale if spec.role == "cache scale" else itemsize) for spec in specs]


def prefill_rows(
    model: Architecture,
    batch: int,
    capacity: int,
    tokens: int,
    weight_dtype: str,
    cache_dtype: str,
    vector_memory: int,
    cached: bool = True,
) -> list[Row]:
    """The rows of prefill, or of a forward pass without a cache.

    Args:
      tokens: new ones of each sequence.
      weight_dtype, cache_dtype: formats, as of `inference.inference`.
      vector_memory: bytes of the device's that arrays of a program may have; `devices.Device.vector_memory`.
    """
    c = formats.compute_itemsize(weight_dtype, "tpu")
    one = _Prefill(model, batch, capacity, tokens, c, cache_dtype, cached, vector_memory)
    moments = [_attention(one, kind) for kind in dict.fromkeys((*model.pattern, *model.tail))]
    moments += [_mlp(one), _table(one), _choice(one)]
    fullest = max(moments, key=lambda arrays: sum(array.size for array in arrays))
    made = [*_through_all_layers(one), *fullest]
    return [rows.row(array.name, array.kind, PREFILL, f"{array.size:,} B", array.size) for array in made if array.size]


def _through_all_layers(one: _Prefill) -> Iterator[Array]:
    """What is made before the loop over layers."""
    if one.c == FLOAT32:
        # Under float32 products read bfloat16 all the same.
        specs = param_specs(one.model)
        numbers = sum(spec.size for spec in leaves([specs["layers"], specs["tail"]]) if spec.role == "matrix")
        yield Array("weights as products read them", numbers * _BFLOAT16, "weights")
    # The kernel that writes a cache has heads along the sublanes: stacks that are padded so are other arrays.
    yield Array("scales, with heads in whole tiles", 2 * _scales(one))


def _scales(one: _Prefill) -> int:
    """Bytes of such a copy of all layers' scales of keys, or of values; 0 where none is made."""
    model = one.model
    if not one.cached or not formats.cache_itemsize(one.cache_dtype)[1]:
        return 0
    size, rows_of = 0, min(1 << (model.kv_heads - 1).bit_length(), tiles.SUBLANES)
    for kind in model.pattern if model.repeats else ():
        stack = (model.repeats, one.batch, model.kv_heads, cache_slots(model, kind, one.capacity))
        written = math.prod(stack[:2]) * tiles.up(stack[2], rows_of) * tiles.up(stack[3], tiles.LANES) * FLOAT32
        size += written if written > tiles.padded_bytes(stack, FLOAT32) else 0
    return size


def _attention(one: _Prefill, kind: str) -> list[Array]:
    model, B, T = one.model, one.batch, one.tokens
    K, G = model.kv_heads, one.group
    slots = cache_slots(model, kind, one.capacity) if one.cached else T
    ring = one.cached and slots < one.capacity
    S = slots + (T if ring else 0)
    scores = Array("scores of one layer", tiles.padded_bytes((B * K, G * T, S), FLOAT32))
    arrays = [
        scores,
        Array("masks of keys", tiles.padded_bytes((B, T, S), FLOAT32)),
        Array("queries", one.count * model.heads * model.head_dim * one.c),
        Array("hidden states", one.count * model.width * one.c),
        Array("hidden states, normed", one.count * model.width * one.c),
    ]
    if _written_twice(one, S):
        arrays.append(dataclasses.replace(scores, name=_EXPONENTIALS))
    if G > 1:
        arrays.append(Array("masks of keys, for each head", tiles.padded_bytes((B * G, T, S), FLOAT32)))
    values = Array("values in float32", B * K * S * one.lanes * FLOAT32)
    if not one.wide_values:
        left = one.outside(arrays)
        return left if ring else _in_place_of_masks(left)
    left = one.outside([*arrays, values])
    if not one.cached or one.lanes == model.head_dim or ring:
        return left
    return _beside_turned(one, left, values, slots)


def _in_place_of_masks(left: list[Array]) -> list[Array]:
    """Masks are of no use once they are added to scores: exponentials take their place, if they fit there."""
    room = sum(array.size for array in left if array.name.startswith("masks"))
    return [array for array in left if array.name != _EXPONENTIALS or array.size > room]


def _beside_turned(one: _Prefill, left: list[Array], values: Array, slots: int) -> list[Array]:
    """The fullest layout of what is in main memory, where the stack of values is turned first.

    Values are made of it and lie behind it. What comes then has its place, or lies behind the values.
    """
    itemsize = formats.cache_itemsize(one.cache_dtype)[0]
    size = max(one.model.repeats, 1) * one.batch * one.model.kv_heads * slots * one.lanes * itemsize
    turned = one.outside([Array("stack of values, turned", size)])
    later = [array for array in left if array != values]
    if not turned:
        return left
    if values not in left:
        return max(turned, later, key=lambda arrays: sum(array.size for array in arrays))
    if sum(array.size for array in later) <= size:
        return [*turned, values]
    free = size
    behind = []
    for array in sorted(later, key=lambda array: array.size):
        if array.size <= free and array is not later[0]:
            free -= array.size
        else:
            behind.append(array)
    return [*turned, values, *behind]


def _written_twice(one: _Prefill, slots: int) -> bool:
    """Whether the scores of a layer and their exponentials are two arrays.

    XLA's choice: with many slots always. With 2,048 or 3,072, or where heads have keys of their own or all share one,
    sometimes, and the bill has two.
    """
    if one.wide_values or slots >= _WRITTEN_TWICE[1]:
        return False
    return slots > _WRITTEN_TWICE[0] or one.group == 1 or one.model.kv_heads == 1


def _mlp(one: _Prefill) -> list[Array]:
    model, hidden = one.model, one.count * one.model.width * one.c
    if model.experts:
        slots = rows_of_experts(one.count * model.experts_per_token, model.experts) * one.c
        return [Array("experts of one layer", slots * (2 * model.width + 3 * model.mlp_width) + 4 * hidden)]
    names = ("gate of one MLP", "up of one MLP") if model.gated else ("up of one MLP",)
    inner = [Array(name, one.count * model.mlp_width * one.c) for name in names]
    return one.outside([*inner, Array("hidden states", hidden), Array("hidden states, normed", hidden)])


def _table(one: _Prefill) -> list[Array]:
    """A table whose rows do not fill the lanes lies by columns; the product to logits reads a copy by rows."""
    if one.model.width % tiles.LANES == 0:
        return []
    return one.outside([Array("table by rows", one.table, "weights")], one.beside_cache)


def _choice(one: _Prefill) -> list[Array]:
    size = tiles.padded_bytes((one.batch, one.model.vocab_size), FLOAT32)
    left = len(one.outside([Array("", size)] * _CHOICE, one.beside_cache))
    return [Array("logits and choice of a token", left * size, "logits")]
