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
        """Bytes of keys, values and scales, over all rows; the same for the abstract form."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.kv))


def create(model: Architecture, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """An empty cache. Its slots are zeros, so that what a mask hides is finite.

    Args:
      dtype: of its numbers; int8 comes with float32 scales, one for each token's keys, or values, in one head.
    """
    kv = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _arrays(model, batch, capacity, dtype))
    return KVCache(kv, jnp.zeros(batch, jnp.int32), capacity)


def abstract(model: Architecture, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """The same as `jax.ShapeDtypeStruct`s: nothing is allocated."""
    kv = _arrays(model, batch, capacity, dtype)
    return KVCache(kv, jax.ShapeDtypeStruct((batch,), jnp.int32), capacity)  # type: ignore[arg-type]


def _arrays(model: Architecture, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> Any:
    def array(spec: specs.ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32 if spec.role == "cache scale" else dtype)

    scaled = jnp.dtype(dtype) == jnp.int8
    return specs.map_specs(array, specs.cache_specs(model, batch, capacity, scaled))
