"""The attention sub-layer: projections, positions, and keys and values from the sequence or from a cache."""

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
from jaxllm.model.layers import align, norm, norm_over_heads, project, rotate
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives


@dataclasses.dataclass(frozen=True)
class Span:
    """Where the tokens of one forward pass stand.

    Attributes:
      positions: of each token in its own sequence.
      segments: tokens attend within one segment only; None where a row is one sequence.
      valid: False for padding, which is never written to a cache; None where every token is real.
      angles: rotary (cos, sin) of each layer kind that is rotated; empty for learned positions.
      attention: what computes it where there is no cache.
      chunk: of xla: queries whose scores exist at one time; 0 is all of them.
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
    span: Span,
    cache: LayerCache | None = None,
    collectives: Collectives = SINGLE_DEVICE,
) -> tuple[Float[Array, "B t D"], LayerCache | None]:
    """Self-attention of one layer, over the tokens given or over those and a cache's.

    Args:
      x: all tokens of the sequences.
    Returns:
      (output, the cache with these tokens written; None where none was given).
    """
    q, k, v = (_project(x, params, name, model) for name in "qkv")
    if model.qk_norm:
        q, k = (_qk_norm(x, params[f"{name}_norm"], model, collectives) for name, x in (("q", q), ("k", k)))
    if kind in span.angles:
        q, k = rotate(q, span.angles[kind]), rotate(k, span.angles[kind])
    q, k, v = (checkpoint_name(y, "attn_qkv") for y in (q, k, v))
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)

    window = model.window if kind == "sliding" else 0
    scale, softcap = model.attention_scale, model.attention_softcap
    if cache is not None:
        y, cache = cache.attend(q, k, v, span.positions, span.valid, window=window, scale=scale, softcap=softcap)
    else:
        y = _among_themselves(q, k, v, span, window, scale, softcap)
    y = collectives.reduce_scatter_tokens(project(y, params, "out", fan_in=2))
    if model.out_bias:
        y = y + align(params["out_bias"], y)
    return checkpoint_name(y, "attn_out"), cache


def _among_themselves(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    span: Span,
    window: int,
    scale: float,
    softcap: float,
) -> Float[Array, "B T N H"]:
    """Each token over those before it in its segment, by the implementation that was chosen; named `attn_context`."""
    chosen = span.attention
    if chosen.implementation == "pallas":
        # Positions grow by one from token to token of a segment, so that places in the row tell as much. The kernel
        # names what it gives itself: what its backward pass reads is what a policy keeps.
        return flash_attention(
            *(q, k, v, span.segments, span.segments),
            causal=True,
            window=window,
            scale=scale,
            softcap=softcap,
            platform=chosen.platform,
            interpret=chosen.interpret,
        )
    places = (span.positions, span.positions, span.segments, span.segments)
    if chosen.implementation == "cudnn":
        assert not softcap, "attention_choice refuses it"
        y = cudnn_attention(q, k, v, span.segments, window=window, scale=scale)
    elif span.chunk:
        y = reference.chunked_attention(q, k, v, *places, window=window, scale=scale, softcap=softcap, chunk=span.chunk)
    else:
        y = reference.attention(q, k, v, reference.attention_mask(*places, window), scale=scale, softcap=softcap)
    return checkpoint_name(y, "attn_context")
