"""Optimizers and learning-rate schedules, built from optax.

An optimizer here returns the *direction* of descent, and the train step multiplies it by the learning rate. The step
counter of the train state is therefore the only one that drives the schedule, also with gradient accumulation and after
a resume.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxllm.config import Architecture, LoraConfig, OptimizerConfig
from jaxllm.config.optimizers import OPTIMIZERS
from jaxllm.model.adapter_specs import trained_specs
from jaxllm.model.specs import ParamSpec, is_spec, map_specs

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


def make_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """Builds the schedule: the learning rate as a function of `step`, the number of updates already made (from 0).

    Warm-up increases linearly and reaches the peak at update `warmup_steps`. After it, `constant` stays at the peak;
    `linear` and `cosine` decay over the rest of the run to `final_lr_fraction` of the peak, the value for the update
    after the last one; `wsd` (warm-up, stable, decay: Hu et al. 2024) stays at the peak and decays linearly over the
    last `decay_steps`.

    Args:
      config: Optimizer configuration.
      steps: Number of updates of the run.
    """
    peak, final = config.peak_lr, config.peak_lr * config.final_lr_fraction
    rest = max(steps - config.warmup_steps, 1)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, final, rest)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, config.final_lr_fraction)
    else:
        decay = config.decay_steps or max(steps // 5, 1)
        decay = min(decay, rest)
        after = optax.linear_schedule(peak, final, decay, transition_begin=rest - decay)

    def schedule(step: Int[Array, ""]) -> Float[Array, ""]:
        warmup = config.warmup_steps
        rising = peak * (step + 1) / max(warmup, 1)
        return jnp.where(step < warmup, rising, after(step - warmup)).astype(jnp.float32)

    return schedule


def make_optimizer(
    config: OptimizerConfig, model: Architecture, lora: LoraConfig | None = None
) -> optax.GradientTransformation:
    """Builds the optimizer that returns the direction of descent: params ← params − lr · direction.

    The direction includes decoupled weight decay. It is computed in float32 whatever the dtypes of parameters,
    gradients and moments: in float16, Adam's epsilon is 0, and in bfloat16, a second moment stops growing. Between
    updates, moments are stored in `config.moment_dtype`.

    The rules and their sources are in `jaxllm.config.optimizers`.

    Args:
      config: Optimizer configuration.
      model: Architecture of the model.
      lora: Adapter configuration; with adapters, only they are updated. None means no adapters. Muon treats the A and B
        of an adapter as two separate matrices.
    """
    specs = trained_specs(model, lora or LoraConfig())
    record = OPTIMIZERS[config.name]
    direction = record.rule(config, specs)
    decays = map_specs(lambda spec: spec.decays, specs)
    weight_decay = config.weight_decay if record.weight_decay else 0.0
    decay = optax.add_decayed_weights(weight_decay, decays) if weight_decay else optax.identity()
    return _in_float32(optax.chain(direction, decay), jnp.dtype(config.moment_dtype), specs)


def _in_float32(
    optimizer: optax.GradientTransformation, moment_dtype: jnp.dtype, specs: Any
) -> optax.GradientTransformation:
    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def moments(state: Any, dtype: jnp.dtype) -> Any:
        return map_state(lambda x, _, spec: x if spec is None else x.astype(dtype), state, specs)

    def init(params: Any) -> Any:
        return moments(optimizer.init(cast(params)), moment_dtype)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        held = moments(state, jnp.dtype(jnp.float32))
        direction, held = optimizer.update(cast(gradients), held, cast(params))
        return direction, moments(held, moment_dtype)

    return optax.GradientTransformation(init, update)


def map_state(function: Callable[[Any, str, ParamSpec | None], Any], opt_state: Any, specs: Any) -> Any:
    """Maps `function(leaf, name, spec)` over the leaves of an optimizer state.

    `name` and `spec` are those of the parameter that the leaf belongs to, which is the one whose path is a suffix of
    the leaf's path. For counters they are "" and None. The shape of a factored moment differs from its parameter's.
    """
    by_path = {
        tuple(map(str, path)): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    }

    def visit(path: Any, leaf: Any) -> Any:
        keys = tuple(map(str, path))
        for start in range(len(keys)):
            if keys[start:] in by_path:
                return function(leaf, "".join(keys[start:]), by_path[keys[start:]])
        return function(leaf, "", None)

    return jax.tree_util.tree_map_with_path(visit, opt_state)


def clip_by_global_norm(gradients: Any, limit: float) -> tuple[Any, Float[Array, ""]]:
    """Clips gradients to a global norm of at most `limit` (0 is off); returns (gradients, norm before clipping)."""
    norm = optax.tree.norm(gradients)
    if not limit:
        return gradients, norm
    factor = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-16))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients), norm
