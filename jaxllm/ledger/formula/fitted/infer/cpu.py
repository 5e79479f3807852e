"""Memory rules for prefill on XLA's CPU backend, beside weights and cache.

Attention is plain matmuls. With fewer than 4,096 rows of scores (new tokens × query heads) XLA materializes the scores
and the softmax output. From 4,096 rows on it fuses both matmuls and the softmax into a loop that materializes neither,
and whose scratch it does not count. The threshold is sharp and depends on nothing else, except that with a single KV
head JAX 0.10 never fuses (0.12 does, and needs less than is billed).

The weights of one iteration of the loop over layers are sliced from their stacks at its start and freed after their
last read. The largest live set of an iteration is therefore in its first layer: at its start, attention, or the MLP.
A token is sampled after the layers.

The rules come from the buffer assignments of 40 programs at the sizes of published models. JAX 0.10.2 and 0.12 agree
except where noted. They do not cover experts, 16-bit compute dtypes, a ring buffer among layers of other kinds, or one
iteration that covers all layers: `workspaces` has less accurate rules for these.
"""

import math
from collections.abc import Iterator

from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer.forward_pass import SLICED_WEIGHTS, Array, Pass, size_of
from jaxllm.ledger.rows import PREFILL, Row

_LOOPED = 4096  # rows of scores from which on scores are not materialized
# Arrays of one element per vocabulary entry while a token is sampled: logits, noise, sorted logits, order, masks.
_CHOICE = 9


def covers(one: Pass) -> bool:
    """Returns True if the rules of this file apply to the pass."""
    model = one.model
    plain = one.platform == "cpu" and one.cached and one.c == FLOAT32 and not model.experts
    loops_over_layers = _layers(one) == 1 or model.repeats > model.unroll
    return plain and loops_over_layers and (len(model.pattern) == 1 or not one.wraps)


def loops(one: Pass) -> bool:
    """Returns True if XLA computes scores in a fused loop and does not materialize them."""
    return one.model.kv_heads > 1 and one.count * one.model.heads >= _LOOPED


def prefill_rows(one: Pass) -> list[Row]:
    """Returns the rows of the largest live set of prefill. Requires `covers(one)`."""
    moments = [[*_loop_carry(one), *arrays] for arrays in (_start(one), _attention(one), *_mlp(one))]
    moments.append([_floats("logits and sampling", one.batch, one.model.vocab_size, _CHOICE, kind="logits")])
    return [each.row(PREFILL) for each in max(moments, key=size_of)]


def _floats(name: str, *factors: int, kind: str = "") -> Array:
    formula = " × ".join(f"{factor:,}" for factor in factors if factor != 1)
    return Array(name, math.prod(factors) * FLOAT32, f"{formula} × {FLOAT32} B", kind)


def _loop_carry(one: Pass) -> Iterator[Array]:
    """Yields the arrays computed once for all layers."""
    model = one.model
    masks = len({kind == "sliding" for kind in (*model.pattern, *model.tail)})
    yield _floats("masks, added to scores", masks, one.count, one.keys)
    if _layers(one) > 1:
        # With several layers per iteration, the scale of the scores is materialized once in their shape; so is the
        # softcap, if there is one. JAX 0.12 then has one more such array.
        yield _floats("constants of scores", 2 if model.attention_softcap else 1, *_shape_of_scores(one))
    if one.wraps:
        yield _floats("rings, copied", one.rings_bytes // FLOAT32)


def _layers(one: Pass) -> int:
    """Returns the number of layers in one iteration of the loop over layers."""
    model = one.model
    return len(model.pattern) * min(model.unroll, model.repeats) if model.repeats else len(model.tail)


def _of_layer(one: Pass, *names: str) -> int:
    """Returns the bytes of one layer: all its weights, or the named arrays."""
    return one.weight_bytes(*names) // (len(one.model.pattern) if one.model.repeats else len(one.model.tail))


def _weights(size: int) -> Array:
    return _floats(SLICED_WEIGHTS, size // FLOAT32, kind="weights")


def _hidden(one: Pass, copies: int) -> Array:
    return _floats("hidden states", copies, one.count, one.model.width)


def _shape_of_scores(one: Pass) -> tuple[int, int, int]:
    return one.count, one.model.heads, one.keys


def _start(one: Pass) -> list[Array]:
    queries = _floats("queries", one.count, one.model.heads, one.model.head_dim)
    return [_weights(_layers(one) * _of_layer(one)), _hidden(one, 2), queries]


def _attention(one: Pass) -> list[Array]:
    model = one.model
    keys = one.batch, model.kv_heads, one.keys, model.head_dim
    arrays = [_weights(_layers(one) * _of_layer(one) - _of_layer(one, "q", "k", "v")), _hidden(one, 1)]
    if loops(one):
        arrays.append(_floats("queries and attention's output", 2, one.count, model.heads, model.head_dim))
        arrays.append(_floats("keys and values of one layer", 2, *keys))
    elif one.scores > one.keys_bytes:
        # Keys are freed before the exponentials are written.
        arrays.append(_floats("scores and exponentials of one layer", 2, *_shape_of_scores(one)))
        arrays.append(_floats("values of one layer", *keys))
    else:
        arrays.append(_floats("scores of one layer", *_shape_of_scores(one)))
        arrays.append(_floats("keys and values of one layer", 2, *keys))
    return arrays


def _mlp(one: Pass) -> Iterator[list[Array]]:
    """Yields the live set of each MLP matmul in order; each matmul frees its weight matrix."""
    steps = [(1, ("gate", "up", "down")), (2, ("up", "down")), (3, ("down",))]
    if not one.model.gated:
        steps = [(1, ("up", "down")), (2, ("down",))]
    others = (_layers(one) - 1) * _of_layer(one)
    for arrays, matrices in steps:
        weights = _weights(others + _of_layer(one, *matrices))
        hidden = _hidden(one, 1 if matrices == ("down",) else 2)
        yield [weights, hidden, _floats("MLP of one layer", arrays, one.count, one.model.mlp_width)]
