"""Third-party attention, where available: cuDNN's, XLA's, and the two GPU kernels in JAX's source tree.

`made` returns each as a function of q, k and v in its native layout, so no timing includes a transpose.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Attend = Callable[..., jax.Array]
# Longest sequence for XLA's attention, which materializes all scores.
XLA_LENGTH = 4096


def names(device: jax.Device) -> list[str]:
    """Returns the names of the implementations that may run on a device."""
    if device.platform != "gpu":
        return ["xla"]
    hopper = str(getattr(device, "compute_capability", "")).startswith("9.")
    return ["cudnn", "jax triton", *(["jax mosaic"] if hopper else [])]


def made(name: str, head_dim: int, backward: bool) -> Attend:
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
    of_keys = (batch, heads, length, head_dim) if ours else shape
    shapes = (shape, of_keys, of_keys, shape)
    return tuple(jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))


def program(attend: Attend, backward: bool) -> Any:
    """Returns a jitted forward pass, or, with `backward`, forward plus backward that returns the gradients."""
    if not backward:
        return jax.jit(lambda q, k, v, change: attend(q, k, v))

    def gradients(q: Any, k: Any, v: Any, change: Any) -> Any:
        _, pull = jax.vjp(attend, q, k, v)
        return pull(change)

    return jax.jit(gradients)
