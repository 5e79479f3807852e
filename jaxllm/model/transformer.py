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
from jaxllm.model.remat import rematerialize

Params = dict[str, Any]


def block(
    x: Float[Array, "B T D"],
    params: Params,
    model: Architecture,
    kind: str,
    span: Span,
    real: Bool[Array, "B T"],
    cache: LayerCache | None = None,
) -> tuple[Float[Array, "B T D"], LayerCache | None, Float[Array, ""]]:
    """One layer. Returns its output, its cache, and its load-balancing loss (0 where the MLP is dense)."""

    def normed(y: Array, name: str) -> Array:
        return layers.norm(y, params[name], model.norm, model.norm_eps)

    sandwich = model.norm_placement == "sandwich"
    y, cache = attention(normed(x, "attn_norm"), params["attn"], model, kind, span, cache)
    x = checkpoint_name(x + (normed(y, "attn_post_norm") if sandwich else y), "resid_mid")
    balance = jnp.zeros((), jnp.float32)
    if model.experts:
        y, balance = moe(normed(x, "mlp_norm"), params["mlp"], model, real)
    else:
        y = layers.mlp(normed(x, "mlp_norm"), params["mlp"], model)
    return x + (normed(y, "mlp_post_norm") if sandwich else y), cache, balance


def embed(tokens: Int[Array, "B T"], positions: Int[Array, "B T"], params: Params, model: Architecture) -> Array:
    """[B, T, D]: token embeddings, scaled, plus learned positions where the model has them."""
    x = params["embed"]["tokens"][tokens]
    x = x * jnp.asarray(model.embedding_scale, x.dtype)
    if model.positions == "learned":
        x = x + params["embed"]["positions"][positions]
    return x


def unembedding(params: Params) -> Float[Array, "V D"]:
    """The matrix that makes logits: the head, or the embeddings where they are tied."""
    return params["head"] if "head" in params else params["embed"]["tokens"]


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
    remat: str = "none",
    cache: Params | None = None,
    lengths: Int[Array, " B"] | None = None,
    capacity: int = 0,
) -> tuple[Float[Array, "B T D"], Params | None, Float[Array, ""]]:
    """The hidden states that `logits` or the loss turn into predictions.

    Args:
      params: the tree of `specs.param_specs`; its dtype is the compute dtype.
      segments: packed sequences: tokens attend within their segment; 0 is padding.
      valid: with a cache: False for padding tokens.
      remat: policy of `jaxllm.model.remat`.
      cache: the tree of `specs.cache_specs`, holding `lengths` tokens a row of at most `capacity`.
    Returns:
      (hidden, the cache with the tokens written, weighted load-balancing loss: mean over layers).
    """
    kinds = set(model.pattern) | set(model.tail)
    rotary = model.positions == "rotary"
    angles = {kind: layers.rope_angles(positions, model, kind) for kind in kinds} if rotary else {}
    span = Span(positions, segments, valid, angles)
    real = jnp.ones(tokens.shape, bool)
    if segments is not None:
        real = segments > 0
    elif valid is not None:
        real = valid

    def run(x: Array, layer: Params, kind: str, cached: LayerCache | None) -> tuple[Array, Any, Array]:
        return block(x, layer, model, kind, span, real, cached)

    def run_rematerialized(x: Array, layer: Params, kind: str, in_loop: bool) -> tuple[Array, Array]:
        def plain(x: Array, layer: Params) -> tuple[Array, Array]:
            y, _, balance = run(x, layer, kind, None)
            return y, balance

        return rematerialize(plain, remat, in_loop)(x, layer)

    x = embed(tokens, positions, params, model)
    balance = jnp.zeros((), jnp.float32)
    index = jnp.arange(model.repeats)

    if cache is None:

        def repeat(carry: tuple[Array, Array], stacked: tuple[Params, ...]) -> tuple[tuple[Array, Array], None]:
            x, balance = carry
            for kind, layer in zip(model.pattern, stacked, strict=True):
                x, one = run_rematerialized(x, layer, kind, in_loop=model.unroll < model.repeats)
                balance = balance + one
            return (x, balance), None

        if model.repeats:
            (x, balance), _ = jax.lax.scan(repeat, (x, balance), params["layers"], unroll=model.unroll)
        for kind, layer in zip(model.tail, params["tail"], strict=True):
            x, one = run_rematerialized(x, layer, kind, in_loop=False)
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

    hidden = layers.norm(x, params["final_norm"], model.norm, model.norm_eps)
    return hidden, new_cache, model.router_aux_weight * balance / model.layers
