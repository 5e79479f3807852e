"""Chunked, vocabulary-parallel cross entropy that never materializes the logits of the whole batch.

The head is applied to one chunk of tokens at a time. In training, the gradients of a chunk are computed in the forward
pass while its logits exist, so nothing is recomputed and the largest temporary is one chunk's float32 logits (as in
Liger Kernel's fused linear cross entropy, Hsu et al. 2024). If the head is sharded over devices, each device computes
the logits of its own vocabulary rows, and the devices exchange only one element per token and statistic.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.model.transformer import softcap as apply_softcap
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives


@dataclasses.dataclass(frozen=True)
class Head:
    """Static settings of the output head for the loss.

    Attributes:
      vocab_size: Number of token ids; further rows of the table are padding.
      softcap: Cap of the logits; 0 is no cap.
      chunk: Number of tokens whose logits are materialized at once.
      tensor: Number of devices that the rows of the table are sharded over.
    """

    vocab_size: int
    softcap: float
    chunk: int
    tensor: int = 1

    @property
    def collectives(self) -> Collectives:
        """Collectives over the devices that the table is sharded over."""
        return dataclasses.replace(SINGLE_DEVICE, tensor=self.tensor)


def _chunks(x: Array, size: int) -> Array:
    """Reshapes [M, …] to [ceil(M / size), size, …], padded with zeros; padded tokens have weight 0."""
    padding = -x.shape[0] % size
    x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, size, *x.shape[1:])


def _chunk_inputs(hidden: Array, targets: Array, weights: Array, head: Head) -> tuple[Array, Array, Array]:
    size = min(head.chunk, hidden.shape[0])
    return _chunks(hidden, size), _chunks(targets, size), _chunks(weights, size)


def _statistics(
    hidden: Float[Array, "C D"], table: Float[Array, "v D"], targets: Int[Array, " C"], head: Head
) -> tuple[Float[Array, "C v"], Float[Array, "C v"], Float[Array, "C 1"], Float[Array, " C"], Int[Array, " C"]]:
    """Returns (capped logits, exp(logits − max), its sum over V, −log p(target), local row of the target or −1)."""
    logits = jnp.einsum("cd,vd->cv", hidden, table, preferred_element_type=jnp.float32)
    logits = apply_softcap(logits, head.softcap)
    rows = table.shape[0]
    first = head.collectives.first(rows)
    if rows * head.tensor > head.vocab_size:
        logits = jnp.where((first + jnp.arange(rows) < head.vocab_size)[None], logits, -jnp.inf)
    max_logit = logits.max(1, keepdims=True)
    if head.tensor > 1:
        max_logit = jax.lax.pmax(max_logit, "tensor")
    exponentials = jnp.exp(logits - max_logit)
    total = exponentials.sum(1, keepdims=True)
    local = targets - first
    local = jnp.where((local >= 0) & (local < rows), local, -1)
    target_logit = jnp.take_along_axis(logits, jnp.maximum(local, 0)[:, None], axis=1)[:, 0]
    target_logit = jnp.where(local >= 0, target_logit, 0.0)
    if head.tensor > 1:
        total, target_logit = jax.lax.psum((total, target_logit), "tensor")
    return logits, exponentials, total, jnp.log(total[:, 0]) + max_logit[:, 0] - target_logit, local


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    hidden: Float[Array, "M D"],
    table: Float[Array, "v D"],
    targets: Int[Array, " M"],
    weights: Float[Array, " M"],
    head: Head,
) -> Float[Array, ""]:
    """Computes Σ weight · (−log p(target)) in nats, float32; equal on all devices that the table is sharded over.

    The gradients are those of this device's rows of the table: the gradient of `hidden` must be summed over `tensor`.

    Args:
      hidden: Hidden states of all tokens of this device's rows.
      table: Unembedding matrix, or this device's rows of it. Logits are hidden · tableᵀ in float32.
      targets: Target ids.
      weights: Weight of each token's loss; not differentiated.
      head: Static settings of the head.
    """

    def step(total: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, None]:
        h, t, w = chunk
        return total + jnp.sum(w * _statistics(h, table, t, head)[3]), None

    return jax.lax.scan(step, jnp.zeros((), jnp.float32), _chunk_inputs(hidden, targets, weights, head))[0]


def _forward(
    hidden: Any, table: Any, targets: Any, weights: Any, head: Head
) -> tuple[Array, tuple[Array, Array | None]]:
    trained = table.perturbed  # False if the table is frozen: no gradient is computed
    hidden, table, targets, weights = (x.value for x in (hidden, table, targets, weights))

    def step(carry: tuple[Array, Any], chunk: tuple[Array, Array, Array]) -> tuple[tuple[Array, Any], Array]:
        total, table_grad = carry
        h, t, w = chunk
        logits, exponentials, sums, losses, local = _statistics(h, table, t, head)
        d_logits = exponentials / sums - jax.nn.one_hot(local, table.shape[0])
        if head.softcap:
            d_logits = d_logits * (1.0 - jnp.square(jnp.where(jnp.isfinite(logits), logits, 0.0) / head.softcap))
        # Cast d_logits to the compute dtype, so that in 16-bit training both matmuls have 16-bit inputs.
        d_logits = (d_logits * w[:, None]).astype(h.dtype)
        h_grad = jnp.einsum("cv,vd->cd", d_logits, table)
        if trained:
            table_grad = table_grad + jnp.einsum("cv,cd->vd", d_logits, h, preferred_element_type=jnp.float32)
        return (total + jnp.sum(w * losses), table_grad), h_grad

    start = (jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32) if trained else None)
    (total, table_grad), hidden_grad = jax.lax.scan(step, start, _chunk_inputs(hidden, targets, weights, head))
    hidden_grad = hidden_grad.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    return total, (hidden_grad, None if table_grad is None else table_grad.astype(table.dtype))


def _backward(
    head: Head, grads: tuple[Array, Array | None], cotangent: Array
) -> tuple[Array, Array | None, None, None]:
    hidden_grad, table_grad = grads
    return (
        (cotangent * hidden_grad).astype(hidden_grad.dtype),
        None if table_grad is None else (cotangent * table_grad).astype(table_grad.dtype),
        None,
        None,
    )


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)
