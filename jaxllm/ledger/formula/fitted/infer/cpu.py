"""Memory rules for prefill and decode on XLA's CPU backend, beside weights and cache.

Every layer has weights of its own, which matmuls read in place (`decode.weights`), so the temporaries are those of one
layer, of token sampling, and of arrays that XLA computes once for all layers: the mask and the scale of the scores,
each in the shape of the scores.

With fewer than 4,096 rows of scores (new tokens × query heads) XLA materializes the scores and the softmax output. From
4,096 rows on it fuses both matmuls and the softmax into a loop that materializes neither, and whose scratch it does not
count. The threshold is sharp and depends on nothing else, except that with a single KV head JAX 0.10 never fuses (0.12
does, and needs less than is billed).

The rules come from the buffer assignments of some 60 programs of small models and of published ones cut to a few
layers. JAX 0.10.2 and 0.12 agree except where noted, and except that with a soft cap JAX 0.12 has one more constant in
the shape of the scores. Least accurate: 16-bit weights, which no command uses on a CPU.
"""

import math
from collections.abc import Iterator

from jaxllm.config import experts as experts_choice
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer.forward_pass import Array, Pass, experts_elements, matrix_elements, size_of
from jaxllm.ledger.rows import DECODE, PREFILL, Row
from jaxllm.model.specs import cache_specs, leaves

_LOOPED = 4096  # rows of scores from which on scores are not materialized
# Bytes per sequence and vocabulary entry while a token is sampled: logits, noise, sorted logits, order, masks; the
# decode loop has a few more.
_SAMPLING = {PREFILL: 36.25, DECODE: 37.25}


def loops(one: Pass) -> bool:
    """Returns True if XLA computes scores in a fused loop and does not materialize them."""
    return (one.model.kv_heads > 1 or not one.cached) and one.count * one.model.heads >= _LOOPED


def workspace_rows(one: Pass, phase: str) -> list[Row]:
    """Returns the rows of the largest live set of a phase.

    Args:
      one: the forward pass.
      phase: PREFILL or DECODE. Decoding without a cache has the arrays of a prefill of all tokens.
    """
    size = int(one.batch * one.model.vocab_size * _SAMPLING[phase])
    formula = f"{one.batch} × {one.model.vocab_size:,} × {_SAMPLING[phase]} B"
    sampling = Array("logits and sampling", size, formula, "logits")
    converted = list(_converted_to_float32(one, phase))
    constants = list(_constants(one))
    live_sets = [[*constants, *arrays] for arrays in (_attention(one), _mlp(one))]
    live_sets.append([*constants, sampling] if one.tokens > 1 and not one.cached else [sampling])
    return [each.row(phase) for each in [*converted, *max(live_sets, key=size_of)]]


def _floats(name: str, *factors: int, kind: str = "") -> Array:
    formula = " × ".join(f"{factor:,}" for factor in factors if factor != 1)
    return Array(name, math.prod(factors) * FLOAT32, f"{formula} × {FLOAT32} B", kind)


def _constants(one: Pass) -> Iterator[Array]:
    """Yields the arrays computed once for all layers.

    With a single KV head, the scale is not materialized in prefill. Without a cache, the mask is not materialized in
    the shape of the scores, but for all heads together.
    """
    model = one.model
    copies = 1 + (one.cached and (model.kv_heads > 1 or one.tokens == 1)) + (model.attention_softcap > 0)
    yield _floats("mask and scale of scores", copies, one.count, model.heads, sum(one.key_counts))
    if not one.cached:
        masks = len({kind == "sliding" for kind in (*model.pattern, *model.tail)})
        yield _floats("masks, added to scores", masks, one.count, one.keys)


def _hidden(one: Pass, copies: int) -> Array:
    return _floats("hidden states", copies, one.count, one.model.width)


def _attention(one: Pass) -> list[Array]:
    model = one.model
    if loops(one):
        arrays = [_floats("queries and attention's output", 2, one.count, model.heads, model.head_dim)]
        return [*arrays, _floats("mask, added to scores", one.count, one.keys)] if one.cached else arrays
    scores = _floats("scores and exponentials of one layer", 2, one.count, model.heads, one.keys)
    return [scores, _hidden(one, 2)]


def _mlp(one: Pass) -> list[Array]:
    model = one.model
    if model.experts:
        arrays = [_floats("experts of one layer", experts_elements(one)), _hidden(one, 2)]
        if experts_choice.method(one.count, model.experts_per_token, model.experts) == experts_choice.CHOSEN:
            # XLA's CPU backend does not fuse the gather of the chosen experts' matrices into the reduction.
            matrices = one.count * model.experts_per_token * (3 if model.gated else 2)
            arrays.append(_floats("matrices of chosen experts", matrices, model.width, model.mlp_width, kind="weights"))
        return arrays
    copies = 3 if model.gated else 2
    if not one.cached and one.count * model.mlp_width * FLOAT32 >= one.scores:
        copies += 1 if model.gated else 4  # seen in two programs, not explained
    hidden = 3 if loops(one) else 1
    return [_floats("MLP of one layer", copies, one.count, model.mlp_width), _hidden(one, hidden if one.cached else 2)]


def _converted_to_float32(one: Pass, phase: str) -> Iterator[Array]:
    """Yields the copies of 16-bit arrays, which XLA converts before the layers: a CPU has no 16-bit matmuls."""
    if one.c == FLOAT32:
        return
    head = phase == DECODE  # prefill converts the head after the layers
    yield _floats("weights in float32", matrix_elements(one.model, head), kind="weights")
    if one.cached:
        elements = sum(spec.size for spec in leaves(cache_specs(one.model, one.batch, one.capacity)))
        if phase == PREFILL:  # all layers but one
            elements -= elements // one.model.layers
        yield _floats("cache in float32", elements)
