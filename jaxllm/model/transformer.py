"""Forward pass of the model from tokens to hidden states, with or without a KV cache, and the output head."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.config.attention import PLAIN, Attention
from jaxllm.config.remat import RematPolicy
from jaxllm.model import layers, stack
from jaxllm.model.attention import AttentionInputs, LayerCache
from jaxllm.model.block import block
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives

Params = dict[str, Any]
SAVE_ALL = RematPolicy("none")


def embed(
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    params: Params,
    model: Architecture,
    collectives: Collectives = SINGLE_DEVICE,
) -> Float[Array, "B t D"]:
    """Computes scaled token embeddings, plus learned position embeddings if the model has them.

    Args:
      tokens: Token ids.
      positions: Position of each token in its sequence.
      params: {"tokens": [V, D], ["positions": [P, D]]}; "tokens" has this device's shard of the vocabulary.
      model: Architecture of the model.
      collectives: Collectives for the mesh sizes.

    Returns:
      Embeddings of this device's tokens.
    """
    table = params["tokens"]
    if collectives.tensor > 1:
        local = tokens - collectives.first(table.shape[0])
        in_shard = (local >= 0) & (local < table.shape[0])
        # Multiply by a mask: its gradient needs one element per token, that of `jnp.where` would need whole rows.
        x = collectives.reduce_scatter_tokens(
            table[jnp.where(in_shard, local, 0)] * in_shard[..., None].astype(table.dtype)
        )
    else:
        x = table[tokens]
    x = x * jnp.asarray(model.embedding_scale, x.dtype)
    if model.positions == "learned":
        x = x + params["positions"][collectives.own_tokens(positions)]
    return x


def unembedding(params: Params, collectives: Collectives = SINGLE_DEVICE) -> Float[Array, "V D"]:
    """Returns this device's shard of the unembedding matrix: the head, or the token embeddings if they are tied."""
    if "head" in params:
        return collectives.weights(params["head"], "head")
    return collectives.weights(params["embed"], "embed")["tokens"]


def logits(
    hidden: Float[Array, "*batch D"], params: Params, model: Architecture, collectives: Collectives = SINGLE_DEVICE
) -> Float[Array, "*batch V"]:
    """Computes float32 logits over the whole vocabulary, soft-capped if the model has a cap."""
    out = jnp.einsum("...d,vd->...v", hidden, unembedding(params), preferred_element_type=jnp.float32)
    return softcap(collectives.all_gather_vocab(out)[..., : model.vocab_size], model.logit_softcap)


def softcap(x: Array, cap: float) -> Array:
    """Computes cap·tanh(x / cap), or x if the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def _angles(
    positions: Int[Array, "B T"], segments: Int[Array, "B T"] | None, model: Architecture, capacity: int
) -> dict[str, tuple[Array, Array]]:
    """Computes rotary (cos, sin) of each layer kind with rotary positions.

    Under longrope, a sequence longer than the original context uses other frequencies from its first token on. Without
    a cache, the last position of the sequence determines this. With a cache, keys are written before the final length
    is known, so the capacity determines it: a sequence that may become long uses the long frequencies.

    Args:
      positions: Position of each token in its sequence.
      segments: Segment ids, or None if each row is one sequence.
      model: Architecture of the model.
      capacity: Capacity of the cache in tokens per row; 0 if there is no cache.
    """
    if model.positions != "rotary":
        return {}
    long: Array | bool = capacity > model.rope_original_context
    if model.rope_scaling == "longrope" and not capacity:
        long = layers.last_positions(positions, segments) >= model.rope_original_context
    kinds = dict.fromkeys(kind for kind in model.pattern if kind != "nope")
    return {kind: layers.rope_angles(positions, model, kind, long) for kind in kinds}


def attention_inputs(positions: Int[Array, "B T"], model: Architecture) -> AttentionInputs:
    """Returns the attention inputs of a forward pass without a cache, packing or padding."""
    return AttentionInputs(positions, None, None, _angles(positions, None, model, 0), PLAIN, 0)


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    model: Architecture,
    *,
    segments: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    remat: RematPolicy = SAVE_ALL,
    attention: Attention = PLAIN,
    attention_chunk: int = 0,
    collectives: Collectives = SINGLE_DEVICE,
    cache: Params | None = None,
    lengths: Int[Array, " B"] | None = None,
    capacity: int = 0,
) -> tuple[Float[Array, "B t D"], Params | None, Float[Array, ""]]:
    """Runs the model up to the final norm; `logits` or the loss take the resulting hidden states.

    Args:
      params: Parameter tree with the structure of `specs.param_specs`; its dtype is the compute dtype.
      tokens: Token ids.
      positions: Position of each token in its sequence.
      model: Architecture of the model.
      segments: Segment ids of packed sequences; tokens attend only within their segment, and 0 is padding.
      valid: With a cache: False for padding tokens.
      remat: Remat policy.
      attention: Attention implementation without a cache.
      attention_chunk: Without a cache: number of queries whose scores the `xla` implementation materializes at once;
        0 means all.
      collectives: Collectives for the mesh sizes.
      cache: KV cache, a tree with the structure of `specs.cache_specs`; None runs without a cache.
      lengths: Number of cached tokens of each row; required with a cache.
      capacity: Maximum tokens per row of the cache.

    Returns:
      (hidden states of this device's tokens, the cache including the new tokens or None, load-balancing loss: mean over
      layers times `router_aux_weight`).
    """
    angles = _angles(positions, segments, model, capacity if cache is not None else 0)
    inputs = AttentionInputs(positions, segments, valid, angles, attention, attention_chunk)
    token_mask = jnp.ones(tokens.shape, bool)
    if segments is not None:
        token_mask = segments > 0
    elif valid is not None:
        token_mask = valid

    def run_block(
        x: Array, layer: Params, kind: str, cached: LayerCache | None
    ) -> tuple[Array, LayerCache | None, Array]:
        return block(x, layer, model, kind, inputs, token_mask, cached, collectives)

    x = embed(tokens, positions, collectives.weights(params["embed"], "embed"), model, collectives)
    aux_loss, new_cache = jnp.zeros((), jnp.float32), None
    if cache is None:
        x, aux_loss = stack.run_layers(x, params, run_block, model, remat, collectives)
    else:
        assert lengths is not None, "a cache requires the lengths of its rows"
        x, new_cache = stack.run_layers_with_cache(x, params, run_block, model, cache, lengths, capacity)
    hidden = layers.norm(x, collectives.weights(params["final_norm"], "final_norm"), model.norm, model.norm_eps)
    return hidden, new_cache, model.router_aux_weight * aux_loss / model.layers
