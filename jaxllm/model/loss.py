"""Cross entropy that never holds the logits of the whole batch, nor those of the whole vocabulary.

Tokens go through the head in chunks. Where gradients are wanted, each chunk's are taken while its logits
exist, so nothing is recomputed and the largest temporary is one chunk's float32 logits (the idea of
Liger Kernel's fused linear cross entropy, Hsu et al. 2024). Where the head is split over devices, each has the
logits of its own words, and only numbers of one a token cross between them.
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
    """What the loss needs to know of the head beside its table.

    Attributes:
      vocab_size: words; rows of the table beyond them are padding.
      softcap: of the logits; 0 is none.
      chunk: tokens whose logits exist at one time.
      tensor: devices that the table's rows are split over.
    """

    vocab_size: int
    softcap: float
    chunk: int
    tensor: int = 1

    @property
    def collectives(self) -> Collectives:
        return dataclasses.replace(SINGLE_DEVICE, tensor=self.tensor)


def _chunks(x: Array, size: int) -> Array:
    """[M, …] -> [ceil(M / size), size, …], padded with zeros (whose weight, too, is zero)."""
    padding = -x.shape[0] % size
    x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, size, *x.shape[1:])


def _parts(hidden: Array, targets: Array, weights: Array, head: Head) -> tuple[Array, Array, Array]:
    size = min(head.chunk, hidden.shape[0])
    return _chunks(hidden, size), _chunks(targets, size), _chunks(weights, size)


def _statistics(
    hidden: Float[Array, "C D"], table: Float[Array, "v D"], targets: Int[Array, " C"], head: Head
) -> tuple[Float[Array, "C v"], Float[Array, "C v"], Float[Array, "C 1"], Float[Array, " C"], Int[Array, " C"]]:
    """(capped logits, exp(logits − highest), its sum over the vocabulary, −log p(target), target's row or −1)."""
    logits = jnp.einsum("cd,vd->cv", hidden, table, preferred_element_type=jnp.float32)
    logits = apply_softcap(logits, head.softcap)
    rows = table.shape[0]
    first = head.collectives.first(rows)
    if rows * head.tensor > head.vocab_size:
        logits = jnp.where((first + jnp.arange(rows) < head.vocab_size)[None], logits, -jnp.inf)
    highest = logits.max(1, keepdims=True)
    if head.tensor > 1:
        highest = jax.lax.pmax(highest, "tensor")
    exponentials = jnp.exp(logits - highest)
    total = exponentials.sum(1, keepdims=True)
    local = targets - first
    local = jnp.where((local >= 0) & (local < rows), local, -1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(local, 0)[:, None], axis=1)[:, 0]
    chosen = jnp.where(local >= 0, chosen, 0.0)
    if head.tensor > 1:
        total, chosen = jax.lax.psum((total, chosen), "tensor")
    return logits, exponentials, total, jnp.log(total[:, 0]) + highest[:, 0] - chosen, local


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    hidden: Float[Array, "M D"],
    table: Float[Array, "v D"],
    targets: Int[Array, " M"],
    weights: Float[Array, " M"],
    head: Head,
) -> Float[Array, ""]:
    """Σ weight · (−log p(target)), float32, in nats; the same on every device that has a part of the table.

    Its gradients are of this device's part: that of `hidden` is to be summed over `tensor`.

    Args:
      table: the unembedding, or this device's rows of it; logits are hidden · tableᵀ, in float32.
      weights: not differentiated.
    """

    def step(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        h, t, w = part
        return total + jnp.sum(w * _statistics(h, table, t, head)[3]), None

    return jax.lax.scan(step, jnp.zeros((), jnp.float32), _parts(hidden, targets, weights, head))[0]


def _forward(
    hidden: Any, table: Any, targets: Any, weights: Any, head: Head
) -> tuple[Array, tuple[Array, Array | None]]:
    trained = table.perturbed  # a frozen table has no gradient, and none is made
    hidden, table, targets, weights = (x.value for x in (hidden, table, targets, weights))

    def step(carry: tuple[Array, Any], part: tuple[Array, Array, Array]) -> tuple[tuple[Array, Any], Array]:
        total, table_grad = carry
        h, t, w = part
        logits, exponentials, sums, losses, local = _statistics(h, table, t, head)
        change = exponentials / sums - jax.nn.one_hot(local, table.shape[0])
        if head.softcap:
            change = change * (1.0 - jnp.square(jnp.where(jnp.isfinite(logits), logits, 0.0) / head.softcap))
        # In the compute dtype, so that both products are of 16-bit numbers where the model is.
        change = (change * w[:, None]).astype(h.dtype)
        h_grad = jnp.einsum("cv,vd->cd", change, table)
        if trained:
            table_grad = table_grad + jnp.einsum("cv,cd->vd", change, h, preferred_element_type=jnp.float32)
        return (total + jnp.sum(w * losses), table_grad), h_grad

    start = (jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32) if trained else None)
    (total, table_grad), hidden_grad = jax.lax.scan(step, start, _parts(hidden, targets, weights, head))
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
