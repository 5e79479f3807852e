"""The KV cache: state as data, declared by `jaxllm.model.specs.cache_specs` and owned by whoever holds it."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxllm.config import Architecture
from jaxllm.model import specs


class KVCache(flax.struct.PyTreeNode):
    """Keys and values of B sequences.

    Attributes:
      kv: the tree of `specs.cache_specs`: {"layers": …, "tail": …}.
      lengths: tokens of each row in the cache; also the position of its next token.
      capacity: tokens a row may have.
    """

    kv: Any
    lengths: Int[Array, " B"]
    capacity: int = flax.struct.field(pytree_node=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, over all rows; the same for the abstract form."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.kv))


def create(model: Architecture, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """An empty cache. Its slots are zeros, so that what a mask hides is finite."""
    kv = specs.map_specs(lambda spec: jnp.zeros(spec.shape, dtype), specs.cache_specs(model, batch, capacity))
    return KVCache(kv, jnp.zeros(batch, jnp.int32), capacity)


def abstract(model: Architecture, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """The same as `jax.ShapeDtypeStruct`s: nothing is allocated."""
    kv = specs.abstract(specs.cache_specs(model, batch, capacity), dtype)
    return KVCache(kv, jax.ShapeDtypeStruct((batch,), jnp.int32), capacity)  # type: ignore[arg-type]
