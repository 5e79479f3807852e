"""What the model's functions ask of the other devices, where their arrays are one device's shares.

The functions of `jaxllm.model` run inside `jax.shard_map`, over plain local arrays: rows of the batch over
`replica` and `data`; heads, MLP and vocabulary over `tensor`, and between these the tokens of a sequence
(sequence parallelism, Korthikanti et al. 2022). Every collective is here. On one device each is nothing.

Gradients follow one rule: what is differentiated is the sum over devices of what each returns as its loss, so a
weight that lies on several devices has the sum of their gradients. Gathering and scattering sums are each other's
transposes, a sum over all is its own, and no other collective is differentiated.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxllm.parallel.mesh import BATCH_AXES, Placement


@struct.dataclass
class Scattered:
    """A weight that computes whole, whose gradient is wanted in shares (ZeRO stage 2).

    Attributes:
      share: this device's part; differentiated, never read.
      whole: what computes; not differentiated.
    """

    share: Array
    whole: Array


@dataclasses.dataclass(frozen=True)
class Partition:
    """The devices that one model is spread over, as its functions see them.

    Attributes:
      tensor: devices along `tensor`.
      batch: devices that rows of a batch are spread over.
      placements: tree of the parameters' `Placement`s where they are split over `data`; None where they are whole.
    """

    tensor: int = 1
    batch: int = 1
    placements: Any = None

    def enter(self, x: Float[Array, "B t D"]) -> Float[Array, "B T D"]:
        """All tokens of the sequences, before products whose weights are split over heads, MLP or vocabulary."""
        return jax.lax.all_gather(x, "tensor", axis=1, tiled=True) if self.tensor > 1 else x

    def leave(self, y: Float[Array, "B T D"]) -> Float[Array, "B t D"]:
        """The sum over `tensor` of what such products gave, and of it this device's tokens."""
        return jax.lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True) if self.tensor > 1 else y

    def own_tokens(self, x: Array) -> Array:
        """[B, T, …] -> [B, t, …]: this device's tokens of an array that is the same along `tensor`."""
        if self.tensor == 1:
            return x
        size = x.shape[1] // self.tensor
        return jax.lax.dynamic_slice_in_dim(x, self.first(size), size, axis=1)

    def first(self, size: int) -> Array | int:
        """Index of this device's first element of something that is split over `tensor` in parts of `size`."""
        return jax.lax.axis_index("tensor") * size if self.tensor > 1 else 0

    def head_sum(self, x: Array) -> Array:
        """Over the heads of all devices, of sums over this device's."""
        return jax.lax.psum(x, "tensor") if self.tensor > 1 else x

    def batch_sum(self, x: Array) -> Array:
        """Over all rows of the batch."""
        return jax.lax.psum(x, BATCH_AXES) if self.batch > 1 else x

    def weights(self, params: Any, *path: Any) -> Any:
        """Weights as they compute, from their shares.

        Args:
          params: the subtree of the parameters at `path`, of one layer where they are stacked.
        """
        placed = self.placements
        if placed is None:
            return params
        for key in path:
            placed = placed[key]
        stacked = bool(path) and path[0] == "layers"

        def whole(placement: Placement, x: Any) -> Array:
            if isinstance(x, Scattered):
                return _scattered(x, placement, stacked)
            return gather(x, placement, stacked)

        return jax.tree.map(whole, placed, params)


WHOLE = Partition()


def gather(x: Array, placement: Placement, cut: bool = False) -> Array:
    """The whole array from the shares over `data`.

    Args:
      cut: the leading dimension of `placement` is not there: x is one layer of a stack.
    """
    if placement.zero_dim is None:
        return x
    dim = placement.zero_dim - cut
    whole = jax.lax.all_gather(x, "data", axis=dim, tiled=True)
    return jax.lax.slice_in_dim(whole, 0, placement.gathered, axis=dim)


def scatter(gradient: Array, placement: Placement, cut: bool = False) -> Array:
    """This device's share of the sum over `data`: the transpose of `gather`."""
    if placement.zero_dim is None:
        return jax.lax.psum(gradient, "data")
    dim = placement.zero_dim - cut
    padding = [(0, 0)] * gradient.ndim
    padding[dim] = (0, placement.shape[placement.zero_dim] - placement.gathered if len(_ways(placement)) == 1 else 0)
    return jax.lax.psum_scatter(jnp.pad(gradient, padding), "data", scatter_dimension=dim, tiled=True)


def _ways(placement: Placement) -> tuple[str, ...]:
    assert placement.zero_dim is not None
    return placement.axes[placement.zero_dim]


def _scattered(x: Scattered, placement: Placement, cut: bool) -> Array:
    @jax.custom_vjp
    def pick(share: Array, whole: Array) -> Array:
        return whole

    def forward(share: Array, whole: Array) -> tuple[Array, None]:
        return whole, None

    def backward(_: None, gradient: Array) -> tuple[Array, None]:
        return scatter(gradient, placement, cut), None

    pick.defvjp(forward, backward)
    return pick(x.share, x.whole)
