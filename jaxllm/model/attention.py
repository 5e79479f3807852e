"""Attention sub-layer: projections, rotary positions, and attention within the sequence or over a KV cache."""

import dataclasses
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.config.attention import Attention
from jaxllm.kernels import reference
from jaxllm.kernels.cudnn import cudnn_attention
from jaxllm.kernels.flash.api import flash_attention
from jaxllm.model.layer_cache import LayerCache
from jaxllm.model.layers import align, norm, norm_over_heads, rotate
from jaxllm.model.linear import project
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """Positions, segments and attention settings of one forward pass, shared by all layers.

    Attributes:
      positions: Position of each token in its own sequence.
      segments: Segment ids; tokens attend only within their segment. None if each row is one sequence.
      valid: False for padding tokens, which are never written to a cache. None if there is no padding.
      angles: Rotary (cos, sin) of each layer kind with rotary positions; empty for learned positions.
      attention: Attention implementation, used if there is no cache.
      chunk: Number of queries whose scores are materialized at once by the `xla` implementation; 0 means all.
    """

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None
    valid: Bool[Array, "B T"] | None
    angles: dict[str, tuple[Array, Array]]
    attention: Attention
    chunk: int


def _project(x: Array, params: dict[str, Any], name: str, model: Architecture) -> Array:
    y = project(x, params, name)
    if model.qkv_bias:
        y = y + align(params[f"{name}_bias"], y)
    return y


def _queries_keys_values(
    x: Float[Array, "B T D"], params: dict[str, Any], model: Architecture
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Projects x to queries, keys and values, by three weights or by one fused weight per group of heads.

    The fused weight "qkv" has outputs [K, N/K + 2, H]: the query heads of each key/value head, its key, its value.
    """
    if "qkv" not in params:
        return _project(x, params, "q", model), _project(x, params, "k", model), _project(x, params, "v", model)
    y = _project(x, params, "qkv", model)
    return y[:, :, :, :-2].reshape(*x.shape[:2], -1, y.shape[-1]), y[:, :, :, -2], y[:, :, :, -1]


def _qk_norm(x: Array, params: dict[str, Any], model: Architecture, collectives: Collectives) -> Array:
    kind = "rmsnorm" if model.norm == "layernorm" else model.norm
    if model.qk_norm_over == "projection":
        return norm_over_heads(x, params, kind, model.norm_eps, collectives)
    return norm(x, params, kind, model.norm_eps)


def attention(
    x: Float[Array, "B T D"],
    params: dict[str, Any],
    model: Architecture,
    kind: str,
    inputs: AttentionInputs,
    cache: LayerCache | None = None,
    collectives: Collectives = SINGLE_DEVICE,
) -> tuple[Float[Array, "B t D"], LayerCache | None]:
    """Computes self-attention of one layer, over the given tokens and, if there is a cache, the cached ones.

    Args:
      x: All tokens of the sequences, already all-gathered over `tensor`.
      params: The layer's attention weights; this device's shard of the heads.
      model: Architecture of the model.
      kind: Layer kind: full | sliding | nope.
      inputs: Positions, segments and attention settings.
      cache: The layer's KV cache, or None.
      collectives: Collectives for the mesh sizes.

    Returns:
      (this device's tokens of the output, the cache including the new tokens or None if no cache was given).
    """
    q, k, v = _queries_keys_values(x, params, model)
    if model.qk_norm:
        q, k = (_qk_norm(x, params[f"{name}_norm"], model, collectives) for name, x in (("q", q), ("k", k)))
    if kind in inputs.angles:
        q, k = rotate(q, inputs.angles[kind]), rotate(k, inputs.angles[kind])
    q, k, v = (checkpoint_name(y, "attn_qkv") for y in (q, k, v))
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)

    window = model.window if kind == "sliding" else 0
    scale, softcap = model.attention_scale, model.attention_softcap
    if cache is not None:
        y, cache = cache.attend(q, k, v, inputs.positions, inputs.valid, window=window, scale=scale, softcap=softcap)
    else:
        y = _attend_without_cache(q, k, v, inputs, window, scale, softcap)
    y = collectives.reduce_scatter_tokens(project(y, params, "out", fan_in=2))
    if model.out_bias:
        y = y + align(params["out_bias"], y)
    return checkpoint_name(y, "attn_out"), cache


def _attend_without_cache(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    inputs: AttentionInputs,
    window: int,
    scale: float,
    softcap: float,
) -> Float[Array, "B T N H"]:
    """Computes causal attention within segments by the chosen implementation; the output is tagged `attn_context`."""
    choice = inputs.attention
    if choice.implementation == "pallas":
        # Positions increase by one per token of a segment, so the kernel can mask by index in the row. It tags its
        # outputs itself, so that a remat policy saves exactly what its backward pass reads.
        return flash_attention(
            *(q, k, v, inputs.segments, inputs.segments),
            causal=True,
            window=window,
            scale=scale,
            softcap=softcap,
            platform=choice.platform,
            interpret=choice.interpret,
        )
    mask_inputs = (inputs.positions, inputs.positions, inputs.segments, inputs.segments)
    if choice.implementation == "cudnn":
        assert not softcap, "config.attention rejects it"
        y = cudnn_attention(q, k, v, inputs.segments, window=window, scale=scale)
    elif inputs.chunk:
        y = reference.chunked_attention(
            q, k, v, *mask_inputs, window=window, scale=scale, softcap=softcap, chunk=inputs.chunk
        )
    else:
        y = reference.attention(q, k, v, reference.attention_mask(*mask_inputs, window), scale=scale, softcap=softcap)
    return checkpoint_name(y, "attn_context")
