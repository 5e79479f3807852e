"""Attention implementations that the suite runs: our kernels, cuDNN's, XLA's, and the two kernels in JAX's source tree.

Each is a function of q, k and v in its native layout, so no timing includes a transpose.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.kernels.flash.api import flash_attention

Attend = Callable[..., jax.Array]
TRITON = "triton"
# Longest sequence for XLA's attention, which materializes all scores.
XLA_LENGTH = 4096


def jaxllm_versions(device: jax.Device) -> dict[str, dict[str, Any]]:
    """Returns, by name, the `flash_attention` arguments of each version: Triton, and Mosaic (wgmma) on Hopper."""
    found: dict[str, dict[str, Any]] = {TRITON: {}}
    if str(getattr(device, "compute_capability", "")).startswith("9."):
        found["mosaic"] = {"backend": "mosaic_gpu"}
    return found


def jaxllm_attention(
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


def jaxllm_causal(head_dim: int, **version: Any) -> Any:
    """Returns a function of (q, k, v) that computes causal self-attention."""
    return functools.partial(jaxllm_attention, causal=True, window=0, scale=head_dim**-0.5, softcap=0.0, **version)


def third_party_names(device: jax.Device) -> list[str]:
    """Returns the names of the third-party implementations that may run on a device."""
    if device.platform != "gpu":
        return ["xla"]
    hopper = str(getattr(device, "compute_capability", "")).startswith("9.")
    return ["cudnn", "jax triton", *(["jax mosaic"] if hopper else [])]


def third_party(name: str, head_dim: int, backward: bool) -> Attend:
    """Returns a function of q, k and v, each [B,T,N,H], that computes causal self-attention.

    Raises:
      ImportError, AttributeError: this JAX does not have the kernel.
      NotImplementedError: the kernel has no backward pass.
    """
    if name in ("cudnn", "xla"):
        return functools.partial(
            jax.nn.dot_product_attention, is_causal=True, scale=head_dim**-0.5, implementation=name
        )
    if name == "jax triton":
        from jax.experimental.pallas.ops.gpu import attention  # may be removed in a later JAX

        def mha(q: Any, k: Any, v: Any) -> jax.Array:
            return attention.mha(q, k, v, segment_ids=None, sm_scale=head_dim**-0.5, causal=True)

        return mha
    from jax.experimental.pallas.ops.gpu import attention_mgpu  # only importable in CUDA builds

    if backward:
        raise NotImplementedError("its causal form has no backward pass")
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=256 if head_dim <= 64 else 128, max_concurrent_steps=2, causal=True
    )
    return lambda q, k, v: attention_mgpu.attention(q, k, v, config)


def arrays(batch: int, length: int, heads: int, head_dim: int, ours: bool) -> tuple[jax.Array, ...]:
    """Returns bfloat16 q, k, v and output gradient; k and v are heads-first [B,N,T,H] if `ours`, else [B,T,N,H]."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (batch, length, heads, head_dim)
    kv_shape = (batch, heads, length, head_dim) if ours else shape
    shapes = (shape, kv_shape, kv_shape, shape)
    return tuple(jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))


def program(attend: Attend, backward: bool) -> Any:
    """Returns a jitted forward pass, or, with `backward`, forward plus backward that returns the gradients."""
    if not backward:
        return jax.jit(lambda q, k, v, d_out: attend(q, k, v))

    def gradients(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        _, pull = jax.vjp(attend, q, k, v)
        return pull(d_out)

    return jax.jit(gradients)
