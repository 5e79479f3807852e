"""Products of rows with the matrices of their groups: what a layer of experts is made of.

Rows are laid out in blocks that each belong to one group, so that a product is a loop over blocks, each a plain matrix
product with one matrix (the idea of MegaBlocks, Gale et al. 2022). XLA makes `jax.lax.ragged_dot` on CPUs and GPUs from
products of all rows with all matrices: with 128 experts, of which a token meets 8, sixteen times the work.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Between these a block is half as long as the rows of an average group.
_SHORTEST, _LONGEST = 8, 512


def block_length(rows: int, groups: int) -> int:
    """Rows of a block: a power of two, so long that products are large, so short that few rows are padding."""
    length = _SHORTEST
    while 2 * length <= min(_LONGEST, rows // (2 * groups)):
        length *= 2
    return length


def block_count(rows: int, groups: int) -> int:
    """Blocks that hold any distribution of `rows` over `groups`, where each block is of one group."""
    filled = min(rows, groups)  # groups with at least one row
    return filled + (rows - filled) // block_length(rows, groups)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A layout of rows in blocks.

    Attributes:
      slot: of each row, in the order the rows came.
      group: of each block; that of an unused block is arbitrary.
      shape: (blocks, rows of each).
    """

    slot: Int[Array, " R"]
    group: Int[Array, " blocks"]
    shape: tuple[int, int]

    def lay_out(self, rows: Float[Array, "R D"]) -> Float[Array, "blocks length D"]:
        """The rows in their slots; zeros in the others."""
        blocks, length = self.shape
        out = jnp.zeros((blocks * length, rows.shape[1]), rows.dtype)
        return out.at[self.slot].set(rows, unique_indices=True).reshape(blocks, length, -1)

    def take_back(self, blocks: Float[Array, "blocks length D"]) -> Float[Array, "R D"]:
        """The rows in the order they came."""
        return blocks.reshape(-1, blocks.shape[-1]).at[self.slot].get(unique_indices=True)


def lay_out(groups_of_rows: Int[Array, " R"], groups: int) -> Blocks:
    """Blocks for rows of these groups."""
    rows = groups_of_rows.shape[0]
    length, count = block_length(rows, groups), block_count(rows, groups)
    sizes = jnp.bincount(groups_of_rows, length=groups)
    last_block = jnp.cumsum(-(-sizes // length))  # of each group, exclusive
    first_slot = (last_block + sizes // -length) * length
    order = jnp.argsort(groups_of_rows, stable=True)
    first_row = jnp.cumsum(sizes) - sizes
    sorted_groups = groups_of_rows[order]
    slot = first_slot[sorted_groups] + jnp.arange(rows) - first_row[sorted_groups]
    group = jnp.searchsorted(last_block, jnp.arange(count), side="right")
    return Blocks(
        jnp.zeros(rows, jnp.int32).at[order].set(slot.astype(jnp.int32), unique_indices=True),
        jnp.minimum(group, groups - 1).astype(jnp.int32),
        (count, length),
    )


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "blocks length D"], weights: Float[Array, "groups D F"], group: Int[Array, " blocks"]
) -> Float[Array, "blocks length F"]:
    """Each block times the matrix of its group. A matrix's gradient is summed in float32."""

    def one(_: None, block: tuple[Array, Array]) -> tuple[None, Array]:
        rows, index = block
        return None, rows @ weights[index]

    return jax.lax.scan(one, None, (x, group))[1]


def _forward(x: Any, weights: Any, group: Any) -> tuple[Array, tuple[Array | None, Array, Array]]:
    # Only the gradient of matrices reads the rows; frozen ones have none.
    rows = x.value if weights.perturbed else None
    return grouped_matmul(x.value, weights.value, group.value), (rows, weights.value, group.value)


def _backward(saved: tuple[Array | None, Array, Array], change: Array) -> tuple[Array, Array | None, None]:
    x, weights, group = saved
    if x is None:
        _, x_change = jax.lax.scan(lambda _, block: (None, block[0] @ weights[block[1]].T), None, (change, group))
        return x_change, None, None

    def one(total: Array, block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        rows, outputs, index = block
        part = jnp.einsum("ld,lf->df", rows, outputs, preferred_element_type=jnp.float32)
        return total.at[index].add(part), outputs @ weights[index].T

    total, x_change = jax.lax.scan(one, jnp.zeros(weights.shape, jnp.float32), (x, change, group))
    return x_change, total.astype(weights.dtype), None


grouped_matmul.defvjp(_forward, _backward, symbolic_zeros=True)
