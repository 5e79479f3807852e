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
        return _updated(weights, state.opt_state, gradients, lr, finite, step_spec)
    return _streamed(state, gradients, lr, finite, step_spec, layout)


def _updated(
    weights: Any, opt_state: Any, gradients: Any, lr: Array, finite: Array | None, step_spec: StepSpec
) -> tuple[Any, Any]:
    direction, moved = step_spec.optimizer.update(gradients, opt_state, weights)
    params = jax.tree.map(lambda p, d: (p.astype(jnp.float32) - lr * d).astype(p.dtype), weights, direction)
    if finite is None:
        return params, moved
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), (params, moved), (weights, opt_state))


def _streamed(
    state: TrainState, gradients: Any, lr: Array, finite: Array | None, step_spec: StepSpec, layout: Layout
) -> tuple[Any, Any]:
    homes = layout.state_shardings(state)
    on_device = layout.state_shardings(state, on_device=True)
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
    # Counters stay on the device. Each call of the optimizer advances its own copy by the same amount.
    done_params: dict[str, Array] = {}
    done_moments: dict[tuple[str, int], Array] = {}
    counters: Any = None
    last: Any = lr
    for name in names:
        params, moments = _only(state.params, name), _only_moments(state.opt_state, name, layout)
        # Start this transfer only after the previous array is back in host memory.
        (params, moments), last = jax.lax.optimization_barrier(((params, moments), last))
        params = jax.device_put(params, _only(on_device.params, name))
        moments = jax.device_put(moments, _only_moments(on_device.opt_state, name, layout))
        weights = layout.constrain(params, _only(layout.moments, name))
        new, moved = _updated(weights, moments, _only(gradients, name), lr, finite, step_spec)
        new = jax.device_put(new, _only(homes.params, name))
        moved = jax.device_put(moved, _only_moments(homes.opt_state, name, layout))
        (done_params[name],) = jax.tree.leaves(new)
        mine = [leaf for leaf, owner in _owned(moved, layout) if owner == name]
        done_moments |= {(name, i): leaf for i, leaf in enumerate(mine)}
        counters = moved
        last = (done_params[name], mine)
    return (
        jax.tree_util.tree_map_with_path(lambda path, _: done_params[_name(path)], state.params),
        _merged(state.opt_state, counters, done_moments, layout),
    )


def _name(path: Any) -> str:
    return "".join(map(str, path))


def _only(tree: Any, name: str) -> Any:
    """Returns a tree with the structure of the parameters in which every array except one is None."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x if _name(path) == name else None, tree)


def _only_moments(opt_state: Any, name: str, layout: Layout) -> Any:
    """Returns the optimizer state with only the counters and the moments of one parameter; the rest is None."""
    return map_state(lambda x, owner, spec: x if spec is None or owner == name else None, opt_state, layout.specs)


def _owned(opt_state: Any, layout: Layout) -> list[tuple[Array, str]]:
    """Lists the arrays of an optimizer state with the names of their parameters ("" for counters), in tree order."""
    found: list[tuple[Array, str]] = []
    map_state(lambda x, owner, _: found.append((x, owner)), opt_state, layout.specs)
    return found


def _merged(opt_state: Any, counters: Any, moments: dict[tuple[str, int], Array], layout: Layout) -> Any:
    counted = iter([leaf for leaf, owner in _owned(counters, layout) if not owner])
    seen: dict[str, int] = {}

    def pick(_: Any, owner: str, spec: Any) -> Array:
        if spec is None:
            return next(counted)
        seen[owner] = seen.get(owner, -1) + 1
        return moments[owner, seen[owner]]

    return map_state(pick, opt_state, layout.specs)
