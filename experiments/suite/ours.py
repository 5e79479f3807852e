"""Wrappers through which the suite calls our attention kernels, in every available version."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxllm.kernels.flash.api import flash_attention

TRITON = "triton"


def versions(device: jax.Device) -> dict[str, dict[str, Any]]:
    """Returns, by name, the `flash_attention` arguments of each version: Triton, and Mosaic (wgmma) on Hopper."""
    found: dict[str, dict[str, Any]] = {TRITON: {}}
    if str(getattr(device, "compute_capability", "")).startswith("9."):
        found["mosaic"] = {"backend": "mosaic_gpu"}
    return found


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    *segments: Array,
    **options: Any,
) -> Float[Array, "B T N H"]:
    """Calls `flash_attention` with the GPU kernels, interpreted on a CPU."""
    return flash_attention(q, k, v, *segments, **options, platform="gpu", interpret=interpreted())


def interpreted() -> bool:
    """Returns True if kernels run in interpret mode, because the backend is a CPU."""
    return jax.default_backend() == "cpu"


def causal(head_dim: int, **version: Any) -> Any:
    """Returns a function of (q, k, v) that computes causal self-attention."""
    return functools.partial(attend, causal=True, window=0, scale=head_dim**-0.5, softcap=0.0, **version)
