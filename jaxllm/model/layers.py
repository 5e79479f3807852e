"""The pieces of a block that are neither attention nor experts: norms, positions, the dense MLP."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.model.adapters import ADAPTERS
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives


def align(vector: Array, x: Array) -> Array:
    """The vector with leading dimensions of 1, to the rank of x: broadcasting is always asked for, never implied."""
    return vector.reshape((1,) * (x.ndim - vector.ndim) + vector.shape)


def norm(x: Float[Array, "*batch D"], params: dict[str, Array], kind: str, eps: float) -> Float[Array, "*batch D"]:
    """LayerNorm (Ba et al. 2016), RMSNorm (Zhang & Sennrich 2019), or RMSNorm whose scale is 1 + w (Gemma).

    Statistics are float32 whatever x is; the result has x's dtype.
    """
    x32 = x.astype(jnp.float32)
    if kind == "layernorm":
        x32 = x32 - x32.mean(-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    scale = align(params["scale"].astype(jnp.float32), x32)
    x32 = x32 * (1.0 + scale if kind == "rmsnorm_plus_one" else scale)
    if "bias" in params:
        x32 = x32 + align(params["bias"].astype(jnp.float32), x32)
    return x32.astype(x.dtype)


def norm_over_heads(
    x: Float[Array, "B T heads H"],
    params: dict[str, Array],
    kind: str,
    eps: float,
    collectives: Collectives = SINGLE_DEVICE,
) -> Float[Array, "B T heads H"]:
    """RMSNorm of all heads of a token together (OLMo 2, Walsh et al. 2025).

    Args:
      x: this device's heads.
      params: {"scale": [heads, H]}, of these.
      kind: rmsnorm | rmsnorm_plus_one.
    """
    x32 = x.astype(jnp.float32)
    total = collectives.all_reduce_heads(jnp.square(x32).sum((2, 3), keepdims=True))
    x32 = x32 * jax.lax.rsqrt(total / (x.shape[2] * x.shape[3] * collectives.tensor) + eps)
    scale = align(params["scale"].astype(jnp.float32), x32)
    return (x32 * (1.0 + scale if kind == "rmsnorm_plus_one" else scale)).astype(x.dtype)


def rope_frequencies(model: Architecture, kind: str, long: bool = False) -> tuple[np.ndarray, float]:
    """Angular frequency of each rotary pair, after context scaling, and the factor on queries and keys.

    Sources: rotary positions, Su et al. 2021; linear, Chen et al. 2023; YaRN, Peng et al. 2023, section 3
    (the factor is its attention temperature, √(1/t) = 0.1·ln(s) + 1); llama3, the Llama 3.1 release; longrope,
    Ding et al. 2024 (the factor is Phi-3's, √(1 + ln(s) / ln(original context))).

    Args:
      long: longrope: of sequences that are longer than the original context.
    Returns:
      ([R/2] float64 radians a position, where R numbers of a head are rotated, and the factor).
    """
    R = model.rotated
    sliding_base = kind == "sliding" and model.rope_theta_sliding > 0
    theta = model.rope_theta_sliding if sliding_base else model.rope_theta
    frequency = theta ** (-np.arange(0, R, 2, dtype=np.float64) / R)
    if model.rope_scaling == "none" or sliding_base:
        return frequency, 1.0
    if model.rope_scaling == "longrope":
        factor = math.sqrt(1 + math.log(max(model.rope_factor, 1)) / math.log(model.rope_original_context))
        pairs = model.rope_long_factors if long else model.rope_short_factors
        return frequency / np.asarray(pairs, np.float64), model.rope_attention_factor or factor
    scaled = frequency / model.rope_factor
    if model.rope_scaling == "linear":
        return scaled, 1.0
    turns = model.rope_original_context * frequency / (2 * np.pi)  # rotations within the original context
    if model.rope_scaling == "llama3":
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return keep * frequency + (1 - keep) * scaled, 1.0
    assert model.rope_scaling == "yarn", model.rope_scaling

    def pair_with_turns(count: float) -> float:
        return R * math.log(model.rope_original_context / (count * 2 * np.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with_turns(model.rope_beta_fast)), 0)
    last = min(math.ceil(pair_with_turns(model.rope_beta_slow)), R - 1)
    # A ramp over pairs, from kept (many turns) to interpolated (few).
    interpolate = np.clip((np.arange(R // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
    factor = 0.1 * math.log(model.rope_factor) + 1.0 if model.rope_factor > 1 else 1.0
    return (1 - interpolate) * frequency + interpolate * scaled, model.rope_attention_factor or factor


def rotate(x: Float[Array, "B T heads H"], angles: tuple[Array, Array]) -> Float[Array, "B T heads H"]:
    """Turns pair (i, i + R/2) of each head's first R numbers by its position's angle; `angles` from `rope_angles`."""
    cos, sin = angles
    turning = 2 * cos.shape[-1]
    left, right = jnp.split(x[..., :turning].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., turning:]], axis=-1) if turning < x.shape[-1] else turned


def rope_angles(
    positions: Int[Array, "B T"], model: Architecture, kind: str, long: Bool[Array, "B S"] | bool
) -> tuple[Array, Array]:
    """(cos, sin), each [B, T, 1, R/2] float32, of a layer kind.

    Args:
      long: of each token or each row (S is T or 1), or of all: whether its sequence is longer than the original
        context. Only `longrope` asks.
    """
    frequency, factor = rope_frequencies(model, kind, long is True)
    at = positions[:, :, None, None].astype(jnp.float32)
    turns = align(jnp.asarray(frequency, jnp.float32), at)
    if not isinstance(long, bool):
        of_long = jnp.asarray(rope_frequencies(model, kind, True)[0], jnp.float32)
        turns = jnp.where(long[:, :, None, None], align(of_long, at), turns)
    angle = at * turns
    return factor * jnp.cos(angle), factor * jnp.sin(angle)


def last_positions(positions: Int[Array, "B T"], segments: Int[Array, "B T"] | None) -> Int[Array, "B S"]:
    """Position of the last token of each token's own sequence; S is 1 where a row is one sequence, T otherwise."""
    if segments is None:
        return positions.max(1, keepdims=True)
    T = positions.shape[1]
    ends = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    end = jax.lax.cummin(jnp.where(ends, jnp.arange(T)[None], T - 1), axis=1, reverse=True)
    return jnp.take_along_axis(positions, end, axis=1)


def activation(gate: Array, kind: str) -> Array:
    """SiLU for SwiGLU; GELU's tanh approximation (Hendrycks & Gimpel 2016) for GELU and GeGLU."""
    return jax.nn.silu(gate) if kind == "swiglu" else jax.nn.gelu(gate, approximate=True)


def matmul(x: Float[Array, "B T *inputs"], weight: Array, fan_in: int = 1) -> Array:
    """x times a weight, over the last `fan_in` dimensions of x: [B, T, *outputs].

    One plain matrix product, with the weight's dimensions flattened: XLA's CPU backend takes twice as long for
    the gradient of the einsum that sums over batch and time apart.
    """
    B, T = x.shape[:2]
    rows = weight.reshape(math.prod(weight.shape[:fan_in]), -1)
    return (x.reshape(B * T, -1) @ rows).reshape(B, T, *weight.shape[fan_in:])


def project(x: Float[Array, "B T *inputs"], params: dict[str, Any], name: str, fan_in: int = 1) -> Array:
    """x times the weight of a name, and through its low-rank adapter where it has one (`jaxllm.model.adapters`).

    The adapter is applied to activations, and never added to the weight: that would be a copy of the weight.
    """
    y = matmul(x, params[name], fan_in)
    pair = params.get(ADAPTERS, {}).get(name)
    if pair is None:
        return y
    return y + matmul(checkpoint_name(matmul(x, pair["a"], fan_in), ADAPTERS), pair["b"])


def mlp(
    x: Float[Array, "B T D"], params: dict[str, Any], model: Architecture, collectives: Collectives = SINGLE_DEVICE
) -> Float[Array, "B t D"]:
    """The dense MLP: two matrices, or three where it is gated (Shazeer 2020)."""

    def into(name: str) -> Array:
        y = project(x, params, name)
        if model.mlp_bias:
            y = y + align(params[f"{name}_bias"], y)
        return checkpoint_name(y, f"mlp_{name}")

    up = into("up")
    hidden = activation(into("gate"), model.mlp) * up if model.gated else activation(up, model.mlp)
    y = collectives.reduce_scatter_tokens(project(checkpoint_name(hidden, "mlp_hidden"), params, "down"))
    if model.mlp_bias:
        y = y + align(params["down_bias"], y)
    return checkpoint_name(y, "mlp_out")
