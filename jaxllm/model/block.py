"""One transformer block: attention and an MLP, each around a norm and beside a residual stream."""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxllm.config import Architecture
from jaxllm.model import layers
from jaxllm.model.attention import LayerCache, Span, attention
from jaxllm.model.moe import moe
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives

Params = dict[str, Any]


def block(
    x: Float[Array, "B t D"],
    params: Params,
    model: Architecture,
    kind: str,
    span: Span,
    real: Bool[Array, "B T"],
    cache: LayerCache | None = None,
    collectives: Collectives = SINGLE_DEVICE,
) -> tuple[Float[Array, "B t D"], LayerCache | None, Float[Array, ""]]:
    """One layer. Returns its output, its cache, and its load-balancing loss (0 where the MLP is dense).

    Args:
      x: this device's tokens; attention and MLP see all of them.
    """

    def inputs_of(name: str) -> Array:
        if model.norm_placement == "post":
            return collectives.all_gather_tokens(x)
        return collectives.all_gather_tokens(
            checkpoint_name(layers.norm(x, params[name], model.norm, model.norm_eps), name)
        )

    def output(y: Array, name: str) -> Array:
        return y if model.norm_placement == "pre" else layers.norm(y, params[name], model.norm, model.norm_eps)

    y, cache = attention(inputs_of("attn_norm"), params["attn"], model, kind, span, cache, collectives)
    x = checkpoint_name(x + output(y, "attn_post_norm"), "resid_mid")
    aux_loss = jnp.zeros((), jnp.float32)
    inputs = inputs_of("mlp_norm")
    if model.experts:
        y, aux_loss = moe(inputs, params["mlp"], model, real, collectives)
    else:
        y = layers.mlp(inputs, params["mlp"], model, collectives)
    return x + output(y, "mlp_post_norm"), cache, aux_loss
