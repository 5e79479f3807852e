"""Collectives used by the model's functions, which run on local shards inside `jax.shard_map`.

The functions of `jaxllm.model` see plain local arrays. Batch rows are sharded over `replica` and `data`. Heads, MLP
and vocabulary are sharded over `tensor`; between those matmuls the tokens of a sequence are sharded over `tensor`
(sequence parallelism, Korthikanti et al. 2022). Inference has few tokens at a time and does not shard them: every
device has all tokens, and all-reduces the outputs of each sub-layer (Shoeybi et al. 2019). Every collective is in this
module. On one device each is a no-op.

Gradients follow one rule: the differentiated function is the sum over devices of the loss that each one returns, so the
gradient of a replicated weight is the sum of its gradients on all devices. All-gather and reduce-scatter are each
other's transposes, all-reduce is its own transpose, and no other collective is differentiated.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxllm.parallel.mesh import BATCH_AXES, Placement


@struct.dataclass
class ShardedWeight:
    """Weight that is unsharded in the computation but has a sharded gradient (ZeRO stage 2).

    Attributes:
      shard: This device's shard; differentiated, but its value is never read.
      full: The full array used in the computation; not differentiated.
    """

    shard: Array
    full: Array


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Collectives of a model's functions for given mesh sizes; the default is a single device.

    Attributes:
      tensor: Number of devices along `tensor`.
      batch: Number of devices that batch rows are sharded over.
      placements: Tree of the parameters' `Placement`s if they are sharded over `data`; None if they are not.
      sequence_parallel: Whether tokens are sharded over `tensor` between matmuls; if not, t is T.
    """

    tensor: int = 1
    batch: int = 1
    placements: Any = None
    sequence_parallel: bool = True

    def all_gather_tokens(self, x: Float[Array, "B t D"]) -> Float[Array, "B T D"]:
        """All-gathers the tokens over `tensor`, before matmuls with weights sharded over heads, MLP or vocabulary."""
        return jax.lax.all_gather(x, "tensor", axis=1, tiled=True) if self._shards_tokens else x

    def reduce_scatter_tokens(self, y: Float[Array, "B T D"]) -> Float[Array, "B t D"]:
        """Sums the partial outputs of tensor-parallel matmuls over `tensor`; each device keeps its own tokens.

        Without sequence parallelism each device keeps all tokens: an all-reduce.
        """
        if self._shards_tokens:
            return jax.lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)
        return jax.lax.psum(y, "tensor") if self.tensor > 1 else y

    def all_gather_vocab(self, logits: Float[Array, "*batch v"]) -> Float[Array, "*batch V"]:
        """All-gathers logits over the vocabulary, its padding included."""
        return jax.lax.all_gather(logits, "tensor", axis=logits.ndim - 1, tiled=True) if self.tensor > 1 else logits

    def own_tokens(self, x: Array) -> Array:
        """Slices this device's tokens from an array replicated along `tensor`: [B, T, …] -> [B, t, …]."""
        if not self._shards_tokens:
            return x
        size = x.shape[1] // self.tensor
        return jax.lax.dynamic_slice_in_dim(x, self.first(size), size, axis=1)

    def first(self, size: int) -> Array | int:
        """Returns the index of this device's first element in a dimension sharded over `tensor`, `size` per device."""
        return jax.lax.axis_index("tensor") * size if self.tensor > 1 else 0

    def all_reduce_heads(self, x: Array) -> Array:
        """All-reduces sums over this device's heads to sums over all heads."""
        return jax.lax.psum(x, "tensor") if self.tensor > 1 else x

    def all_reduce_batch(self, x: Array) -> Array:
        """All-reduces sums over this device's rows to sums over the whole batch."""
        return jax.lax.psum(x, BATCH_AXES) if self.batch > 1 else x

    @property
    def _shards_tokens(self) -> bool:
        return self.tensor > 1 and self.sequence_parallel

    def weights(self, params: Any, *path: Any) -> Any:
        """All-gathers weights sharded over `data` into the full arrays that the computation uses.

        Args:
          params: Subtree of the parameters at `path`; for stacked layers, the slice of one layer.
          *path: Keys of the subtree in the parameter tree.
        """
        placed = self.placements
        if placed is None:
            return params
        for key in path:
            placed = placed[key]
        stacked = bool(path) and path[0] == "layers"

        def gather_one(placement: Placement, x: Any) -> Array:
            if isinstance(x, ShardedWeight):
                return _full_weight(x, placement, stacked)
            return gather(x, placement, stacked)

        return jax.tree.map(gather_one, placed, params)


SINGLE_DEVICE = Collectives()


def gather(x: Array, placement: Placement, layer_slice: bool = False) -> Array:
    """All-gathers an array over `data` and removes its padding.

    Args:
      layer_slice: Whether x is one layer of a stack and lacks the leading dimension of `placement`.
    """
    if placement.zero_dim is None:
        return x
    dim = placement.zero_dim - layer_slice
    full = jax.lax.all_gather(x, "data", axis=dim, tiled=True)
    return jax.lax.slice_in_dim(full, 0, placement.gathered, axis=dim)


def scatter(gradient: Array, placement: Placement, layer_slice: bool = False) -> Array:
    """Reduce-scatters a gradient over `data`, the transpose of `gather`; all-reduces it if `zero_dim` is None."""
    if placement.zero_dim is None:
        return jax.lax.psum(gradient, "data")
    dim = placement.zero_dim - layer_slice
    padding = [(0, 0)] * gradient.ndim
    if placement.axes[placement.zero_dim] == ("data",):
        padding[dim] = (0, placement.shape[placement.zero_dim] - placement.gathered)
    return jax.lax.psum_scatter(jnp.pad(gradient, padding), "data", scatter_dimension=dim, tiled=True)


def _full_weight(x: ShardedWeight, placement: Placement, layer_slice: bool) -> Array:
    """Returns the full weight; its gradient is reduce-scattered and becomes that of the shard."""

    @jax.custom_vjp
    def pick(shard: Array, full: Array) -> Array:
        return full

    def forward(shard: Array, full: Array) -> tuple[Array, None]:
        return full, None

    def backward(_: None, gradient: Array) -> tuple[Array, None]:
        return scatter(gradient, placement, layer_slice), None

    pick.defvjp(forward, backward)
    return pick(x.shard, x.full)
