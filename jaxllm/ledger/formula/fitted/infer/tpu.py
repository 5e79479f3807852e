"""Memory rules for prefill and decode in a TPU's HBM, beside weights and cache.

The rules come from the buffer assignments of programs for a v5e, v5p and v6e (libtpu of JAX 0.10.2). Layers run one
after another, so only the largest of attention, MLP, the copy of a table and token sampling counts. Not checked against
any program: experts, of which all arrays are counted, and a forward pass without a cache.
"""

import dataclasses
from collections.abc import Iterator

from jaxllm.config import Architecture
from jaxllm.ledger.formula.exact import formats, tpu_tiles
from jaxllm.ledger.formula.exact.block_graph import rows_of_experts
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer.forward_pass import Array, Pass, size_of
from jaxllm.ledger.formula.fitted.infer.tpu_attention import attention
from jaxllm.ledger.formula.fitted.infer.tpu_pass import Prefill, array, cache_arrays
from jaxllm.ledger.rows import DECODE, PERSISTENT, PREFILL, Row
from jaxllm.model.specs import leaves, param_specs

_BFLOAT16 = 2
# Arrays of logits while a token is sampled, as in decoding.
_CHOICE = 8


def state_padding(model: Architecture, batch: int, capacity: int, weight_dtype: str, cache_dtype: str) -> Row:
    """Returns the row of tile padding of weights and cache, for programs that compute with weights as stored.

    Args:
      capacity: cache slots per sequence.
      weight_dtype: format of the weights.
      cache_dtype: format of the cache; "" if there is none.
    """
    itemsize = formats.compute_itemsize(weight_dtype, "tpu")
    arrays = [(spec.shape, itemsize) for spec in leaves(param_specs(model))]
    arrays += cache_arrays(model, batch, capacity, cache_dtype) if cache_dtype else []
    size = sum(tpu_tiles.padding(*array) for array in [*arrays, ((batch, model.vocab_size), 1)])
    return Row("tile padding", tpu_tiles.PADDING, PERSISTENT, size, f"{size:,} B, in {len(arrays) + 1} arrays")


def prefill_rows(
    model: Architecture,
    batch: int,
    capacity: int,
    tokens: int,
    weight_dtype: str,
    cache_dtype: str,
    vector_memory: int,
    phase: str = PREFILL,
    cached: bool = True,
) -> list[Row]:
    """Returns the rows of prefill, or of a forward pass without a cache.

    Args:
      tokens: new tokens per sequence.
      weight_dtype, cache_dtype: formats, as in `inference_memory.inference`.
      vector_memory: bytes of vector memory available to a program's arrays; `hardware.spec.Device.vector_memory`.
      phase: phase of the rows.
      cached: True with a KV cache.
    """
    c = formats.compute_itemsize(weight_dtype, "tpu")
    one = Prefill(model, batch, capacity, tokens, c, cache_dtype, cached, vector_memory)
    moments = [attention(one, kind) for kind in dict.fromkeys((*model.pattern, *model.tail))]
    moments += [_mlp(one), _table(one), _choice(one)]
    made = [*_live_in_all_layers(one), *max(moments, key=size_of)]
    return [each.row(phase) for each in made]


def decode_rows(one: Pass) -> list[Row]:
    """Returns the row of one layer's MLP or of token sampling; attention is a kernel without temporaries."""
    model = one.model
    if model.experts:
        mlp = _experts_bytes(model, one.count, one.c) + 4 * one.hidden
    else:
        mlp = (3 if model.gated else 2) * one.count * model.mlp_width * one.c + 2 * one.hidden
    sampling = one.batch * model.vocab_size * (_CHOICE * FLOAT32 + 1)
    formula = f"{one.batch} × {model.vocab_size:,} × {_CHOICE * FLOAT32 + 1} B"
    arrays = [Array("one layer's MLP", mlp, f"{mlp:,} B"), Array("logits and sampling", sampling, formula, "logits")]
    return [max(arrays, key=lambda each: each.size).row(DECODE)]


def _live_in_all_layers(one: Prefill) -> Iterator[Array]:
    """Yields the arrays computed before the loop over layers and alive throughout it."""
    if one.c == FLOAT32:
        # Matmuls read bfloat16 under float32 too.
        specs = param_specs(one.model)
        elements = sum(spec.size for spec in leaves([specs["layers"], specs["tail"]]) if spec.role == "matrix")
        formula = f"{elements:,} × {_BFLOAT16} B"
        yield Array("weights in bfloat16", elements * _BFLOAT16, formula, "weights")
    if one.scales:
        yield Array("scales, with heads in whole tiles", 2 * one.scales, f"2 × {one.scales:,} B")


def _mlp(one: Prefill) -> list[Array]:
    model = one.model
    hidden = array("hidden states", (one.count, model.width), one.c)
    if model.experts:
        size = _experts_bytes(model, one.count, one.c) + 4 * hidden.size
        return [Array("experts of one layer", size, f"{size:,} B")]
    names = ("gate of one MLP", "up of one MLP") if model.gated else ("up of one MLP",)
    inner = [array(name, (one.count, model.mlp_width), one.c) for name in names]
    return one.in_hbm([*inner, hidden, dataclasses.replace(hidden, name="hidden states, normed")])


def _experts_bytes(model: Architecture, tokens: int, c: int) -> int:
    """Returns the bytes of all arrays of one layer's experts, whose blocks are those of training."""
    return (
        rows_of_experts(tokens * model.experts_per_token, model.experts) * (2 * model.width + 3 * model.mlp_width) * c
    )


def _table(one: Prefill) -> list[Array]:
    """Returns the row-major table that the logits matmul reads; rows that do not fill lanes are stored by columns."""
    return one.in_hbm([one.table], one.beside_cache) if one.model.width % tpu_tiles.LANES else []


def _choice(one: Prefill) -> list[Array]:
    logits = array("logits and sampling", (one.batch, one.model.vocab_size), FLOAT32, "logits")
    left = len(one.in_hbm([logits] * _CHOICE, one.beside_cache))
    return [dataclasses.replace(logits, size=left * logits.size, formula=f"{left} × {logits.formula}")] if left else []
