"""FLOPs and bytes by formula, from which rates and utilisation are computed."""

from jaxllm.config import Architecture
from jaxllm.ledger.formula import flops

# The backward pass recomputes the scores and has four more matmuls: 5, compared with 2 in the forward pass.
FORWARD_AND_BACKWARD = 3.5


def attention_flops(batch: int, heads: int, length: int, head_dim: int, backward: bool) -> float:
    """Returns the FLOPs of causal self-attention by the convention of FlashAttention-2 (Dao 2023, section 4.1).

    4·B·N·T²·H / 2 forward, 3.5 times that with the backward pass.
    """
    forward = 4 * batch * heads * length**2 * head_dim / 2
    return forward * FORWARD_AND_BACKWARD if backward else forward


def cache_bytes(batch: int, kv_heads: int, length: int, head_dim: int, itemsize: int) -> int:
    """Returns KV-cache bytes read per layer by one token of each row; int8 adds a float32 scale per vector."""
    scale = 4 if itemsize == 1 else 0
    return 2 * batch * kv_heads * length * (head_dim * itemsize + scale)


def decode_bytes(model: Architecture, batch: int, length: int) -> int:
    """Returns the bytes of weights and cache, both bfloat16, read by one token of each row."""
    return flops.decode_token(model, batch, length, "bf16", "bf16").bytes


def utilisation(model: Architecture, length: int, tokens_per_second: float, peak: float) -> float:
    """Returns MFU: model FLOP/s divided by a peak (FLOP/s); see `jaxllm.ledger.formula.flops`."""
    return flops.model_flops_per_token(model, length) * tokens_per_second / peak
