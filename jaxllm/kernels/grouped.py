"""Grouped matmul: multiplies each row by the matrix of its group, as mixture-of-experts layers need.

Rows are arranged in blocks of a single group each. A grouped matmul is then a loop over blocks, each a plain matmul
with one matrix (as in MegaBlocks, Gale et al. 2022). On CPUs and GPUs, XLA lowers `jax.lax.ragged_dot` to matmuls of
all rows with all matrices: with 128 experts and 8 per token, that is sixteen times the work.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Bounds of the block length, in rows. Between them it is at most half the mean number of rows per group.
_SHORTEST, _LONGEST = 8, 512


def block_length(rows: int, groups: int) -> int:
    """Returns the rows per block, a power of two: long enough for large matmuls, short enough for little padding."""
    length = _SHORTEST
    while 2 * length <= min(_LONGEST, rows // (2 * groups)):
        length *= 2
    return length


def block_count(rows: int, groups: int) -> int:
    """Returns the number of single-group blocks that suffices for any distribution of `rows` over `groups`."""
    nonempty = min(rows, groups)  # largest possible number of groups with at least one row
    return nonempty + (rows - nonempty) // block_length(rows, groups)


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """Arrangement of rows in single-group blocks.

    Attributes:
      index: Index of each row in the concatenated blocks, in the original row order.
      group: Group of each block; arbitrary for unused blocks.
      shape: (number of blocks, rows per block).
    """

    index: Int[Array, " R"]
    group: Int[Array, " blocks"]
    shape: tuple[int, int]

    def scatter(self, rows: Float[Array, "R D"]) -> Float[Array, "blocks length D"]:
        """Scatters the rows into their blocks, whose other rows are zero."""
        blocks, length = self.shape
        out = jnp.zeros((blocks * length, rows.shape[1]), rows.dtype)
        return out.at[self.index].set(rows, unique_indices=True).reshape(blocks, length, -1)

    def scatter_repeated(self, x: Float[Array, "M D"]) -> Float[Array, "blocks length D"]:
        """Scatters each row R / M times in a row, like `scatter` of `jnp.repeat`, but with a gather.

        The other rows of the blocks repeat the first row of x.
        """
        R = self.index.shape[0]
        source = jnp.zeros(math.prod(self.shape), jnp.int32).at[self.index].set(jnp.arange(R) // (R // x.shape[0]))
        return x[source].reshape(*self.shape, -1)

    def gather(self, blocks: Float[Array, "blocks length D"]) -> Float[Array, "R D"]:
        """Gathers the rows from their blocks, in the original row order."""
        return blocks.reshape(-1, blocks.shape[-1]).at[self.index].get(unique_indices=True)


def block_layout(row_groups: Int[Array, " R"], groups: int) -> BlockLayout:
    """Arranges rows with the given groups in blocks."""
    rows = row_groups.shape[0]
    length, count = block_length(rows, groups), block_count(rows, groups)
    sizes = jnp.bincount(row_groups, length=groups)
    end_block = jnp.cumsum(-(-sizes // length))  # exclusive end of each group
    first_index = (end_block + sizes // -length) * length
    order = jnp.argsort(row_groups, stable=True)
    first_row = jnp.cumsum(sizes) - sizes
    sorted_groups = row_groups[order]
    index = first_index[sorted_groups] + jnp.arange(rows) - first_row[sorted_groups]
    group = jnp.searchsorted(end_block, jnp.arange(count), side="right")
    return BlockLayout(
        jnp.zeros(rows, jnp.int32).at[order].set(index.astype(jnp.int32), unique_indices=True),
        jnp.minimum(group, groups - 1).astype(jnp.int32),
        (count, length),
    )


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "blocks length D"], weights: Float[Array, "groups D F"], group: Int[Array, " blocks"]
) -> Float[Array, "blocks length F"]:
    """Multiplies each block by the matrix of its group; weight gradients are accumulated in float32."""

    def step(_: None, block: tuple[Array, Array]) -> tuple[None, Array]:
        rows, index = block
        return None, rows @ weights[index]

    return jax.lax.scan(step, None, (x, group))[1]


def grouped_matmul_transposed(
    x: Float[Array, "blocks length D"], weights: Float[Array, "groups F D"], group: Int[Array, " blocks"]
) -> Float[Array, "blocks length F"]:
    """Multiplies each block by the transposed matrix of its group; for inference, without a gradient."""

    def body(i: Array, out: Array) -> Array:
        rows = jax.lax.dot_general(x[i], weights[group[i]], (((1,), (1,)), ((), ())))
        return jax.lax.dynamic_update_index_in_dim(out, rows, i, 0)

    # The initial value depends on x. Of constants, XLA would allocate the outputs of all layers before the first one.
    out = jnp.broadcast_to(x[0, 0, 0] * 0, (*x.shape[:2], weights.shape[1]))
    return jax.lax.fori_loop(0, x.shape[0], body, out)


def _forward(x: Any, weights: Any, group: Any) -> tuple[Array, tuple[Array | None, Array, Array]]:
    # Only weight gradients read the rows, so frozen weights need not save them.
    rows = x.value if weights.perturbed else None
    return grouped_matmul(x.value, weights.value, group.value), (rows, weights.value, group.value)


def _backward(saved: tuple[Array | None, Array, Array], d_out: Array) -> tuple[Array, Array | None, None]:
    x, weights, group = saved
    if x is None:
        _, d_x = jax.lax.scan(lambda _, block: (None, block[0] @ weights[block[1]].T), None, (d_out, group))
        return d_x, None, None

    def step(d_weights: Array, block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        rows, d_rows, index = block
        d_weight = jnp.einsum("ld,lf->df", rows, d_rows, preferred_element_type=jnp.float32)
        return d_weights.at[index].add(d_weight), d_rows @ weights[index].T

    d_weights, d_x = jax.lax.scan(step, jnp.zeros(weights.shape, jnp.float32), (x, d_out, group))
    return d_x, d_weights.astype(weights.dtype), None


grouped_matmul.defvjp(_forward, _backward, symbolic_zeros=True)
