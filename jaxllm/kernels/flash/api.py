"""Attention without its matrix of scores, forward and backward: memory grows with the length, not with its square.

FlashAttention-2 (Dao 2023) in Pallas. Between the passes wait the inputs, the output and a float32 a query and head.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxllm.config.attention import KERNEL_DTYPES, LARGEST_HEAD, LEAST_HEAD
from jaxllm.errors import UserError
from jaxllm.kernels.flash import mosaic_gpu as flash_mosaic_gpu
from jaxllm.kernels.flash import tpu as flash_tpu
from jaxllm.kernels.flash import triton as flash_triton
from jaxllm.kernels.flash.tile import Inputs, Rule
from jaxllm.kernels.flash.tile_sizes import Tiles, tiles_for

# Of each platform by the name of its compiler path, the default first: the kernels (forward, backward).
BACKENDS: dict[str, dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "gpu": {
        "triton": (flash_triton.forward, flash_triton.backward),
        "mosaic_gpu": (flash_mosaic_gpu.forward, flash_triton.backward),
    },
    "tpu": {"mosaic": (flash_tpu.forward, flash_tpu.backward)},
}


@dataclasses.dataclass(frozen=True)
class _How:
    """Which kernels run, and how; static."""

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
    blocks: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q·k·scale)) · v over the keys that a query sees; `reference.attention` by another order of sums.

    Places are counted by index: query t stands at t + S - T. This is `reference.attention_mask` wherever positions
    grow by one from token to token within a segment, as they do in training and in a prefill without padding between
    tokens. Query head n uses key head n // (N / K). Scores, softmax and all sums are float32; weights are rounded to
    the inputs' type before they meet values. A query that sees no key gets 0, and gives no gradients.

    Under `jax.checkpoint` the output is named "attn_context" and log(sum(exp(scores))) "attn_lse": a policy that keeps
    both need not run the forward kernel again.

    Args:
      q_segments, k_segments: tokens see their own segment only; padding (0) is a segment like others. Both or neither.
      causal: a query sees no key after its own place.
      window: keys at a distance below it are seen, so a query's own is the first; 0 is all. Where not causal, it
        reaches as far ahead as back.
      softcap: c·tanh(score / c) before the mask (Gemma 2); 0 is none.
      platform: whose kernels: "gpu" or "tpu".
      backend: which of a GPU's: "triton", for all of them and the default, or "mosaic_gpu", for Hopper: its output is
        by a kernel of `flash_mosaic_gpu`, its gradients by Triton's.
      blocks: sizes of the kernels' tiles; None: those of `flash_blocks`.
      interpret: run them as plain JAX, on any device; slow, for tests.
    Raises:
      UserError: shapes or types that the kernels cannot do; there is no silent fallback.
    """
    _require(q, k, v, q_segments, k_segments, window, softcap, platform)
    backend = backend or next(iter(BACKENDS[platform]))
    if backend not in BACKENDS[platform]:
        raise UserError(f"attention on {platform} has the backends {', '.join(BACKENDS[platform])}, not {backend!r}")
    how = _How(platform, backend, blocks or tiles_for(backend, q.shape[3], q.dtype), interpret)
    rule = Rule(q.shape[1], k.shape[2], causal, window, scale, softcap)
    return _attend(Inputs(q, k, v, q_segments, k_segments), rule, how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _attend(inputs: Inputs, rule: Rule, how: _How) -> Array:
    run, _ = BACKENDS[how.platform][how.backend]
    return run(inputs, rule, how.tiles, how.interpret)[0]


def _forward(inputs: Inputs, rule: Rule, how: _How) -> tuple[Array, tuple[Inputs, Array, Array]]:
    run, _ = BACKENDS[how.platform][how.backend]
    out, lse = run(inputs, rule, how.tiles, how.interpret)
    out, lse = checkpoint_name(out, "attn_context"), checkpoint_name(lse, "attn_lse")
    return out, (inputs, out, lse)


def _backward(rule: Rule, how: _How, saved: tuple[Inputs, Array, Array], change: Array) -> tuple[Inputs]:
    _, run = BACKENDS[how.platform][how.backend]
    return (Inputs(*run(*saved, change, rule, how.tiles, how.interpret)),)


_attend.defvjp(_forward, _backward)


def _require(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array | None,
    k_segments: Array | None,
    window: int,
    softcap: float,
    platform: str,
) -> None:
    """Raises UserError for what the kernels cannot do."""
    if platform not in BACKENDS:
        raise UserError(f"attention kernels are for {' and '.join(BACKENDS)}, not {platform!r}; use implementation=xla")
    B, T, N, H = q.shape
    K, S = k.shape[1:3]
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if k.shape != (B, K, S, H) or v.shape != k.shape:
        raise UserError(f"attention kernels take q [B,T,N,H], k and v [B,K,S,H], not {shapes}")
    if N % K:
        raise UserError(f"{N} query heads are not a multiple of {K} key heads ({shapes})")
    if not LEAST_HEAD <= H <= LARGEST_HEAD:
        raise UserError(
            f"attention kernels are for head_dim {LEAST_HEAD} to {LARGEST_HEAD}, not {H}; use implementation=xla"
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
