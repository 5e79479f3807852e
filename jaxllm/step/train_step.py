"""Training step as a pure function; `jaxllm.programs` jits it.

Gradients are computed inside `shard_map` with explicit collectives (`jaxllm.step.gradients`). The update
(`jaxllm.step.update`) operates on global arrays, and XLA's partitioner runs it on each device's shards.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxllm.step import update
from jaxllm.step.gradients import Batch, accumulate
from jaxllm.step.optimizers import clip_by_global_norm
from jaxllm.step.placement import Layout
from jaxllm.step.precision import adjust, loss_factor
from jaxllm.step.spec import StepSpec
from jaxllm.step.state import TrainState


def train_step(
    state: TrainState, batch: Batch, step_spec: StepSpec, layout: Layout
) -> tuple[TrainState, dict[str, Array]]:
    """Makes one optimizer update.

    Args:
      state: State before the step.
      batch: Global batch of the step.
      step_spec: Specification of the training step.
      layout: Sharding of state and gradients.

    Returns:
      (new state, metrics). Metrics are float32 scalars: loss (nats per token), grad_norm (before clipping), lr, tokens,
      and for MoE models aux_loss (weighted load-balancing loss). With a loss scale, there are also loss_scale and
      skipped, which is 1 if gradients overflowed; parameters, moments and step are then unchanged.
    """
    scale = state.loss_scale
    factor = loss_factor(scale, batch["tokens"].size)
    total, gradients = accumulate(layout.params_on_device(state), batch, step_spec, layout, factor, state.frozen)
    # Mean over the tokens of the step; the maximum prevents 0 / 0 in a step without tokens.
    tokens = jnp.maximum(total["tokens"], 1.0)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / (tokens * factor), gradients)
    gradients, grad_norm = clip_by_global_norm(gradients, step_spec.clip_norm)

    lr = step_spec.schedule(state.step)
    metrics = {"loss": total["nll"] / tokens, "grad_norm": grad_norm, "lr": lr, "tokens": total["tokens"]}
    if step_spec.model.experts:
        metrics["aux_loss"] = total["aux_loss"] / tokens
    finite, step = None, state.step + 1
    if scale is not None:
        finite = jnp.isfinite(grad_norm)
        step = jnp.where(finite, step, state.step)
        metrics |= {"skipped": 1.0 - finite.astype(jnp.float32), "loss_scale": scale.scale}
        scale = adjust(scale, finite, step_spec.scale_growth)
    params, opt_state = update.apply(state, gradients, lr, finite, step_spec, layout)
    return TrainState(step, params, opt_state, state.key, scale, state.frozen), metrics
