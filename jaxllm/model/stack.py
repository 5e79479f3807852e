"""Layer stack: a scan over the repeats of the layer pattern, with or without a KV cache.

The scan keeps the program as small as one repeat of the pattern. The layers after the last whole pattern follow it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.config import Architecture
from jaxllm.config.remat import RematPolicy, group_size
from jaxllm.model.attention import LayerCache
from jaxllm.model.remat import rematerialize
from jaxllm.parallel.collectives import Collectives

Params = dict[str, Any]
# (x, layer weights, layer kind, layer cache) -> (x, updated cache, load-balancing loss)
Block = Callable[[Array, Params, str, LayerCache | None], tuple[Array, LayerCache | None, Array]]


def run_layers(
    x: Float[Array, "B t D"],
    params: Params,
    block: Block,
    model: Architecture,
    remat: RematPolicy,
    collectives: Collectives,
) -> tuple[Float[Array, "B t D"], Float[Array, ""]]:
    """Runs all layers without a cache, with activation checkpointing.

    Args:
      x: This device's tokens.
      params: Parameter tree of the whole model.
      block: Function of one layer.
      model: Architecture of the model.
      remat: Remat policy.
      collectives: Collectives for the mesh sizes; all-gathers each layer's weights before it runs.

    Returns:
      (output of the last layer, sum of the layers' load-balancing losses).
    """

    def run_layer(
        carry: tuple[Array, Array], layer: Params, group: str, index: int, kind: str, prevent_cse: bool
    ) -> Any:
        def run_block(x: Array, layer: Params) -> tuple[Array, Array]:
            # All-gathered inside the checkpointed function, so full weights are not saved for the backward pass.
            y, _, aux_loss = block(x, collectives.weights(layer, group, index), kind, None)
            return y, aux_loss

        x, aux_loss = carry
        x, layer_loss = rematerialize(run_block, remat, prevent_cse)(x, layer)
        return x, aux_loss + layer_loss

    size = group_size(model.repeats, remat)
    # If the loop body is one block, its forward and backward passes are separate computations: no CSE to prevent.
    prevent_cse = len(model.pattern) > 1 or model.repeats // model.unroll <= 1

    def repeat(carry: tuple[Array, Array], stacked: tuple[Params, ...]) -> tuple[tuple[Array, Array], None]:
        for index, (kind, layer) in enumerate(zip(model.pattern, stacked, strict=True)):
            carry = run_layer(carry, layer, "layers", index, kind, prevent_cse)
        return carry, None

    carry = (x, jnp.zeros((), jnp.float32))
    if size > 1:
        groups = jax.tree.map(lambda w: w.reshape(-1, size, *w.shape[1:]), params["layers"])

        def run_group(carry: tuple[Array, Array], stacked: tuple[Params, ...]) -> tuple[tuple[Array, Array], None]:
            return jax.lax.scan(repeat, carry, stacked)

        run_group = jax.checkpoint(
            run_group, prevent_cse=model.repeats == size, policy=jax.checkpoint_policies.nothing_saveable
        )
        carry, _ = jax.lax.scan(run_group, carry, groups)
    elif model.repeats:
        carry, _ = jax.lax.scan(repeat, carry, params["layers"], unroll=model.unroll)
    for index, (kind, layer) in enumerate(zip(model.tail, params["tail"], strict=True)):
        carry = run_layer(carry, layer, "tail", index, kind, prevent_cse=True)
    return carry


def run_layers_with_cache(
    x: Float[Array, "B T D"],
    params: Params,
    block: Block,
    model: Architecture,
    cache: Params,
    lengths: Int[Array, " B"],
    capacity: int,
) -> tuple[Float[Array, "B T D"], Params]:
    """Runs all layers with a KV cache.

    Args:
      x: Embedded tokens.
      params: Parameter tree of the whole model.
      block: Function of one layer.
      model: Architecture of the model.
      cache: KV cache, a tree with the structure of `specs.cache_specs`.
      lengths: Number of cached tokens of each row.
      capacity: Maximum tokens per row.

    Returns:
      (output of the last layer, the cache including the new tokens).
    """

    def repeat(carry: tuple[Array, Any], inputs: tuple[Array, tuple[Params, ...]]) -> tuple[Any, None]:
        x, caches = carry
        i, stacked = inputs
        updated = []
        for kind, layer, kv in zip(model.pattern, stacked, caches, strict=True):
            x, cached, _ = block(x, layer, kind, LayerCache(kv, i, lengths, capacity))
            assert cached is not None
            updated.append(cached.arrays)
        return (x, tuple(updated)), None

    caches = cache["layers"]
    if model.repeats:
        index = jnp.arange(model.repeats)
        (x, caches), _ = jax.lax.scan(repeat, (x, caches), (index, params["layers"]), unroll=model.unroll)
    tail = []
    for kind, layer, kv in zip(model.tail, params["tail"], cache["tail"], strict=True):
        x, cached, _ = block(x, layer, kind, LayerCache(kv, None, lengths, capacity))
        assert cached is not None
        tail.append(cached.arrays)
    return x, {"layers": caches, "tail": tuple(tail)}
