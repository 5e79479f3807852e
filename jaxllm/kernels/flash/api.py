"""Flash attention, forward and backward, without materializing the score matrix: memory is linear in the length.

This is FlashAttention-2 (Dao 2023) in Pallas. The saved activations are the inputs, the output and the lse, one float32
per query and head.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxllm.config.attention import KERNEL_DTYPES, MAX_HEAD_DIM, MIN_HEAD_DIM
from jaxllm.errors import UserError
from jaxllm.kernels.flash import mosaic_gpu as flash_mosaic_gpu
from jaxllm.kernels.flash import tpu as flash_tpu
from jaxllm.kernels.flash import triton as flash_triton
from jaxllm.kernels.flash.common import AttentionSpec, Inputs, Tiles, tiles_for

# Kernels (forward, backward) by platform and backend; a platform's first backend is its default.
BACKENDS: dict[str, dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "gpu": {
        "triton": (flash_triton.forward, flash_triton.backward),
        "mosaic_gpu": (flash_mosaic_gpu.forward, flash_triton.backward),
    },
    "tpu": {"mosaic": (flash_tpu.forward, flash_tpu.backward)},
}


@dataclasses.dataclass(frozen=True)
class _KernelOptions:
    """Choice of the kernels, their tiles and interpret mode."""

    platform: str
    backend: str
    tiles: Tiles
    interpret: bool


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_segments: Int[Array, "B T"] | None = None,
    k_segments: Int[Array, "B S"] | None = None,
    *,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
    platform: str,
    backend: str | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Computes softmax(cap(q·k·scale)) · v over the visible keys; equals `reference.attention` up to summation order.

    Positions are array indices: query t has position t + S - T. The mask equals `reference.attention_mask` if positions
    increase by one from token to token within a segment, as in training and in a prefill without padding between
    tokens. Query head n uses key head n // (N / K). Scores, softmax and all sums are float32; weights are rounded to
    the input dtype before the matmul with v. A query without visible keys has output 0 and contributes no gradients.

    Under `jax.checkpoint` the output is named "attn_context" and lse = log(sum(exp(scores))) is named "attn_lse". If a
    policy saves both, the forward kernel is not recomputed.

    Args:
      q: Queries.
      k, v: Keys and values.
      q_segments, k_segments: Segment of each token; tokens attend within their segment, and padding (0) is a segment
        like any other. Give both or neither.
      causal: Whether keys after the query's position are masked.
      window: Keys at a distance below this are visible (the query's own has distance 0); 0 means no limit. If not
        causal, the window extends equally in both directions.
      scale: Factor of q·k.
      softcap: Applies c·tanh(score / c) before the mask (Gemma 2); 0 disables it.
      platform: Platform of the kernels, "gpu" or "tpu".
      backend: GPU backend: "triton", the default, for all GPUs, or "mosaic_gpu" for Hopper, which combines the forward
        kernel of `flash_mosaic_gpu` with Triton's backward kernels.
      tiles: Tile sizes of the kernels; None selects those of `tiles_for`.
      interpret: Runs the kernels in Pallas's interpreter, on any device; slow, for tests.

    Returns:
      The attention output.

    Raises:
      UserError: The platform, backend, shapes or dtypes are not supported; there is no silent fallback.
    """
    _check(q, k, v, q_segments, k_segments, window, softcap, platform)
    backend = backend or next(iter(BACKENDS[platform]))
    if backend not in BACKENDS[platform]:
        raise UserError(f"attention on {platform} has the backends {', '.join(BACKENDS[platform])}, not {backend!r}")
    options = _KernelOptions(platform, backend, tiles or tiles_for(backend, q.shape[3], q.dtype), interpret)
    spec = AttentionSpec(q.shape[1], k.shape[2], causal, window, scale, softcap)
    return _attend(Inputs(q, k, v, q_segments, k_segments), spec, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _attend(inputs: Inputs, spec: AttentionSpec, options: _KernelOptions) -> Array:
    kernel, _ = BACKENDS[options.platform][options.backend]
    return kernel(inputs, spec, options.tiles, options.interpret)[0]


def _forward(inputs: Inputs, spec: AttentionSpec, options: _KernelOptions) -> tuple[Array, tuple[Inputs, Array, Array]]:
    kernel, _ = BACKENDS[options.platform][options.backend]
    out, lse = kernel(inputs, spec, options.tiles, options.interpret)
    out, lse = checkpoint_name(out, "attn_context"), checkpoint_name(lse, "attn_lse")
    return out, (inputs, out, lse)


def _backward(
    spec: AttentionSpec, options: _KernelOptions, saved: tuple[Inputs, Array, Array], d_out: Array
) -> tuple[Inputs]:
    _, kernel = BACKENDS[options.platform][options.backend]
    return (Inputs(*kernel(*saved, d_out, spec, options.tiles, options.interpret)),)


_attend.defvjp(_forward, _backward)


def _check(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array | None,
    k_segments: Array | None,
    window: int,
    softcap: float,
    platform: str,
) -> None:
    """Checks the arguments of `flash_attention`.

    Raises:
      UserError: The kernels do not support them.
    """
    if platform not in BACKENDS:
        raise UserError(f"attention kernels are for {' and '.join(BACKENDS)}, not {platform!r}; use implementation=xla")
    B, T, N, H = q.shape
    K, S = k.shape[1:3]
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if k.shape != (B, K, S, H) or v.shape != k.shape:
        raise UserError(f"attention kernels take q [B,T,N,H], k and v [B,K,S,H], not {shapes}")
    if N % K:
        raise UserError(f"{N} query heads are not a multiple of {K} key heads ({shapes})")
    if not MIN_HEAD_DIM <= H <= MAX_HEAD_DIM:
        raise UserError(
            f"attention kernels are for head_dim {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {H}; use implementation=xla"
        )
    if not q.dtype == k.dtype == v.dtype or str(jnp.dtype(q.dtype)) not in KERNEL_DTYPES[platform]:
        raise UserError(
            f"attention kernels for {platform} take q, k and v of one type of {', '.join(KERNEL_DTYPES[platform])}, "
            f"not {q.dtype}, {k.dtype}, {v.dtype}; use implementation=xla"
        )
    if (q_segments is None) != (k_segments is None):
        raise UserError("attention takes segments of both queries and keys, or of neither")
    for name, segments, expected in (("q", q_segments, (B, T)), ("k", k_segments, (B, S))):
        if segments is not None and segments.shape != expected:
            raise UserError(f"{name}_segments have shape {segments.shape}, not {expected}")
    if window < 0 or softcap < 0:
        raise UserError(f"window ({window}) and softcap ({softcap}) must be 0 (none) or more")
