"""What attention of prefill holds in a TPU's main memory: plain products, so that scores are arrays of all heads.

Of one layer, with K heads of keys of H numbers, G heads of queries for each, T new tokens and S slots:

| array | numbers | there |
|---|---|---|
| scores, and their exponentials | B · K · G·T · S | once where one fusion makes both, else twice |
| masks of keys | B · T · S | always |
| masks of keys, for each head | B · G · T · S | where heads share keys |
| values, in float32 | B · K · S · H, in whole lanes | where they do not lie in the cache as bfloat16 |
| the stack of values, turned | L · B · K · S · H, in whole lanes | likewise, where a head does not fill the lanes |

Of the last two: XLA then has a kernel of its own ("online-softmax") that reads scores and values once, so that no
exponentials are written. It wants a head's numbers along the lanes, where such a cache has its slots, and XLA turns the
stack of all layers in each of them. Scores take its place, if they fit there; else they lie behind the values. Of GPT-2
with chunks of 32 tokens XLA turned none, where the bill has one (half too much).
"""

import dataclasses

from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer.forward_pass import Array, size_of
from jaxllm.ledger.formula.fitted.infer.tpu_pass import Prefill, array
from jaxllm.model.specs import cache_slots

# With more slots than this XLA mostly makes two arrays of scores and exponentials. From so many on it takes the keys of
# a query part by part, and makes one.
_TWICE, _IN_PARTS = 2048, 12288
# Slots and tokens up to which it may, and may not.
_FEW_SLOTS, _FEW_TOKENS = 1024, 128
_EXPONENTIALS = "exponentials of scores"


def attention(one: Prefill, kind: str) -> list[Array]:
    model, B, T = one.model, one.batch, one.tokens
    K, G = model.kv_heads, one.group
    slots = cache_slots(model, kind, one.capacity) if one.cached else T
    ring = one.cached and slots < one.capacity
    S = slots + (T if ring else 0)
    scores = array("scores of one layer", (B, K, G * T, S), FLOAT32)
    arrays = [
        scores,
        array("masks of keys", (B, T, S), FLOAT32),
        array("queries", (one.count, model.heads * model.head_dim), one.c),
        array("hidden states", (one.count, model.width), one.c),
        array("hidden states, normed", (one.count, model.width), one.c),
    ]
    if _written_twice(one, S):
        arrays.append(dataclasses.replace(scores, name=_EXPONENTIALS))
    if G > 1:
        arrays.append(array("masks of keys, for each head", (B, G, T, S), FLOAT32))
    values = array("values in float32", (B, K, S, one.lanes), FLOAT32)
    if not one.wide_values:
        left = one.outside(arrays)
        return left if ring else _in_place_of_masks(left)
    left = one.outside([*arrays, values])
    if not one.cached or one.lanes == model.head_dim or ring:
        return left
    return _beside_turned(one, left, values, slots)


def _in_place_of_masks(left: list[Array]) -> list[Array]:
    """Masks are of no use once they are added to scores: exponentials take their place, if they fit there."""
    room = size_of([each for each in left if each.name.startswith("masks")])
    return [each for each in left if each.name != _EXPONENTIALS or each.size > room]


def _beside_turned(one: Prefill, left: list[Array], values: Array, slots: int) -> list[Array]:
    """The fullest layout of what is in main memory, where the stack of values is turned first.

    Values are made of it and lie behind it. What comes then has its place, or lies behind the values.
    """
    stack = (max(one.model.repeats, 1), one.batch, one.model.kv_heads, slots, one.lanes)
    whole = array("stack of values, turned", stack, formats.cache_itemsize(one.cache_dtype)[0])
    turned, later = one.outside([whole]), [each for each in left if each != values]
    if not turned:
        return left
    if values not in left:
        return max(turned, later, key=size_of)
    if size_of(later) <= whole.size:
        return [whole, values]
    # Scores are the largest of them, and masks fill the place.
    return [whole, values, later[0], *(each for each in later[1:] if each.size > whole.size)]


def _written_twice(one: Prefill, slots: int) -> bool:
    """Whether the scores of a layer and their exponentials are two arrays.

    Of short chunks, of a single head of keys, and of 3,072 slots, XLA makes two in some programs and one in others that
    hardly differ: the bill has two.
    """
    if one.wide_values or slots >= _IN_PARTS:
        return False
    if slots > _TWICE or one.model.kv_heads == 1:
        return True
    return one.tokens <= _FEW_TOKENS and (slots > _FEW_SLOTS or one.group == 1)
