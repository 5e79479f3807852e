"""The forward pass: tokens in, hidden states out; with or without a cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.model import layers
from jaxllm.model.attention import LayerCache, Span, attention
from jaxllm.model.moe import moe
from jaxllm.model.partition import WHOLE, Partition
from jaxllm.model.remat import group_size, rematerialize
from jaxllm.remat_policy import RematPolicy

Params = dict[str, Any]
# Every product's result waits for the backward pass.
NOTHING = RematPolicy("none")


def block(
    x: Float[Array, "B t D"],
    params: Params,
    model: Architecture,
    kind: str,
    span: Span,
    real: Bool[Array, "B T"],
    cache: LayerCache | None = None,
    partition: Partition = WHOLE,
) -> tuple[Float[Array, "B t D"], LayerCache | None, Float[Array, ""]]:
    """One layer. Returns its output, its cache, and its load-balancing loss (0 where the MLP is dense).

    Args:
      x: this device's tokens; attention and MLP see all of them.
    """

    def normed(y: Array, name: str) -> Array:
        return layers.norm(y, params[name], model.norm, model.norm_eps)

    sandwich = model.norm_placement == "sandwich"
    inputs = partition.enter(checkpoint_name(normed(x, "attn_norm"), "attn_norm"))
    y, cache = attention(inputs, params["attn"], model, kind, span, cache, partition)
    x = checkpoint_name(x + (normed(y, "attn_post_norm") if sandwich else y), "resid_mid")
    balance = jnp.zeros((), jnp.float32)
    inputs = partition.enter(checkpoint_name(normed(x, "mlp_norm"), "mlp_norm"))
    if model.experts:
        y, balance = moe(inputs, params["mlp"], model, real, partition)
    else:
        y = layers.mlp(inputs, params["mlp"], model, partition)
    return x + (normed(y, "mlp_post_norm") if sandwich else y), cache, balance


def embed(
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    params: Params,
    model: Architecture,
    partition: Partition = WHOLE,
) -> Float[Array, "B t D"]:
    """Token embeddings, scaled, plus learned positions where the model has them.

    Args:
      params: {"tokens": [V, D], ["positions": [P, D]]}, of the tokens this device's part of the vocabulary.
    """
    table = params["tokens"]
    if partition.tensor > 1:
        local = tokens - partition.first(table.shape[0])
        here = (local >= 0) & (local < table.shape[0])
        # A product, of which the gradient needs one number a token; of a choice it would need whole rows.
        x = partition.leave(table[jnp.where(here, local, 0)] * here[..., None].astype(table.dtype))
    else:
        x = table[tokens]
    x = x * jnp.asarray(model.embedding_scale, x.dtype)
    if model.positions == "learned":
        x = x + params["positions"][partition.own_tokens(positions)]
    return x


def unembedding(params: Params, partition: Partition = WHOLE) -> Float[Array, "V D"]:
    """The matrix that makes logits: the head, or the embeddings where they are tied; this device's part of it."""
    if "head" in params:
        return partition.weights(params["head"], "head")
    return partition.weights(params["embed"], "embed")["tokens"]


def logits(hidden: Float[Array, "*batch D"], params: Params, model: Architecture) -> Float[Array, "*batch V"]:
    """Float32 logits, capped where the model caps them."""
    out = jnp.einsum("...d,vd->...v", hidden, unembedding(params), preferred_element_type=jnp.float32)
    return softcap(out, model.logit_softcap)


