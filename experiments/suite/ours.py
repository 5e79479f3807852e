"""Our attention kernels as the suite calls them, in each version that this checkout has."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxllm.kernels import flash_triton
from jaxllm.kernels.flash_attention import flash_attention
from jaxllm.kernels.flash_blocks import Tiles

TRITON = "triton"
_TAKES = inspect.signature(flash_attention).parameters


def versions(device: jax.Device) -> dict[str, dict[str, Any]]:
    """Name -> the arguments of `flash_attention` that choose it: Triton's, and Mosaic's from Hopper on."""
    found: dict[str, dict[str, Any]] = {TRITON: {}}
    capability = str(getattr(device, "compute_capability", "0"))
    if "backend" in _TAKES and float(capability or 0) >= 9:
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


@contextlib.contextmanager
def tiles(chosen: Tiles) -> Iterator[None]:
    """What is traced within works in these tiles."""
    real = flash_triton.tiles_for
    flash_triton.tiles_for = lambda *_: chosen
    jax.clear_caches()  # of traces with other tiles
    try:
        yield
    finally:
        flash_triton.tiles_for = real
        jax.clear_caches()
