"""Update rules and schedules, from optax.

An optimizer here gives the *direction* of descent; the train step multiplies it by the schedule's learning
rate. So one counter, the state's step, drives the schedule, with or without accumulation and across a
resume.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from jaxllm.config import Architecture, LoraConfig, OptimizerConfig
from jaxllm.model.adapter_specs import trained_specs
from jaxllm.model.specs import ParamSpec, is_spec, map_specs

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


def make_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """Learning rate of the update that follows `step` updates (the first one: 0).

    Warm-up rises linearly to the peak and reaches it at update `warmup_steps`. After it: `constant`;
    `linear` and `cosine` fall over the rest of the run to `final_lr_fraction` of the peak, which the update
    after the last would have; `wsd` (warm-up, stable, decay: Hu et al. 2024) stays at the peak and falls linearly
    over the last `decay_steps`.
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
    """The direction of descent, decoupled weight decay included: params ← params − lr · direction.

    It computes in float32, whatever the dtypes of parameters, gradients and moments: in float16 Adam's epsilon is 0,
    and in bfloat16 a second moment stops growing. Between updates moments are in `config.moment_dtype`.

    Sources: Adam, Kingma & Ba 2015; AdamW, Loshchilov & Hutter 2019; Adafactor, Shazeer & Stern 2018 (its
    update is relative to each array's RMS); Lion, Chen et al. 2023; Muon, Jordan 2024, scaled to Adam's RMS
    as in Liu et al. 2025, on the matrices inside blocks, and Nesterov Adam on embeddings, head, biases and norms.

    Args:
      lora: adapters, which are then all that is updated; None is none. Each of their two matrices is one to Muon.
    """
    specs = trained_specs(model, lora or LoraConfig())
    name = config.name
    if name == "sgd":
        direction = optax.identity()
    elif name == "momentum":
        direction = optax.trace(decay=config.b1)
    elif name in ("adam", "adamw"):
        direction = optax.scale_by_adam(config.b1, config.b2, config.eps)
    elif name == "adafactor":
        direction = optax.chain(
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
        )
    elif name == "lion":
        direction = optax.scale_by_lion(config.b1, config.b2)
    else:
        direction = _muon(config, specs)
    decays = map_specs(lambda spec: spec.decays, specs)
    # Adam with decay is called AdamW; the plain name stays plain.
    weight_decay = 0.0 if name == "adam" else config.weight_decay
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
    """The optimizer state with `function(leaf, name, spec)` in place of each leaf.

    `name` and `spec` are those of the parameter that a leaf belongs to: its path ends with the parameter's. They are
    "" and None for counters. A factored moment has another shape than its parameter.
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


def _muon(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    def dimensions(spec: ParamSpec) -> optax.contrib.MuonDimensionNumbers | None:
        if spec.role != "matrix":
            return None
        output = [i for i, axis in enumerate(spec.axes) if i not in spec.fan_in and not _is_matrix_batch(spec, i, axis)]
        return optax.contrib.MuonDimensionNumbers(reduction_axis=spec.fan_in, output_axis=tuple(output))

    return optax.contrib.muon(
        learning_rate=-1.0,  # optax negates it, which leaves the direction
        beta=config.b1,
        adam_b1=config.b1,
        adam_b2=config.b2,
        eps=config.eps,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=map_specs(dimensions, specs),
    )


def _is_matrix_batch(spec: ParamSpec, index: int, axis: str) -> bool:
    """Dimensions that count matrices: stacked layers, and experts (but the router's experts are its outputs)."""
    return axis == "layers" or (axis == "experts" and index < min(spec.fan_in))


def clip_by_global_norm(gradients: Any, limit: float) -> tuple[Any, Float[Array, ""]]:
    """(gradients scaled to a global norm of at most `limit`, the norm before); a limit of 0 is no clipping."""
    norm = optax.tree.norm(gradients)
    if not limit:
        return gradients, norm
    factor = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-16))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients), norm
