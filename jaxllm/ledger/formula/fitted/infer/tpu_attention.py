"""Memory rules for prefill attention in a TPU's HBM: plain matmuls, so scores are arrays over all heads.

Arrays of one layer, with B sequences, K KV heads of H elements, G query heads per KV head, T new tokens and S slots (L
layers):

| array | elements | present |
|---|---|---|
| scores, and their exponentials | B · K · G·T · S | once if one fusion computes both, else twice |
| masks of keys | B · T · S | always |
| masks of keys, for each head | B · G · T · S | with grouped-query attention |
| values, in float32 | B · K · S · H, in whole lanes | if the cache does not store them as bfloat16 |
| the stack of values, transposed | L · B · K · S · H, in whole lanes | as above, if a head does not fill the lanes |

With the last two, XLA uses a kernel of its own ("online-softmax") that reads scores and values once, so no exponentials
are written. The kernel needs a head's elements along the lanes, where such a cache has its slots, so XLA transposes the
stack of all layers in every layer. Scores reuse the transposed stack's buffer if they fit; otherwise they are placed
after the values. For GPT-2 with chunks of 32 tokens XLA transposes no stack, but the bill has one (half too much).
"""

import dataclasses

from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer.forward_pass import Array, size_of
from jaxllm.ledger.formula.fitted.infer.tpu_pass import Prefill, array
from jaxllm.model.specs import cache_slots

# Above _TWICE slots XLA mostly uses two arrays, scores and exponentials. From _IN_PARTS slots on it processes the keys
# of a query in parts, and uses one.
_TWICE, _IN_PARTS = 2048, 12288
# At most _TWICE slots: XLA uses two arrays for at most _FEW_TOKENS tokens, if there are more than _FEW_SLOTS slots or
# no grouped queries; else one.
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
    if _stores_exponentials(one, S):
        arrays.append(dataclasses.replace(scores, name=_EXPONENTIALS))
    if G > 1:
        arrays.append(array("masks of keys, for each head", (B, G, T, S), FLOAT32))
    values = array("values in float32", (B, K, S, one.lanes), FLOAT32)
    if not one.wide_values:
        left = one.in_hbm(arrays)
        return left if ring else _reusing_mask_buffers(left)
    left = one.in_hbm([*arrays, values])
    if not one.cached or one.lanes == model.head_dim or ring:
        return left
    return _transposed_stack(one, left, values, slots)


def _reusing_mask_buffers(left: list[Array]) -> list[Array]:
    """Drops the exponentials if they fit the buffers of the masks, which are dead once added to the scores."""
    room = size_of([each for each in left if each.name.startswith("masks")])
    return [each for each in left if each.name != _EXPONENTIALS or each.size > room]


def _transposed_stack(one: Prefill, left: list[Array], values: Array, slots: int) -> list[Array]:
    """Returns the largest live set in HBM when XLA first transposes the stack of values.

    Values are computed from the transposed stack and placed after it. Later arrays reuse the stack's buffer, or are
    placed after the values.
    """
    stack = (max(one.model.repeats, 1), one.batch, one.model.kv_heads, slots, one.lanes)
    whole = array("stack of values, transposed", stack, formats.cache_itemsize(one.cache_dtype)[0])
    transposed, later = one.in_hbm([whole]), [each for each in left if each != values]
    if not transposed:
        return left
    if values not in left:
        return max(transposed, later, key=size_of)
    if size_of(later) <= whole.size:
        return [whole, values]
    # Scores are the largest of the later arrays; masks reuse the stack's buffer.
    return [whole, values, later[0], *(each for each in later[1:] if each.size > whole.size)]


def _stores_exponentials(one: Prefill, slots: int) -> bool:
    """Returns True if the scores of a layer and their exponentials are two arrays.

    For short chunks, a single KV head, or 3,072 slots, XLA uses two in some programs and one in others that hardly
    differ. The bill has two.
    """
    if one.wide_values or slots >= _IN_PARTS:
        return False
    if slots > _TWICE or one.model.kv_heads == 1:
        return True
    return one.tokens <= _FEW_TOKENS and (slots > _FEW_SLOTS or one.group == 1)
