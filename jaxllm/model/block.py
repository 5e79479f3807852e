"""Transformer block: attention and an MLP, each with a norm and a residual connection."""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxllm.config import Architecture
from jaxllm.model import layers
from jaxllm.model.attention import AttentionInputs, LayerCache, attention
from jaxllm.model.moe import moe
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives

Params = dict[str, Any]


def block(
    x: Float[Array, "B t D"],
    params: Params,
    model: Architecture,
    kind: str,
    attention_inputs: AttentionInputs,
    token_mask: Bool[Array, "B T"],
    cache: LayerCache | None = None,
    collectives: Collectives = SINGLE_DEVICE,
) -> tuple[Float[Array, "B t D"], LayerCache | None, Float[Array, ""]]:
    """Runs one transformer layer.

    Args:
      x: This device's tokens; they are all-gathered before attention and before the MLP.
      params: The layer's weights, unsharded over `data`.
      model: Architecture of the model.
      kind: Layer kind: full | sliding | nope.
      attention_inputs: Positions, segments and attention settings.
      token_mask: False for padding tokens, which do not count for load balancing.
      cache: The layer's KV cache, or None.
      collectives: Collectives for the mesh sizes.

    Returns:
      (output, the cache including the new tokens or None, load-balancing loss: 0 if the MLP is dense).
    """

    def normalized(name: str) -> Array:
        if model.norm_placement == "post":
            return collectives.all_gather_tokens(x)
        return collectives.all_gather_tokens(
            checkpoint_name(layers.norm(x, params[name], model.norm, model.norm_eps), name)
        )

    def post_norm(y: Array, name: str) -> Array:
        return y if model.norm_placement == "pre" else layers.norm(y, params[name], model.norm, model.norm_eps)

    y, cache = attention(normalized("attn_norm"), params["attn"], model, kind, attention_inputs, cache, collectives)
    x = checkpoint_name(x + post_norm(y, "attn_post_norm"), "resid_mid")
    aux_loss = jnp.zeros((), jnp.float32)
    inputs = normalized("mlp_norm")
    if model.experts:
        y, aux_loss = moe(inputs, params["mlp"], model, token_mask, collectives)
    else:
        y = layers.mlp(inputs, params["mlp"], model, collectives)
    return x + post_norm(y, "mlp_post_norm"), cache, aux_loss
