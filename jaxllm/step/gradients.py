"""Losses and gradients of a training step over all devices, with explicit ZeRO collectives.

Each ZeRO stage for one step, with Ψ parameters in the compute dtype (Rajbhandari et al. 2020, section 7):

    stage  weights in the computation               gradients                                     elements per device
    0      unsharded                                all-reduced once, after the backward pass     2Ψ
    1      unsharded, all-gathered once per step    reduce-scattered once                         Ψ + Ψ
           if they are stored sharded
    2      as in stage 1                            reduce-scattered layer by layer               Ψ + Ψ
    3      sharded, all-gathered layer by layer     reduce-scattered layer by layer               2Ψ + Ψ
           in the forward and the backward pass

The last column counts the elements that each device communicates. With several micro-batches, stages 2 and 3
communicate in each of them.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxllm.model import adapters
from jaxllm.model.loss import Head, cross_entropy
from jaxllm.model.transformer import forward, unembedding
from jaxllm.parallel.collectives import Collectives, ShardedWeight, gather, scatter
from jaxllm.parallel.mesh import BATCH_AXES, Placement, sharded
from jaxllm.step.placement import Layout
from jaxllm.step.spec import StepSpec

Batch = dict[str, Array]  # tokens, targets, segment_ids, positions: int32 [B, T]; weights: float32 [B, T]
LossSums = dict[str, Array]  # "nll": Σ weight·nats; "tokens": Σ weight; "aux_loss": load-balancing loss × tokens


def loss_sums(
    params: Any, batch: Batch, step_spec: StepSpec, collectives: Collectives, factor: Float[Array, ""] | float = 1.0
) -> tuple[Float[Array, ""], LossSums]:
    """Computes this device's losses as sums over tokens.

    LossSums rather than means give every token of a step the same weight, on every device and in every micro-batch.

    Args:
      params: Parameters in the compute dtype, sharded or not; see `Collectives.weights`.
      batch: This device's rows.
      step_spec: Specification of the training step.
      collectives: Collectives for the mesh sizes.
      factor: Factor on the differentiated loss.

    Returns:
      (this device's part of the loss to differentiate, this device's sums).
    """
    model = step_spec.model
    hidden, _, aux_loss = forward(
        params,
        batch["tokens"],
        batch["positions"],
        model,
        segments=batch["segment_ids"],
        remat=step_spec.remat,
        attention=step_spec.attention,
        attention_chunk=step_spec.attention_chunk,
        collectives=collectives,
    )
    head = Head(model.vocab_size, model.logit_softcap, step_spec.loss_chunk, collectives.tensor)
    nll = cross_entropy(
        collectives.all_gather_tokens(hidden).reshape(-1, model.width),
        unembedding(params, collectives),
        batch["targets"].reshape(-1),
        (batch["weights"] * factor).reshape(-1),
        head,
    )
    tokens = batch["weights"].sum()
    aux_loss = aux_loss * collectives.all_reduce_batch(tokens)
    sums = {"nll": nll / factor, "tokens": tokens, "aux_loss": aux_loss}
    return nll + aux_loss * factor, sums


def accumulate(
    params: Any, batch: Batch, step_spec: StepSpec, layout: Layout, factor: Float[Array, ""] | float, frozen: Any = None
) -> tuple[LossSums, Any]:
    """Computes the sums of the losses, and of the gradients times `factor`, over all tokens of a step.

    Args:
      params: Trained parameters in the storage dtype, as global arrays on the mesh.
      batch: Global batch.
      step_spec: Specification of the training step.
      layout: Sharding of state and gradients.
      factor: Factor on the loss before differentiation; see `precision.loss_factor`.
      frozen: Frozen weights, as global arrays on the mesh; None if there are none.

    Returns:
      (sums, gradients with the placements `layout.moments`; their dtype is the compute dtype, or float32 if
      micro-batches are accumulated).
    """

    def local(params: Any, frozen: Any, batch: Batch, factor: Array) -> tuple[LossSums, Any]:
        variables, to_model_params = variables_of(params, frozen, step_spec, layout)
        collectives = make_collectives(layout)

        def loss(variables: Any, micro_batch: Batch) -> tuple[Array, LossSums]:
            return loss_sums(to_model_params(variables), micro_batch, step_spec, collectives, factor)

        differentiate = jax.grad(loss, has_aux=True)
        if step_spec.accumulate == 1:
            gradients, sums = differentiate(variables, batch)
        else:
            sums, gradients = _accumulate_micro_batches(differentiate, variables, batch, step_spec.accumulate)
        return _all_reduce_sums(sums, layout), _reduce_gradients(gradients, layout)

    return _shard_map(local, layout, layout.moments)(params, frozen, batch, jnp.asarray(factor, jnp.float32))


def evaluate(params: Any, frozen: Any, batch: Batch, step_spec: StepSpec, layout: Layout) -> LossSums:
    """Computes the evaluation sums {"nll", "tokens"} over all tokens of a batch."""

    def local(params: Any, frozen: Any, batch: Batch, factor: Array) -> tuple[LossSums, tuple[()]]:
        variables, to_model_params = variables_of(params, frozen, step_spec, layout)
        _, sums = loss_sums(to_model_params(variables), batch, step_spec, make_collectives(layout))
        return _all_reduce_sums({"nll": sums["nll"], "tokens": sums["tokens"]}, layout), ()

    return _shard_map(local, layout, ())(params, frozen, batch, jnp.ones((), jnp.float32))[0]


def _shard_map(local: Callable[..., Any], layout: Layout, out: Any) -> Callable[..., Any]:
    """Wraps `local(params, frozen, batch, factor)` in `shard_map`; it returns (sums, arrays with placements `out`)."""
    if layout.mesh.size == 1:
        return local

    def specs(placements: Any) -> Any:
        return jax.tree.map(lambda p: p.partition, placements)

    rows = PartitionSpec(BATCH_AXES, None)
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(specs(layout.weights), specs(layout.frozen), rows, PartitionSpec()),
        out_specs=(PartitionSpec(), specs(out)),
        check_vma=False,
    )


def make_collectives(layout: Layout) -> Collectives:
    """Returns the collectives of a forward pass; they all-gather the weights layer by layer at ZeRO stages 2 and 3."""
    sizes = layout.sizes
    placements = None
    if sharded("gradients", layout.stage, mixed=False) and sizes["data"] > 1:
        placements = layout.sharded if layout.frozen is None else adapters.joined(layout.frozen, layout.sharded)
    return Collectives(sizes["tensor"], sizes["replica"] * sizes["data"], placements)


def variables_of(params: Any, frozen: Any, step_spec: StepSpec, layout: Layout) -> tuple[Any, Callable[[Any], Any]]:
    """Returns (the variables to differentiate, a function from them to the parameter tree of the model)."""
    variables, to_model_params = _trained_variables(params, step_spec, layout)
    if frozen is None:
        return variables, to_model_params
    frozen = step_spec.policy.cast(frozen)  # a no-op in a run; tests may pass another dtype

    def with_frozen(variables: Any) -> Any:
        return adapters.joined(frozen, adapters.scaled(to_model_params(variables), step_spec.adapter_scale))

    return variables, with_frozen


def _trained_variables(params: Any, step_spec: StepSpec, layout: Layout) -> tuple[Any, Callable[[Any], Any]]:
    """Implements `variables_of` for the trained parameters, without frozen weights."""
    compute = step_spec.policy.cast(params)
    if layout.stage == 0 or layout.sizes["data"] == 1:
        return compute, lambda full: full
    if layout.stage == 3:
        return compute, lambda shards: shards
    if step_spec.policy.mixed:
        full = _layer_by_layer(gather, layout.weights, compute)
    else:
        full = jax.tree.map(_without_padding, layout.sharded, compute)
    if layout.stage == 1:
        return full, lambda full: full

    def shard(placement: Placement, x: Array) -> Array:
        assert placement.zero_dim is not None
        shape = list(x.shape)
        num_shards = math.prod(layout.sizes[axis] for axis in placement.axes[placement.zero_dim])
        shape[placement.zero_dim] = placement.shape[placement.zero_dim] // num_shards
        return jnp.zeros(shape, x.dtype)  # defines the shape of the gradient; its value is never read

    shards = jax.tree.map(shard, layout.sharded, full)
    return shards, lambda shards: jax.tree.map(ShardedWeight, shards, full)


def _without_padding(placement: Placement, x: Array) -> Array:
    if placement.zero_dim is None:
        return x
    return jax.lax.slice_in_dim(x, 0, placement.gathered, axis=placement.zero_dim)


def _layer_by_layer(function: Callable[[Array, Placement, bool], Array], placements: Any, params: Any) -> Any:
    """Applies `gather` or `scatter` to a tree of parameters, to stacked layers one layer at a time.

    A collective on a whole stack would concatenate along its second dimension, which needs a copy of the whole stack to
    restore the order of elements.
    """

    def apply(placements: Any, tree: Any, layer_slice: bool) -> Any:
        return jax.tree.map(lambda placement, x: function(x, placement, layer_slice), placements, tree)

    out = {name: apply(placements[name], tree, False) for name, tree in params.items() if name != "layers"}
    layers = out["layers"] = params["layers"]

    others = [x for name, tree in out.items() if name != "layers" for x in jax.tree.leaves(tree)]

    def loop(layers: Any) -> Any:
        return jax.lax.map(lambda layer: apply(placements["layers"], layer, True), layers)

    def loop_from(first: Array, layers: Any) -> Any:
        def apply_layer(i: Array) -> Any:
            layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), layers)
            return apply(placements["layers"], layer, True)

        return jax.lax.map(apply_layer, first + jnp.arange(jax.tree.leaves(layers)[0].shape[0]))

    if layers and not others:  # adapters: every array is stacked
        out["layers"] = loop(layers)
    elif layers:  # a model shorter than its layer pattern has no stacked layers
        out["layers"] = jax.lax.platform_dependent(
            others, layers, cpu=lambda xs, layers: loop_from(_zero_after(xs), layers), default=lambda _, y: loop(y)
        )
    return out


def _zero_after(arrays: list[Array]) -> Array:
    """Returns an int32 0 with a data dependency on these arrays.

    XLA's CPU backend runs independent operations concurrently. In JAX 0.10 it distinguishes reduce-scatters among the
    devices of one process only by their device group, so on a busy machine those outside the loop over layers were
    occasionally mixed with those inside. An optimization barrier does not help: the backend removes it before it
    schedules the program.
    """
    value = sum(x.reshape(-1)[0].astype(jnp.float32) for x in arrays)
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    # Shifting right by 31 and then by 1 gives 0 for any input, and the compiler does not fold it to a constant.
    return jax.lax.shift_right_logical(jax.lax.shift_right_logical(bits, 31), 1)


def _accumulate_micro_batches(
    differentiate: Callable[..., Any], variables: Any, batch: Batch, count: int
) -> tuple[LossSums, Any]:
    """Accumulates losses and float32 gradients over the micro-batches, which run sequentially."""

    def micro_step(carry: Any, micro_batch: Batch) -> tuple[Any, None]:
        gradients, sums = differentiate(variables, micro_batch)
        # Without the barrier, the TPU compiler tries to hoist all-reduces out of this loop and fails if their results
        # are converted to another dtype (XLA of JAX 0.10, in while_loop_all_reduce_code_motion).
        gradients = jax.lax.optimization_barrier(gradients)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry, (sums, gradients)), None

    # Micro-batch i has row i of each group of `count` rows, so rows stay on their device.
    micro_batches = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)
    zero = jnp.zeros((), jnp.float32)
    start = (
        {"nll": zero, "tokens": zero, "aux_loss": zero},
        jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), variables),
    )
    return jax.lax.scan(micro_step, start, micro_batches)[0]


def _all_reduce_sums(sums: LossSums, layout: Layout) -> LossSums:
    """All-reduces sums over the rows of all devices; over `tensor`, only the load-balancing loss is a partial sum."""
    sizes = layout.sizes

    def all_reduce(name: str, x: Array) -> Array:
        axes = tuple(axis for axis in (*BATCH_AXES, *(["tensor"] if name == "aux_loss" else [])) if sizes[axis] > 1)
        return jax.lax.psum(x, axes) if axes else x

    return {name: all_reduce(name, x) for name, x in sums.items()}


def _reduce_gradients(gradients: Any, layout: Layout) -> Any:
    """Reduces gradients over the mesh axes that the backward pass has not reduced yet."""
    sizes = layout.sizes
    if sizes["data"] > 1 and layout.stage == 1:
        gradients = _layer_by_layer(scatter, layout.moments, gradients)

    def reduce(placement: Placement, gradient: Array) -> Array:
        axes = ["replica"] if sizes["replica"] > 1 else []
        if sizes["data"] > 1 and layout.stage == 0:
            axes.append("data")
        # A weight replicated along `tensor` was applied to different tokens or heads on each device.
        if sizes["tensor"] > 1 and not any("tensor" in axes for axes in placement.axes):
            axes.append("tensor")
        return jax.lax.psum(gradient, tuple(axes)) if axes else gradient

    return jax.tree.map(reduce, layout.moments, gradients)
