"""Memory rules for prefill and decode on GPUs, beside weights and cache.

Every layer has weights of its own, which matmuls read in place (`decode.weights`), and decode attention is a kernel
that reads the cache in place. So the temporaries are those of one layer or of token sampling, whichever is larger.

The rules come from the buffer assignments of JAX 0.10.2 for an H100, at the sizes of published models
(`experiments/inference_cells.py`). Not checked against any program: decoding without a cache.
"""

from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer.forward_pass import Array, Pass, experts_elements, size_of
from jaxllm.ledger.rows import Row

# Bits per sequence and vocabulary entry while a token is sampled: sorted logits, order, noise, masks.
_SAMPLING_BITS = 228
_MASK = 1  # byte per query–key pair


def workspace_rows(one: Pass, phase: str, scaled_cache: bool) -> list[Row]:
    """Returns the row of the largest of attention, MLP and token sampling.

    Args:
      one: the forward pass.
      phase: PREFILL or DECODE.
      scaled_cache: True if the cache is int8; prefill converts one layer's keys, then its values.
    """
    model = one.model
    size = one.batch * model.vocab_size * _SAMPLING_BITS // 8
    formula = f"{one.batch} × {model.vocab_size:,} × {_SAMPLING_BITS} bits"
    arrays = [_attention(one, scaled_cache), _mlp(one), Array("logits and sampling", size, formula, "logits")]
    return [max(arrays, key=lambda each: size_of([each])).row(phase)]


def _attention(one: Pass, scaled_cache: bool) -> Array:
    if one.cached and one.tokens == 1:
        return Array("one layer's attention", 0, "0 B")  # the kernel's partial results of a few splits are negligible
    # Scores in float32, probabilities in the compute dtype, the mask, and two hidden states.
    scores = one.count * one.model.heads * one.keys
    rest = one.count * one.keys * _MASK + 2 * one.hidden + (one.keys_bytes if scaled_cache else 0)
    size = scores * (FLOAT32 + one.c) + rest
    formula = f"{scores:,} × {FLOAT32 + one.c} B + {rest:,} B"
    return Array("one layer's attention", size, formula)


def _mlp(one: Pass) -> Array:
    model = one.model
    elements = experts_elements(one) if model.experts else (3 if model.gated else 2) * one.count * model.mlp_width
    size = elements * one.c + 2 * one.hidden
    return Array("one layer's MLP", size, f"{elements:,} × {one.c} B + {size - elements * one.c:,} B")
