"""The forward pass: tokens in, hidden states out; with or without a cache."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.config.attention import PLAIN, Attention
from jaxllm.config.remat import RematPolicy
from jaxllm.model import layers, stack
from jaxllm.model.attention import LayerCache, Span
from jaxllm.model.block import block
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives

Params = dict[str, Any]
# Every product's result waits for the backward pass.
NOTHING = RematPolicy("none")


def embed(
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    params: Params,
    model: Architecture,
    collectives: Collectives = SINGLE_DEVICE,
) -> Float[Array, "B t D"]:
    """Token embeddings, scaled, plus learned positions where the model has them.

    Args:
      params: {"tokens": [V, D], ["positions": [P, D]]}, of the tokens this device's part of the vocabulary.
    """
    table = params["tokens"]
    if collectives.tensor > 1:
        local = tokens - collectives.first(table.shape[0])
        here = (local >= 0) & (local < table.shape[0])
        # A product, of which the gradient needs one number a token; of a choice it would need whole rows.
        x = collectives.reduce_scatter_tokens(table[jnp.where(here, local, 0)] * here[..., None].astype(table.dtype))
    else:
        x = table[tokens]
    x = x * jnp.asarray(model.embedding_scale, x.dtype)
    if model.positions == "learned":
        x = x + params["positions"][collectives.own_tokens(positions)]
    return x


def unembedding(params: Params, collectives: Collectives = SINGLE_DEVICE) -> Float[Array, "V D"]:
    """The matrix that makes logits: the head, or the embeddings where they are tied; this device's part of it."""
    if "head" in params:
        return collectives.weights(params["head"], "head")
    return collectives.weights(params["embed"], "embed")["tokens"]


def logits(hidden: Float[Array, "*batch D"], params: Params, model: Architecture) -> Float[Array, "*batch V"]:
    """Float32 logits, capped where the model caps them."""
    out = jnp.einsum("...d,vd->...v", hidden, unembedding(params), preferred_element_type=jnp.float32)
    return softcap(out, model.logit_softcap)


def softcap(x: Array, cap: float) -> Array:
    """cap·tanh(x / cap); 0 is no cap."""
    return cap * jnp.tanh(x / cap) if cap else x


def _angles(
    positions: Int[Array, "B T"], segments: Int[Array, "B T"] | None, model: Architecture, capacity: int
) -> dict[str, tuple[Array, Array]]:
    """Rotary (cos, sin) of each layer kind that is rotated.

    Under longrope a sequence longer than the original context has other frequencies, from its first token on. How long
    it is, its tokens tell; but keys go to a cache before the rest of the sequence is known, so that there the cache's
    capacity decides: a sequence that may become long is taken as long.

    Args:
      capacity: of the cache; 0 where there is none.
    """
    if model.positions != "rotary":
        return {}
    long: Array | bool = capacity > model.rope_original_context
    if model.rope_scaling == "longrope" and not capacity:
        long = layers.last_positions(positions, segments) >= model.rope_original_context
    kinds = dict.fromkeys(kind for kind in model.pattern if kind != "nope")
    return {kind: layers.rope_angles(positions, model, kind, long) for kind in kinds}


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    model: Architecture,
    *,
    segments: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    remat: RematPolicy = NOTHING,
    attention: Attention = PLAIN,
    attention_chunk: int = 0,
    collectives: Collectives = SINGLE_DEVICE,
    cache: Params | None = None,
    lengths: Int[Array, " B"] | None = None,
    capacity: int = 0,
) -> tuple[Float[Array, "B t D"], Params | None, Float[Array, ""]]:
    """The hidden states that `logits` or the loss turn into predictions.

    Args:
      params: the tree of `specs.param_specs`; its dtype is the compute dtype.
      segments: packed sequences: tokens attend within their segment; 0 is padding.
      valid: with a cache: False for padding tokens.
      remat: what blocks keep for the backward pass.
      attention: what computes it, where there is no cache.
      attention_chunk: of xla: queries whose scores exist at one time, where there is no cache; 0 is all of them.
      partition: the devices that the model is spread over.
      cache: the tree of `specs.cache_specs`, holding `lengths` tokens a row of at most `capacity`.
    Returns:
      (hidden states of this device's tokens, the cache with the tokens written, weighted load-balancing loss:
      mean over layers).
    """
    angles = _angles(positions, segments, model, capacity if cache is not None else 0)
    span = Span(positions, segments, valid, angles, attention, attention_chunk)
    real = jnp.ones(tokens.shape, bool)
    if segments is not None:
        real = segments > 0
    elif valid is not None:
        real = valid

    def run(x: Array, layer: Params, kind: str, cached: LayerCache | None) -> tuple[Array, LayerCache | None, Array]:
        return block(x, layer, model, kind, span, real, cached, collectives)

    x = embed(tokens, positions, collectives.weights(params["embed"], "embed"), model, collectives)
    aux_loss, new_cache = jnp.zeros((), jnp.float32), None
    if cache is None:
        x, aux_loss = stack.without_cache(x, params, run, model, remat, collectives)
    else:
        assert lengths is not None, "a cache comes with the lengths of its rows"
        x, new_cache = stack.with_cache(x, params, run, model, cache, lengths, capacity)
    hidden = layers.norm(x, collectives.weights(params["final_norm"], "final_norm"), model.norm, model.norm_eps)
    return hidden, new_cache, model.router_aux_weight * aux_loss / model.layers
