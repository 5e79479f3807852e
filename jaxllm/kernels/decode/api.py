"""Attention of the newest tokens over a long cache: one kernel a platform, and how its parts are put together.

`reference.attention` over the positions of the cache's slots defines what they compute.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.config import attention as attention_choice
from jaxllm.kernels import reference
from jaxllm.kernels.decode import gpu as decode_gpu
from jaxllm.kernels.decode import int8 as decode_int8
from jaxllm.kernels.decode import slots as decode_slots
from jaxllm.kernels.decode import tpu as decode_tpu

MOST_TOKENS = 8  # new ones of a row; more are a prefill


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
    """softmax(cap(q·k·scale)) · v of each row's last T tokens over its cache, in which they are written already.

    Query head n uses key head n // (N / K). Scores, softmax and sums are float32. Slots past a row's length, or
    before all windows of its tokens, are not read. A query that sees nothing (a row of length 0) gets 0.

    Args:
      k, v: of one layer, or the stacks of all of which `layer` is read where it lies: no copy of it is made.
        Position p of a row lies in slot p mod S.
      lengths: tokens of each row in the cache, the T new ones included.
      window: positions a query sees, its own included; 0 is all that are in the cache.
      softcap: c·tanh(score / c) before the mask; 0 is none.
      capacity: tokens that a row may have; over S the cache is a ring, whose last S tokens alone are there.
      k_scale, v_scale: of an int8 cache; see `decode_int8`.
      platform: gpu | tpu: that kernel; cpu: the reference; auto: what the program is compiled for, by the
        reference where that kernel has not got the head_dim or dtype: as `attention_choice.decoding` says.
      interpret: runs the kernel's steps as plain JAX, on any device.
    Raises:
      ValueError: arguments that do not belong together, or that the platform's kernel has not got.
    """
    if platform == "auto":
        if interpret:
            raise ValueError("platform auto is what the program runs on: name a kernel to interpret")
        return _where_it_runs(
            q, k, v, lengths, layer, k_scale, v_scale, window=window, scale=scale, softcap=softcap, capacity=capacity
        )
    if layer is None:
        k, v = k[None], v[None]
        k_scale, v_scale = (x if x is None else x[None] for x in (k_scale, v_scale))
    _check(q, k, v, k_scale, v_scale)
    index = jnp.asarray(0 if layer is None else layer, jnp.int32)
    B, T, N, H = q.shape
    K, S = k.shape[2:4]
    # A full cache holds no more than its slots.
    lengths = lengths.astype(jnp.int32) if capacity > S else jnp.minimum(lengths.astype(jnp.int32), S)
    scales: tuple[Array, ...] = () if k_scale is None or v_scale is None else (k_scale, v_scale)
    if platform == "cpu":
        return _plain(q, k[index], v[index], lengths, tuple(x[index] for x in scales), window, scale, softcap)
    kernels = {"gpu": decode_gpu, "tpu": decode_tpu}
    if platform not in kernels:
        raise ValueError(f"no decode attention for platform {platform!r}; there are auto, cpu, gpu and tpu")
    if platform == "gpu" and not decode_gpu.reaches(k.shape, k.dtype.itemsize):
        # A copy of one layer, which the kernel reaches where it does not reach all of them.
        k, v = k[index][None], v[index][None]
        scales, index = tuple(x[index][None] for x in scales), jnp.zeros_like(index)
    run = functools.partial(
        kernels[platform].partials, tokens=T, window=window, scale=scale, softcap=softcap, interpret=interpret
    )
    grouped = q.reshape(B, T, K, N // K, H).swapaxes(1, 2).reshape(B, K, -1, H)
    out = combine(*run(grouped, k, v, lengths, index, scales))
    return out.reshape(B, K, T, N // K, H).swapaxes(1, 2).reshape(B, T, N, H).astype(q.dtype)


def _where_it_runs(*arrays: Any, **options: Any) -> Array:
    """The kernel of the platform that the program is compiled for, which is known when it is lowered."""

    def on(platform: str) -> Callable[..., Array]:
        def run(q: Array, k: Array, v: Array, lengths: Array, layer: Any, k_scale: Any, v_scale: Any) -> Array:
            rest = {"layer": layer, "k_scale": k_scale, "v_scale": v_scale}
            return decode_attention(q, k, v, lengths, **rest, **options, platform=platform)

        return run

    # All branches are traced wherever the program runs: what a kernel has not got is the reference's from the start.
    q, k = arrays[:2]
    dtypes = [str(jnp.dtype(x.dtype)) for x in (q, k)]
    chosen = {name: attention_choice.decoding(name, q.shape[-1], *dtypes) for name in ("gpu", "tpu")}
    gpu, tpu = (name if one.implementation == "pallas" else "cpu" for name, one in chosen.items())
    if not decode_gpu.reaches(k.shape[-4:], k.dtype.itemsize):
        gpu = "cpu"  # one layer's int8 cache between 2 and 4 GiB
    return jax.lax.platform_dependent(*arrays, cuda=on(gpu), tpu=on(tpu), default=on("cpu"))


def combine(
    acc: Float[Array, "B splits K R H"], biggest: Float[Array, "B splits K R"], total: Float[Array, "B splits K R"]
) -> Float[Array, "B K R H"]:
    """The whole softmax's average from those of its splits.

    Args:
      acc: values weighted by exp(score − biggest), summed.
      biggest: the largest score of the split; anything finite where it saw nothing.
      total: the weights' sum.
    """
    share = jnp.exp(biggest - biggest.max(1, keepdims=True))
    whole = (total * share).sum(1)
    out = (acc * share[..., None]).sum(1)
    return out / jnp.where(whole > 0, whole, 1.0)[..., None]


def _check(q: Array, k: Array, v: Array, k_scale: Array | None, v_scale: Array | None) -> None:
    B, T, N, H = q.shape
    if k.ndim != 5 or v.shape != k.shape or (k.shape[1], k.shape[4]) != (B, H) or N % k.shape[2]:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} do not belong together (with `layer`: stacks)")
    if not 1 <= T <= MOST_TOKENS:
        raise ValueError(f"{T} new tokens a row; decode attention takes 1 to {MOST_TOKENS}")
    if (k.dtype == jnp.int8) != (k_scale is not None and v_scale is not None) or k.dtype != v.dtype:
        raise ValueError(f"a cache of {k.dtype} and {v.dtype}: int8 comes with k_scale and v_scale, others without")
    for x in (k_scale, v_scale):
        if x is not None and x.shape != k.shape[:-1]:
            raise ValueError(f"scales of shape {x.shape} for a cache of {k.shape}; there is one a vector")


def _plain(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    scales: tuple[Array, ...],
    window: int,
    scale: float,
    softcap: float,
) -> Array:
    if scales:
        k, v = (decode_int8.dequantize(x, s) for x, s in zip((k, v), scales, strict=True))
    T = q.shape[1]
    positions = lengths[:, None] - T + jnp.arange(T)[None, :]
    mask = reference.attention_mask(positions, decode_slots.slot_positions(lengths, k.shape[2]), None, None, window)
    out = reference.attention(q, k.astype(q.dtype), v.astype(q.dtype), mask, scale=scale, softcap=softcap)
    return out.astype(q.dtype)
