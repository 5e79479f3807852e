"""Decode attention: dispatches to the kernel of each platform and combines its partial results.

The kernels compute `reference.attention` over the positions stored in the cache's slots.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.config import attention as attention_choice
from jaxllm.kernels import reference
from jaxllm.kernels.decode import common as decode_common
from jaxllm.kernels.decode import gpu as decode_gpu
from jaxllm.kernels.decode import tpu as decode_tpu
from jaxllm.kernels.decode.common import DecodeSpec

MAX_TOKENS = 8  # new tokens per row; more is a prefill


def decode_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "*L B K S H"],
    v: Float[Array, "*L B K S H"],
    lengths: Int[Array, " B"],
    *,
    layer: Int[Array, ""] | int | None = None,
    window: int,
    scale: float,
    softcap: float,
    capacity: int,
    k_scale: Float[Array, "*L B K S"] | None = None,
    v_scale: Float[Array, "*L B K S"] | None = None,
    platform: str,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Computes softmax(cap(q·k·scale)) · v of each row's last T tokens over its cache, which already contains them.

    Query head n uses key head n // (N / K). Scores, softmax and sums are float32. Slots past a row's length or before
    the windows of all its new tokens are not read. The output of a query without visible keys (a row of length 0) is 0.

    Args:
      q: Queries of the T new tokens.
      k, v: Cache of one layer, or the stacked caches of all layers, of which `layer` is read in place without a copy.
        Position p of a row is stored in slot p mod S.
      lengths: Tokens of each row in the cache, including the T new ones.
      layer: Index into the stacked caches; None if k and v belong to one layer.
      window: Number of visible positions, including the query's own; 0 means all positions in the cache.
      scale: Factor of q·k.
      softcap: Applies c·tanh(score / c) before the mask; 0 disables it.
      capacity: Maximum tokens per row. If it exceeds S, the cache is a ring with the last S tokens.
      k_scale, v_scale: Scales of an int8 cache; see `decode.common.quantize`.
      platform: "gpu" or "tpu" selects that kernel and "cpu" the reference. "auto" selects by the platform that the
        program is compiled for, with the reference if `attention_choice.decoding` reports the head_dim or dtype as
        unsupported.
      interpret: Runs the kernel in Pallas's interpreter, on any device.

    Returns:
      The attention output, in the dtype of q.

    Raises:
      ValueError: Arguments are inconsistent or not supported by the platform's kernel.
    """
    if platform == "auto":
        if interpret:
            raise ValueError("platform 'auto' cannot be interpreted; name a kernel: gpu or tpu")
        return _on_target_platform(
            q, k, v, lengths, layer, k_scale, v_scale, window=window, scale=scale, softcap=softcap, capacity=capacity
        )
    if layer is None:
        k, v = k[None], v[None]
        k_scale, v_scale = (x if x is None else x[None] for x in (k_scale, v_scale))
    _check(q, k, v, k_scale, v_scale)
    index = jnp.asarray(0 if layer is None else layer, jnp.int32)
    B, T, N, H = q.shape
    K, S = k.shape[2:4]
    # A full cache has at most S tokens.
    lengths = lengths.astype(jnp.int32) if capacity > S else jnp.minimum(lengths.astype(jnp.int32), S)
    spec = DecodeSpec(T, S, window, scale, softcap)
    scales: tuple[Array, ...] = () if k_scale is None or v_scale is None else (k_scale, v_scale)
    if platform == "cpu":
        return _reference(q, k[index], v[index], lengths, tuple(x[index] for x in scales), spec)
    kernels = {"gpu": decode_gpu, "tpu": decode_tpu}
    if platform not in kernels:
        raise ValueError(f"platform {platform!r} is unsupported; supported values are auto, cpu, gpu and tpu")
    if platform == "gpu" and not decode_gpu.can_index(k.shape, k.dtype.itemsize):
        # The kernel can index one layer but not the whole stack, so copy the layer.
        k, v = k[index][None], v[index][None]
        scales, index = tuple(x[index][None] for x in scales), jnp.zeros_like(index)
    grouped = q.reshape(B, T, K, N // K, H).swapaxes(1, 2).reshape(B, K, -1, H)
    out = combine(*kernels[platform].partials(grouped, k, v, lengths, index, scales, spec, interpret))
    return out.reshape(B, K, T, N // K, H).swapaxes(1, 2).reshape(B, T, N, H).astype(q.dtype)


def _on_target_platform(*arrays: Any, **options: Any) -> Array:
    """Computes attention by the kernel of the platform that the program is compiled for, known only at lowering."""

    def on(platform: str) -> Callable[..., Array]:
        def run(q: Array, k: Array, v: Array, lengths: Array, layer: Any, k_scale: Any, v_scale: Any) -> Array:
            operands = {"layer": layer, "k_scale": k_scale, "v_scale": v_scale}
            return decode_attention(q, k, v, lengths, **operands, **options, platform=platform)

        return run

    # All branches are traced on every platform, so unsupported kernels are replaced by the reference before tracing.
    q, k = arrays[:2]
    dtypes = [str(jnp.dtype(x.dtype)) for x in (q, k)]
    chosen = {name: attention_choice.decoding(name, q.shape[-1], *dtypes) for name in ("gpu", "tpu")}
    gpu, tpu = (name if one.implementation == "pallas" else "cpu" for name, one in chosen.items())
    if not decode_gpu.can_index(k.shape[-4:], k.dtype.itemsize):
        gpu = "cpu"  # an int8 cache with 2 to 4 GiB per layer
    return jax.lax.platform_dependent(*arrays, cuda=on(gpu), tpu=on(tpu), default=on("cpu"))


def combine(
    acc: Float[Array, "B splits K R H"], m: Float[Array, "B splits K R"], l: Float[Array, "B splits K R"]
) -> Float[Array, "B K R H"]:
    """Combines the partial softmax results of a row's splits into the attention output.

    Args:
      acc: Sum of the values weighted by exp(score − m), per split.
      m: Maximum score of the split; any finite value if the split had no visible key.
      l: Sum of the weights exp(score − m), per split.

    Returns:
      The normalized output, in float32; 0 for queries without visible keys.
    """
    alpha = jnp.exp(m - m.max(1, keepdims=True))
    l = (l * alpha).sum(1)
    out = (acc * alpha[..., None]).sum(1)
    return out / jnp.where(l > 0, l, 1.0)[..., None]


def _check(q: Array, k: Array, v: Array, k_scale: Array | None, v_scale: Array | None) -> None:
    B, T, N, H = q.shape
    if k.ndim != 5 or v.shape != k.shape or (k.shape[1], k.shape[4]) != (B, H) or N % k.shape[2]:
        raise ValueError(
            f"the shapes of q {q.shape}, k {k.shape} and v {v.shape} do not match; with `layer`, k and v are stacks"
        )
    if not 1 <= T <= MAX_TOKENS:
        raise ValueError(f"q has {T} new tokens per row; decode attention takes 1 to {MAX_TOKENS}")
    if (k.dtype == jnp.int8) != (k_scale is not None and v_scale is not None) or k.dtype != v.dtype:
        raise ValueError(
            f"the cache is {k.dtype} and {v.dtype}; int8 requires k_scale and v_scale, other dtypes must have none"
        )
    for x in (k_scale, v_scale):
        if x is not None and x.shape != k.shape[:-1]:
            raise ValueError(
                f"scales have shape {x.shape} for a cache of {k.shape}; they must have one element per vector"
            )


def _reference(q: Array, k: Array, v: Array, lengths: Array, scales: tuple[Array, ...], spec: DecodeSpec) -> Array:
    if scales:
        k, v = (decode_common.dequantize(x, s) for x, s in zip((k, v), scales, strict=True))
    positions = lengths[:, None] - spec.tokens + jnp.arange(spec.tokens)[None, :]
    slot_positions = decode_common.slot_positions(lengths, spec.slots)
    mask = reference.attention_mask(positions, slot_positions, None, None, spec.window)
    out = reference.attention(q, k.astype(q.dtype), v.astype(q.dtype), mask, scale=spec.scale, softcap=spec.softcap)
    return out.astype(q.dtype)
