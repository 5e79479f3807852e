"""Our attention kernels as the suite calls them, in each version that this checkout has."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxllm.kernels.flash.api import flash_attention

TRITON = "triton"


def versions(device: jax.Device) -> dict[str, dict[str, Any]]:
    """Name -> the arguments of `flash_attention` that choose it: Triton's, and on a Hopper Mosaic's (of its wgmma)."""
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
    """`flash_attention` by its kernel for GPUs; on a CPU interpreted."""
    return flash_attention(q, k, v, *segments, **options, platform="gpu", interpret=interpreted())


def interpreted() -> bool:
    """Whether kernels run as plain JAX: where there is no GPU."""
    return jax.default_backend() == "cpu"


def causal(head_dim: int, **version: Any) -> Any:
    """(q, k, v) -> causal self-attention."""
    return functools.partial(attend, causal=True, window=0, scale=head_dim**-0.5, softcap=0.0, **version)
