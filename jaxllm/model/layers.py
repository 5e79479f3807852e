"""Layers of a block other than attention and MoE: norms, rotary positions and the dense MLP."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.model.linear import project
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives


def align(vector: Array, x: Array) -> Array:
    """Prepends dimensions of size 1 up to the rank of x, because implicit rank promotion is not used."""
    return vector.reshape((1,) * (x.ndim - vector.ndim) + vector.shape)


def norm(x: Float[Array, "*batch D"], params: dict[str, Array], kind: str, eps: float) -> Float[Array, "*batch D"]:
    """Applies LayerNorm (Ba et al. 2016), RMSNorm (Zhang & Sennrich 2019), or RMSNorm with scale 1 + w (Gemma).

    Statistics are computed in float32; the result has the dtype of x.

    Args:
      x: Input, normalized over its last dimension.
      params: {"scale": [D], ["bias": [D]]}.
      kind: layernorm | rmsnorm | rmsnorm_plus_one.
      eps: Added to the variance or mean square.
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
    """Applies RMSNorm over all heads of a token together (OLMo 2, Walsh et al. 2025).

    Args:
      x: This device's heads.
      params: {"scale": [heads, H]} of this device's heads.
      kind: rmsnorm | rmsnorm_plus_one.
      eps: Added to the mean square.
      collectives: Collectives for the mesh sizes; the sum of squares is all-reduced over `tensor`.
    """
    x32 = x.astype(jnp.float32)
    total = collectives.all_reduce_heads(jnp.square(x32).sum((2, 3), keepdims=True))
    x32 = x32 * jax.lax.rsqrt(total / (x.shape[2] * x.shape[3] * collectives.tensor) + eps)
    scale = align(params["scale"].astype(jnp.float32), x32)
    return (x32 * (1.0 + scale if kind == "rmsnorm_plus_one" else scale)).astype(x.dtype)


def rope_frequencies(model: Architecture, kind: str, long: bool = False) -> tuple[np.ndarray, float]:
    """Computes the rotary frequencies after context scaling, and the factor on rotated queries and keys.

    Sources: rotary positions, Su et al. 2021; linear, Chen et al. 2023; YaRN, Peng et al. 2023, section 3
    (the factor is its attention temperature, √(1/t) = 0.1·ln(s) + 1); llama3, the Llama 3.1 release; longrope,
    Ding et al. 2024 (the factor is Phi-3's, √(1 + ln(s) / ln(original context))).

    Args:
      model: Architecture of the model.
      kind: Layer kind; sliding layers may have a base frequency of their own and are then not scaled.
      long: Whether to use longrope's factors for sequences longer than the original context.

    Returns:
      ([R/2] float64 frequencies in radians per position, where R elements of a head are rotated; the factor).
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
    # Linear ramp over pairs, from unscaled (many rotations) to fully interpolated (few rotations).
    interpolate = np.clip((np.arange(R // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
    factor = 0.1 * math.log(model.rope_factor) + 1.0 if model.rope_factor > 1 else 1.0
    return (1 - interpolate) * frequency + interpolate * scaled, model.rope_attention_factor or factor


def rotate(x: Float[Array, "B T heads H"], angles: tuple[Array, Array]) -> Float[Array, "B T heads H"]:
    """Rotates pairs (i, i + R/2) of each head's first R elements by the angles that `rope_angles` returns."""
    cos, sin = angles
    turning = 2 * cos.shape[-1]
    left, right = jnp.split(x[..., :turning].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, x[..., turning:]], axis=-1) if turning < x.shape[-1] else rotated


def rope_angles(
    positions: Int[Array, "B T"], model: Architecture, kind: str, long: Bool[Array, "B S"] | bool
) -> tuple[Array, Array]:
    """Computes rotary (cos, sin) of a layer kind, each [B, T, 1, R/2] float32.

    Args:
      positions: Position of each token in its sequence.
      model: Architecture of the model.
      kind: Layer kind.
      long: Whether the sequence is longer than the original context: per token (S = T), per row (S = 1), or one value
        for all. Only `longrope` uses it.
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
    """Returns the last position of each token's sequence; S is 1 if each row is one sequence, T otherwise."""
    if segments is None:
        return positions.max(1, keepdims=True)
    T = positions.shape[1]
    ends = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    end = jax.lax.cummin(jnp.where(ends, jnp.arange(T)[None], T - 1), axis=1, reverse=True)
    return jnp.take_along_axis(positions, end, axis=1)


def activation(gate: Array, kind: str) -> Array:
    """Applies SiLU for SwiGLU, and the tanh approximation of GELU (Hendrycks & Gimpel 2016) for GELU and GeGLU."""
    return jax.nn.silu(gate) if kind == "swiglu" else jax.nn.gelu(gate, approximate=True)


def mlp(
    x: Float[Array, "B T D"], params: dict[str, Any], model: Architecture, collectives: Collectives = SINGLE_DEVICE
) -> Float[Array, "B t D"]:
    """Computes the dense MLP, with two weight matrices, or three if it is gated (Shazeer 2020).

    Args:
      x: All tokens of the sequences, already all-gathered over `tensor`.
      params: The layer's MLP weights; this device's shard of F. For inference, "gate" and "up" may be fused as
        "gate_up", with outputs [2, F].
      model: Architecture of the model.
      collectives: Collectives for the mesh sizes.

    Returns:
      This device's tokens of the output.
    """

    def into(name: str) -> Array:
        y = project(x, params, name)
        return y + align(params[f"{name}_bias"], y) if model.mlp_bias else y

    if "gate_up" in params:
        fused = into("gate_up")
        gate, up = fused[:, :, 0], fused[:, :, 1]
    else:
        up = checkpoint_name(into("up"), "mlp_up")
        gate = checkpoint_name(into("gate"), "mlp_gate") if model.gated else up
    hidden = activation(gate, model.mlp) * up if model.gated else activation(up, model.mlp)
    y = collectives.reduce_scatter_tokens(project(checkpoint_name(hidden, "mlp_hidden"), params, "down"))
    if model.mlp_bias:
        y = y + align(params["down_bias"], y)
    return checkpoint_name(y, "mlp_out")
