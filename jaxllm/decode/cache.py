"""KV cache as an explicit pytree; its arrays are declared by `jaxllm.model.specs.cache_specs`."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxllm.config import Architecture
from jaxllm.model import specs


class KVCache(flax.struct.PyTreeNode):
    """KV cache of B sequences, over all layers.

    Attributes:
      kv: Cache arrays, a tree with the structure of `specs.cache_specs`: {"layers": …, "tail": …}.
      lengths: Number of cached tokens of each row, which is also the position of its next token.
      capacity: Maximum tokens per row; static.
    """

    kv: Any
    lengths: Int[Array, " B"]
    capacity: int = flax.struct.field(pytree_node=False)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales over all rows; also defined for an abstract cache."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.kv))


def dtype_of(name: str, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """Returns the dtype of keys and values: int8 for `--cache_dtype=int8`, else the compute dtype `dtype`."""
    return jnp.int8 if name == "int8" else dtype


def create(model: Architecture, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """Creates an empty cache filled with zeros, so that masked slots are finite.

    Args:
      model: Architecture of the model.
      batch: Number of rows.
      capacity: Maximum tokens per row.
      dtype: Dtype of keys and values. int8 adds float32 scales, one per token and key/value head, for keys and for
        values.
    """
    kv = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _arrays(model, batch, capacity, dtype))
    return KVCache(kv, jnp.zeros(batch, jnp.int32), capacity)


def create_like(cache: KVCache) -> KVCache:
    """Creates an empty cache with the shapes, dtypes and shardings of an abstract one."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), cache)


def abstract(model: Architecture, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """Returns the abstract cache of `jax.ShapeDtypeStruct`s, without allocating arrays."""
    kv = _arrays(model, batch, capacity, dtype)
    return KVCache(kv, jax.ShapeDtypeStruct((batch,), jnp.int32), capacity)  # type: ignore[arg-type]


def _arrays(model: Architecture, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> Any:
    def to_array(spec: specs.ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32 if spec.role == "cache scale" else dtype)

    scaled = jnp.dtype(dtype) == jnp.int8
    return specs.map_specs(to_array, specs.cache_specs(model, batch, capacity, scaled))