def softcap(x: Array, cap: float) -> Array:
    """cap·tanh(x / cap); 0 is no cap."""
    return cap * jnp.tanh(x / cap) if cap else x


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    model: Architecture,
    *,
    segments: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    remat: RematPolicy = NOTHING,
    attention_chunk: int = 0,
    partition: Partition = WHOLE,
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
      attention_chunk: queries whose scores exist at one time, where there is no cache; 0 is all of them.
      partition: the devices that the model is spread over.
      cache: the tree of `specs.cache_specs`, holding `lengths` tokens a row of at most `capacity`.
    Returns:
      (hidden states of this device's tokens, the cache with the tokens written, weighted load-balancing loss:
      mean over layers).
    """
    kinds = set(model.pattern) | set(model.tail)
    rotary = model.positions == "rotary"
    angles = {kind: layers.rope_angles(positions, model, kind) for kind in kinds} if rotary else {}
    span = Span(positions, segments, valid, angles, attention_chunk)
    real = jnp.ones(tokens.shape, bool)
    if segments is not None:
        real = segments > 0
    elif valid is not None:
        real = valid

    def run(x: Array, layer: Params, kind: str, cached: LayerCache | None) -> tuple[Array, Any, Array]:
        return block(x, layer, model, kind, span, real, cached, partition)

    def run_rematerialized(
        x: Array, params: Params, group: str, place: int, kind: str, loop: int
    ) -> tuple[Array, Array]:
        def plain(x: Array, layer: Params) -> tuple[Array, Array]:
            y, _, balance = run(x, partition.weights(layer, group, place), kind, None)
            return y, balance

        # In a loop of its own a block's backward pass is in another computation than its forward pass.
        return rematerialize(plain, remat, prevent_cse=loop == 1)(x, params)

    x = embed(tokens, positions, partition.weights(params["embed"], "embed"), model, partition)
    balance = jnp.zeros((), jnp.float32)
    index = jnp.arange(model.repeats)

    if cache is None:
        size = group_size(model.repeats, remat)
        loop = model.repeats // model.unroll

        def repeat(carry: tuple[Array, Array], stacked: tuple[Params, ...]) -> tuple[tuple[Array, Array], None]:
            x, balance = carry
            for place, (kind, layer) in enumerate(zip(model.pattern, stacked, strict=True)):
                x, one = run_rematerialized(x, layer, "layers", place, kind, 1 if len(model.pattern) > 1 else loop)
                balance = balance + one
            return (x, balance), None

        def group(carry: tuple[Array, Array], stacked: tuple[Params, ...]) -> tuple[tuple[Array, Array], None]:
            return jax.lax.scan(repeat, carry, stacked)

        if size > 1:
            stacks = jax.tree.map(lambda w: w.reshape(-1, size, *w.shape[1:]), params["layers"])
            again = jax.checkpoint(
                group, prevent_cse=model.repeats == size, policy=jax.checkpoint_policies.nothing_saveable
            )
            (x, balance), _ = jax.lax.scan(again, (x, balance), stacks)
        elif model.repeats:
            (x, balance), _ = jax.lax.scan(repeat, (x, balance), params["layers"], unroll=model.unroll)
        for place, (kind, layer) in enumerate(zip(model.tail, params["tail"], strict=True)):
            x, one = run_rematerialized(x, layer, "tail", place, kind, 1)
            balance = balance + one
        new_cache = None
    else:
        assert lengths is not None, "a cache comes with the lengths of its rows"

        def repeat_cached(carry: tuple[Array, Any], inputs: tuple[Array, tuple[Params, ...]]) -> tuple[Any, None]:
            x, caches = carry
            i, stacked = inputs
            written = []
            for kind, layer, kv in zip(model.pattern, stacked, caches, strict=True):
                x, cached, _ = run(x, layer, kind, LayerCache(kv["k"], kv["v"], i, lengths, capacity))
                written.append({"k": cached.k, "v": cached.v})
            return (x, tuple(written)), None

        caches = cache["layers"]
        if model.repeats:
            (x, caches), _ = jax.lax.scan(repeat_cached, (x, caches), (index, params["layers"]), unroll=model.unroll)
        tail = []
        for kind, layer, kv in zip(model.tail, params["tail"], cache["tail"], strict=True):
            x, cached, _ = run(x, layer, kind, LayerCache(kv["k"][None], kv["v"][None], 0, lengths, capacity))
            assert cached is not None
            tail.append({"k": cached.k[0], "v": cached.v[0]})
        new_cache = {"layers": caches, "tail": tuple(tail)}

    hidden = layers.norm(x, partition.weights(params["final_norm"], "final_norm"), model.norm, model.norm_eps)
    return hidden, new_cache, model.router_aux_weight * balance / model.layers
