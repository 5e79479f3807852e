"""Memory of prefill and decode on each platform, beside weights and cache; the rules are in `cpu`, `gpu` and `tpu`.

Quantized weights are checked against programs of a CPU.
"""

from jaxllm.config import Architecture
from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.formula.fitted.infer import cpu, gpu, tpu
from jaxllm.ledger.formula.fitted.infer.forward_pass import Pass, largest_matrix
from jaxllm.ledger.rows import PREFILL, Row
from jaxllm.quantize.formats import FEW_ROWS


def workspace_rows(
    model: Architecture,
    batch: int,
    capacity: int,
    tokens: int,
    weight_dtype: str,
    platform: str,
    phase: str,
    cached: bool = True,
    cache_dtype: str = "",
    vector_memory: int = 0,
) -> list[Row]:
    """Returns the workspace rows of a phase.

    Args:
      capacity: cache slots per sequence.
      tokens: new tokens per sequence.
      weight_dtype: format of the weights.
      platform: cpu | gpu | tpu.
      phase: PREFILL or DECODE.
      cached: True with a KV cache.
      cache_dtype: format of the cache, for prefill on a TPU; "" is the format of the weights.
      vector_memory: bytes of vector memory available to a program's arrays, for prefill on a TPU.
    """
    one = Pass(model, batch, capacity, tokens, formats.compute_itemsize(weight_dtype, platform), cached)
    if platform == "cpu":
        made = cpu.workspace_rows(one, phase)
    elif platform == "gpu":
        made = gpu.workspace_rows(one, phase, bool(cache_dtype) and formats.cache_itemsize(cache_dtype)[1] > 0)
    elif phase == PREFILL or not cached:
        # Without a cache, decoding a token takes the memory of a prefill of all tokens.
        cache_dtype = cache_dtype or weight_dtype
        made = tpu.prefill_rows(model, batch, capacity, tokens, weight_dtype, cache_dtype, vector_memory, phase, cached)
    else:
        made = tpu.decode_rows(one)
    if formats.by_name(weight_dtype).scaled and one.count > FEW_ROWS:
        # A few rows read the codes; for more, one matrix at a time is dequantized.
        size = largest_matrix(model) * one.c
        made.append(Row("largest matrix, dequantized", "weights", phase, size, f"{size // one.c:,} × {one.c} B"))
    return made
