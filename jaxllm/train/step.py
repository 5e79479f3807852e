"""One training step and one evaluation step, as pure functions. `jaxllm.programs` jits them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxllm.config import Architecture
from jaxllm.model.loss import cross_entropy
from jaxllm.model.transformer import forward, unembedding
from jaxllm.train.optimizer import Schedule, clip_by_global_norm
from jaxllm.train.precision import Policy
from jaxllm.train.state import TrainState

Batch = dict[str, Array]  # tokens, targets, segment_ids, positions: int32 [B, T]; weights: float32 [B, T]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a step needs beside its state and batch, all of it fixed for a run."""

    model: Architecture
    optimizer: optax.GradientTransformation
    schedule: Schedule
    policy: Policy
    clip_norm: float
    accumulate: int
    remat: str
    loss_chunk: int


def train_step(state: TrainState, batch: Batch, recipe: Recipe) -> tuple[TrainState, dict[str, Array]]:
    """One update. Returns the new state and float32 scalars: loss (nats a token), grad_norm, lr, tokens, balance."""
    total, gradients = accumulate_gradients(state.params, batch, recipe)
    loss, gradients = average(total, gradients)
    gradients, grad_norm = clip_by_global_norm(gradients, recipe.clip_norm)
    direction, opt_state = recipe.optimizer.update(gradients, state.opt_state, state.params)
    lr = recipe.schedule(state.step)
    params = jax.tree.map(lambda p, d: p - lr * d, state.params, direction)

    new_state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)  # type: ignore[attr-defined]
    metrics = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": total["tokens"]}
    if recipe.model.experts:
        metrics["balance"] = total["balance"] / jnp.maximum(total["tokens"], 1.0)
    return new_state, metrics


def loss_sums(params: Any, batch: Batch, recipe: Recipe) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Sums over tokens, not means, so that every token of a step weighs the same wherever it lies.

    Returns:
      (what is differentiated, {"nll": Σ weight·nats, "tokens": Σ weight, "balance": load balancing × tokens}).
    """
    model = recipe.model
    params = recipe.policy.cast(params)
    hidden, _, balance = forward(
        params, batch["tokens"], batch["positions"], model, segments=batch["segment_ids"], remat=recipe.remat
    )
    tokens = batch["weights"].sum()
    nll = cross_entropy(
        hidden.reshape(-1, model.width),
        unembedding(params),
        batch["targets"].reshape(-1),
        batch["weights"].reshape(-1),
        model.logit_softcap,
        recipe.loss_chunk,
    )
    sums = {"nll": nll, "tokens": tokens, "balance": balance * tokens}
    return nll + balance * tokens, sums


def accumulate_gradients(params: Any, batch: Batch, recipe: Recipe) -> tuple[dict[str, Array], Any]:
    """Sums of losses and gradients over the micro-batches, which run one after another."""
    differentiate = jax.grad(loss_sums, has_aux=True)
    if recipe.accumulate == 1:
        gradients, sums = differentiate(params, batch, recipe)
        return sums, gradients

    def micro_step(carry: Any, micro_batch: Batch) -> tuple[Any, None]:
        gradients, sums = differentiate(params, micro_batch, recipe)
        return jax.tree.map(jnp.add, carry, (sums, gradients)), None

    # Interleaved, row i of each group of `accumulate` rows: a device keeps the rows it has.
    micro_batches = jax.tree.map(lambda x: x.reshape(-1, recipe.accumulate, *x.shape[1:]).swapaxes(0, 1), batch)
    zero = jnp.zeros((), jnp.float32)
    start = ({"nll": zero, "tokens": zero, "balance": zero}, jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(micro_step, start, micro_batches)[0]


def average(total: dict[str, Array], gradients: Any) -> tuple[Float[Array, ""], Any]:
    """(mean loss, mean gradient) over the step's tokens; a step without tokens changes nothing."""
    scale = 1.0 / jnp.maximum(total["tokens"], 1.0)
    return total["nll"] * scale, jax.tree.map(lambda g: g * scale, gradients)


def eval_step(params: Any, batch: Batch, recipe: Recipe) -> dict[str, Array]:
    """Sums over one batch: {"nll", "tokens"}, as in `loss_sums`."""
    _, sums = loss_sums(params, batch, recipe)
    return {"nll": sums["nll"], "tokens": sums["tokens"]}
