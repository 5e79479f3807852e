"""What prefill holds on a CPU beside weights and cache: XLA's choice, stated as rules.

Attention is plain products. With few rows of scores (new tokens × heads of queries) XLA writes them out, and what the
softmax makes of them; with 4,096 or more it fuses both products and the softmax into a loop that writes neither, and
whose scratch it does not count. It does so from one row to the next, whatever else is large; with a single head of keys
JAX 0.10 never does (0.12 does, and needs less than is billed).

Weights of the layers in one iteration of the loop over layers are cut out of their stacks at its start, and are gone
once they were read. So the largest moment of an iteration is one in its first layer: its start, attention, or the MLP.
The choice of a token comes after the layers.

Read from the buffer assignments of 40 programs at the sizes of published models; JAX 0.10.2 and 0.12 agree but where it
is said. Not for experts, for what computes in 16 bits, for a ring among layers of other kinds, or where one iteration
is all layers: `inference_workspaces` has forms for these that are less near.
"""

import math
from collections.abc import Iterator

from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer.forward_pass import CUT, Array, Pass, size_of
from jaxllm.ledger.rows import PREFILL, Row

_LOOPED = 4096  # rows of scores from which none are written
# Arrays of a number for each word while a token is drawn: logits, noise, sorted ones, their order, masks.
_CHOICE = 9


def covers(one: Pass) -> bool:
    """Whether the rules of this file are for it."""
    model = one.model
    plain = one.platform == "cpu" and one.cached and one.c == FLOAT32 and not model.experts
    loops_over_layers = _layers(one) == 1 or model.repeats > model.unroll
    return plain and loops_over_layers and (len(model.pattern) == 1 or not one.wraps)


def loops(one: Pass) -> bool:
    """Whether scores are made in a loop and not written."""
    return one.model.kv_heads > 1 and one.count * one.model.heads >= _LOOPED


def prefill_rows(one: Pass) -> list[Row]:
    """The rows of the largest moment of prefill, where `covers` says so."""
    moments = [[*_through_the_loop(one), *arrays] for arrays in (_start(one), _attention(one), *_mlp(one))]
    moments.append([_floats("logits and choice of a token", one.batch, one.model.vocab_size, _CHOICE, kind="logits")])
    return [each.row(PREFILL) for each in max(moments, key=size_of)]


def _floats(name: str, *factors: int, kind: str = "") -> Array:
    formula = " × ".join(f"{factor:,}" for factor in factors if factor != 1)
    return Array(name, math.prod(factors) * FLOAT32, f"{formula} × {FLOAT32} B", kind)


def _through_the_loop(one: Pass) -> Iterator[Array]:
    """What is made once for all layers."""
    model = one.model
    masks = len({kind == "sliding" for kind in (*model.pattern, *model.tail)})
    yield _floats("masks, added to scores", masks, one.count, one.keys)
    if _layers(one) > 1:
        # What all scores are multiplied by is written out once for several layers, as large as scores; so is the cap.
        # JAX 0.12 has one such array more where there is a cap.
        yield _floats("constants of scores", 2 if model.attention_softcap else 1, *_shape_of_scores(one))
    if one.wraps:
        yield _floats("rings, copied", one.rings_bytes // FLOAT32)


def _layers(one: Pass) -> int:
    """In one iteration of the loop over layers."""
    model = one.model
    return len(model.pattern) * min(model.unroll, model.repeats) if model.repeats else len(model.tail)


def _of_layer(one: Pass, *names: str) -> int:
    """Bytes of a layer's weights, or of those arrays of it."""
    return one.weight_bytes(*names) // (len(one.model.pattern) if one.model.repeats else len(one.model.tail))


def _weights(size: int) -> Array:
    return _floats(CUT, size // FLOAT32, kind="weights")


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
        # Keys are gone when exponentials are written.
        arrays.append(_floats("scores and exponentials of one layer", 2, *_shape_of_scores(one)))
        arrays.append(_floats("values of one layer", *keys))
    else:
        arrays.append(_floats("scores of one layer", *_shape_of_scores(one)))
        arrays.append(_floats("keys and values of one layer", 2, *keys))
    return arrays


def _mlp(one: Pass) -> Iterator[list[Array]]:
    """Its products one after another; each reads its matrix for the last time."""
    steps = [(1, ("gate", "up", "down")), (2, ("up", "down")), (3, ("down",))]
    if not one.model.gated:
        steps = [(1, ("up", "down")), (2, ("down",))]
    others = (_layers(one) - 1) * _of_layer(one)
    for arrays, matrices in steps:
        weights = _weights(others + _of_layer(one, *matrices))
        hidden = _hidden(one, 1 if matrices == ("down",) else 2)
        yield [weights, hidden, _floats("MLP of one layer", arrays, one.count, one.model.mlp_width)]
