"""Cross entropy that never holds the logits of the whole batch.

Tokens go through the head in chunks. Where gradients are wanted, each chunk's are taken while its logits
exist, so nothing is recomputed and the largest temporary is one chunk's float32 logits (the idea of
Liger Kernel's fused linear cross entropy, Hsu et al. 2024).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.model.transformer import softcap as apply_softcap


def _chunks(x: Array, size: int) -> Array:
    """[M, …] -> [ceil(M / size), size, …], padded with zeros (whose weight, too, is zero)."""
    padding = -x.shape[0] % size
    x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, size, *x.shape[1:])


def _token_losses(
    hidden: Float[Array, "C D"], table: Float[Array, "V D"], targets: Int[Array, " C"], softcap: float
) -> Float[Array, " C"]:
    logits = jnp.einsum("cd,vd->cv", hidden, table, preferred_element_type=jnp.float32)
    logits = apply_softcap(logits, softcap)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - chosen


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy(
    hidden: Float[Array, "M D"],
    table: Float[Array, "V D"],
    targets: Int[Array, " M"],
    weights: Float[Array, " M"],
    softcap: float,
    chunk: int,
) -> Float[Array, ""]:
    """Σ weight · (−log p(target)), float32, in nats.

    Args:
      table: the unembedding; logits are hidden · tableᵀ, in float32.
      weights: not differentiated.
      softcap: of the logits; 0 is none.
      chunk: tokens whose logits exist at one time.
    """

    def step(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        h, t, w = part
        return total + jnp.sum(w * _token_losses(h, table, t, softcap)), None

    size = min(chunk, hidden.shape[0])
    parts = (_chunks(hidden, size), _chunks(targets, size), _chunks(weights, size))
    return jax.lax.scan(step, jnp.zeros((), jnp.float32), parts)[0]


def _forward(
    hidden: Array, table: Array, targets: Array, weights: Array, softcap: float, chunk: int
) -> tuple[Array, tuple[Array, Array]]:
    def step(carry: tuple[Array, Array], part: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        total, table_grad = carry
        h, t, w = part

        def chunk_loss(h: Array, table: Array) -> Array:
            return jnp.sum(w * _token_losses(h, table, t, softcap))

        loss, (h_grad, one_table_grad) = jax.value_and_grad(chunk_loss, (0, 1))(h, table)
        return (total + loss, table_grad + one_table_grad.astype(jnp.float32)), h_grad

    size = min(chunk, hidden.shape[0])
    parts = (_chunks(hidden, size), _chunks(targets, size), _chunks(weights, size))
    start = (jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32))
    (total, table_grad), hidden_grad = jax.lax.scan(step, start, parts)
    hidden_grad = hidden_grad.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    return total, (hidden_grad, table_grad.astype(table.dtype))


def _backward(
    softcap: float, chunk: int, grads: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array, None, None]:
    hidden_grad, table_grad = grads
    return (
        (cotangent * hidden_grad).astype(hidden_grad.dtype),
        (cotangent * table_grad).astype(table_grad.dtype),
        None,
        None,
    )


cross_entropy.defvjp(_forward, _backward)
