"""Trace column: exact bytes of the train state and of saved activations, from the traced shapes of the program.

Nothing is compiled or run. The per-device function that a training step differentiates is traced unchanged. Each
residual (a leaf of the function returned by `jax.vjp`) is traced back to its `checkpoint_name` tag in the model.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxllm import programs
from jaxllm.config import Architecture, Config
from jaxllm.ledger.compiled.absent import abstract_mesh
from jaxllm.ledger.rows import Unknown
from jaxllm.parallel import mesh as mesh_lib
from jaxllm.parallel.mesh import BATCH_AXES
from jaxllm.step import gradients
from jaxllm.step.placement import make_layout

# Residuals without a tag: block inputs, and those of the embedding, positions and final norm.
UNTAGGED = "other"


@dataclasses.dataclass(frozen=True)
class Residuals:
    """Bytes that one device saves between forward and backward pass of a micro-batch, without weights and batch.

    Attributes:
      tags: Bytes in device memory per tag; UNTAGGED for residuals without one.
      host: Bytes in host memory per tag.
      loss: Bytes of the gradients that the loss computes during its forward pass: of its inputs and of the head.
    """

    tags: Mapping[str, int]
    host: Mapping[str, int]
    loss: int


def figures(config: Config, model: Architecture, platform: str) -> dict[str, Any]:
    """Returns the trace column in bytes on one device; state in host memory is included."""
    state = abstract_state(config, model, platform)
    return {
        "weights": bytes_per_device((state.params, state.frozen)),
        "optimizer": bytes_per_device(state.opt_state),
        "persistent": bytes_per_device(state),
        "activations": sum(residuals(config, model, platform).tags.values()),
        "peak": Unknown("the compiler's temporaries are not in a trace"),
    }


def abstract_state(config: Config, model: Architecture, platform: str) -> Any:
    """Returns the train state as shapes, dtypes and shardings on an abstract mesh."""
    mesh: Any = abstract_mesh(config)
    return programs.abstract_state(config, programs.make_step_spec(config, model, platform), mesh)


def bytes_per_device(tree: Any, memory: str | None = None) -> int:
    """Returns the bytes per device of a tree of abstract arrays with shardings.

    Args:
      tree: Abstract arrays with shardings.
      memory: Counts only arrays of this memory kind; None counts all.
    """
    counted = (x for x in jax.tree.leaves(tree) if memory is None or x.sharding.memory_kind == memory)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in counted)


def residuals(config: Config, model: Architecture, platform: str) -> Residuals:
    """Returns the bytes of the residuals that `jax.vjp` saves for the real training step."""
    step_spec = programs.make_step_spec(config, model, platform)
    mesh: Any = abstract_mesh(config)
    layout = make_layout(config, model, step_spec.policy, mesh)

    def local(params: Any, frozen: Any, batch: Any, factor: jax.Array) -> list[jax.Array]:
        variables, compute_weights = gradients.variables_of(params, frozen, step_spec, layout)
        collectives = gradients.make_collectives(layout)

        def loss(variables: Any) -> jax.Array:
            return gradients.loss_sums(compute_weights(variables), batch, step_spec, collectives, factor)[0]

        return jax.tree.leaves(jax.vjp(loss, variables)[1])

    def specs(placements: Any) -> Any:
        return jax.tree.map(lambda p: p.partition, placements, is_leaf=lambda x: isinstance(x, mesh_lib.Placement))

    state = programs.abstract_state(config, step_spec, mesh)
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.params, state.frozen))
    rows = config.train.batch_size // config.train.accumulate
    batch = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for name, x in programs.abstract_batch(config, mesh).items()
    }
    # Outputs are declared replicated so that their shapes are those on one device.
    mapped = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(specs(layout.weights), specs(layout.frozen), PartitionSpec(BATCH_AXES, None), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    traced = jax.make_jaxpr(mapped)(*weights, batch, jax.ShapeDtypeStruct((), jnp.float32)).jaxpr
    (call,) = [eqn for eqn in traced.eqns if eqn.primitive.name == "shard_map"]
    inner = call.params["jaxpr"]
    inner = getattr(inner, "jaxpr", inner)
    # Constants precede the arguments. The last arguments are the batch fields and the loss factor.
    return _classify_residuals(inner, len(batch) + 1, model.width)


def _classify_residuals(jaxpr: Any, batch_arguments: int, width: int) -> Residuals:
    """Classifies the outputs of a jaxpr; its last `batch_arguments` arguments are the batch, the others parameters."""
    arguments = set(jaxpr.invars)
    # Values computed from parameters alone (copies, all-gathered weights) are not activations.
    depends_on_batch = set(jaxpr.invars[-batch_arguments:])
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, jax.extend.core.Literal) and v in depends_on_batch for v in eqn.invars):
            depends_on_batch.update(eqn.outvars)
    tags: collections.Counter[str] = collections.Counter()
    host: collections.Counter[str] = collections.Counter()
    loss = 0
    for var in {id(v): v for v in jaxpr.outvars}.values():
        if isinstance(var, jax.extend.core.Literal) or var in arguments or var not in depends_on_batch:
            continue
        size = math.prod(var.aval.shape) * var.aval.dtype.itemsize
        tag = _tag(jaxpr, var)
        hidden = var.aval.ndim == 2 and var.aval.shape[1] == width and jnp.issubdtype(var.aval.dtype, jnp.floating)
        if tag == UNTAGGED and hidden:
            loss += size
        elif str(getattr(var.aval, "memory_space", "")).endswith("Host"):
            host[tag] += size
        else:
            tags[tag] += size
    return Residuals(dict(tags), dict(host), loss)


def _tag(jaxpr: Any, var: Any) -> str:
    """Returns the `checkpoint_name` tag of a value, or UNTAGGED if it has none."""
    producers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while var in producers:
        eqn = producers[var]
        if eqn.primitive.name == "name":
            return eqn.params["name"]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if inner is not None:
            inner = getattr(inner, "jaxpr", inner)
            return _tag(inner, inner.outvars[eqn.outvars.index(var)])
        # JAX marks values that a remat policy saves with reduce_precision; offloaded ones pass through device_put.
        if eqn.primitive.name not in ("reduce_precision", "device_put"):
            return UNTAGGED
        var = eqn.invars[0]
    return UNTAGGED
