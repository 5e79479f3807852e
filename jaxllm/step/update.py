"""Optimizer update of parameters and moments: all arrays at once, or streamed one by one if they are offloaded.

An array offloaded to host memory (ZeRO-Offload, Ren et al. 2021) is copied to the device for its update and back to the
host before the next array is copied, so only a few such arrays are in device memory at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.step.optimizers import map_state
from jaxllm.step.placement import Layout
from jaxllm.step.spec import StepSpec
from jaxllm.step.state import TrainState


def apply(
    state: TrainState,
    gradients: Any,
    lr: Float[Array, ""],
    finite: Bool[Array, ""] | None,
    step_spec: StepSpec,
    layout: Layout,
) -> tuple[Any, Any]:
    """Applies params ← params − lr · direction; returns (parameters, optimizer state).

    Args:
      state: State before the update.
      gradients: Float32 gradients with the placements `layout.moments`.
      lr: Learning rate.
      finite: If False, parameters and optimizer state stay bitwise unchanged; None skips this check.
      step_spec: Specification of the training step.
      layout: Sharding of state and gradients.
    """
    if not layout.host_moments:
        weights = layout.constrain(state.params, layout.moments)
        return _update(weights, state.opt_state, gradients, lr, finite, step_spec)
    return _update_streamed(state, gradients, lr, finite, step_spec, layout)


def _update(
    weights: Any, opt_state: Any, gradients: Any, lr: Array, finite: Array | None, step_spec: StepSpec
) -> tuple[Any, Any]:
    direction, new_state = step_spec.optimizer.update(gradients, opt_state, weights)
    params = jax.tree.map(lambda p, d: (p.astype(jnp.float32) - lr * d).astype(p.dtype), weights, direction)
    if finite is None:
        return params, new_state
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), (params, new_state), (weights, opt_state))


def _update_streamed(
    state: TrainState, gradients: Any, lr: Array, finite: Array | None, step_spec: StepSpec, layout: Layout
) -> tuple[Any, Any]:
    """Updates one parameter array at a time, with only its weights and moments copied to the device."""
    storage = layout.state_shardings(state)
    on_device = layout.state_shardings(state, on_device=True)
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
    # Counters stay on the device. Each call of the optimizer advances its own copy by the same amount.
    new_params: dict[str, Array] = {}
    new_moments: dict[tuple[str, int], Array] = {}
    counters: Any = None
    previous: Any = lr
    for name in names:
        params, moments = _select(state.params, name), _select_moments(state.opt_state, name, layout)
        # Start this transfer only after the previous array is back in host memory.
        (params, moments), previous = jax.lax.optimization_barrier(((params, moments), previous))
        params = jax.device_put(params, _select(on_device.params, name))
        moments = jax.device_put(moments, _select_moments(on_device.opt_state, name, layout))
        weights = layout.constrain(params, _select(layout.moments, name))
        new_weights, new_state = _update(weights, moments, _select(gradients, name), lr, finite, step_spec)
        new_weights = jax.device_put(new_weights, _select(storage.params, name))
        new_state = jax.device_put(new_state, _select_moments(storage.opt_state, name, layout))
        (new_params[name],) = jax.tree.leaves(new_weights)
        own_moments = [leaf for leaf, owner in _arrays_and_owners(new_state, layout) if owner == name]
        new_moments |= {(name, i): leaf for i, leaf in enumerate(own_moments)}
        counters = new_state
        previous = (new_params[name], own_moments)
    return (
        jax.tree_util.tree_map_with_path(lambda path, _: new_params[_name(path)], state.params),
        _merge_moments(state.opt_state, counters, new_moments, layout),
    )


def _name(path: Any) -> str:
    return "".join(map(str, path))


def _select(tree: Any, name: str) -> Any:
    """Returns a tree with the structure of the parameters in which every array except one is None."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x if _name(path) == name else None, tree)


def _select_moments(opt_state: Any, name: str, layout: Layout) -> Any:
    """Returns the optimizer state with only the counters and the moments of one parameter; the rest is None."""
    return map_state(lambda x, owner, spec: x if spec is None or owner == name else None, opt_state, layout.specs)


def _arrays_and_owners(opt_state: Any, layout: Layout) -> list[tuple[Array, str]]:
    """Lists the arrays of an optimizer state with the names of their parameters ("" for counters), in tree order."""
    arrays: list[tuple[Array, str]] = []
    map_state(lambda x, owner, _: arrays.append((x, owner)), opt_state, layout.specs)
    return arrays


def _merge_moments(opt_state: Any, counters: Any, moments: dict[tuple[str, int], Array], layout: Layout) -> Any:
    counter_leaves = iter([leaf for leaf, owner in _arrays_and_owners(counters, layout) if not owner])
    index: dict[str, int] = {}

    def pick(_: Any, owner: str, spec: Any) -> Array:
        if spec is None:
            return next(counter_leaves)
        index[owner] = index.get(owner, -1) + 1
        return moments[owner, index[owner]]

    return map_state(pick, opt_state, layout.specs)
