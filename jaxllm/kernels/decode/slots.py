"""KV-cache slots: the mapping from positions to slots, and the slots visible to the newest tokens.

Position p is stored in slot p mod S. A full cache has one slot per position that a row may reach. A ring cache has
fewer, and a token overwrites the slot of the token S positions earlier.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def slot_positions(lengths: Int[Array, " B"], slots: int) -> Int[Array, "B S"]:
    """Returns the position stored in each slot of rows with `lengths` tokens; negative for empty slots."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots


def span(length: Int[Array, ""], tokens: int, slots: int, window: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Returns the slot range [first, end) that contains all slots visible to a row's last `tokens` tokens.

    Args:
      length: Tokens of the row, including the last ones.
      tokens: Number of newest tokens.
      slots: Slots S per row.
      window: Number of visible positions, including the token's own; 0 means no limit.
    """
    end = jnp.minimum(length, slots)
    if not window:
        return jnp.zeros_like(end), end
    earliest = jnp.maximum(length - tokens - window + 1, 0)
    return jnp.where(length <= slots, earliest, 0), end


def query_tokens(rows: Int[Array, "R 1"], tokens: int, group: int) -> Int[Array, "R 1"]:
    """Returns the index of the new token that each query belongs to.

    Queries are ordered by token, then by head within the group. Comparisons replace the division rows // group because
    a TPU's vector unit has no integer division.
    """
    token = jnp.zeros_like(rows)
    for later in range(1, tokens):
        token += (rows >= later * group).astype(jnp.int32)
    return token


def visible(
    slot: Int[Array, "1 n"], query: Int[Array, "R 1"], length: Int[Array, ""], slots: int, window: int
) -> Bool[Array, "R n"]:
    """Returns the mask of visible slots: the slot is occupied, and its token is not later and within the window.

    Args:
      slot: Slot indices; indices past the last slot count as empty.
      query: Positions of the queries.
      length: Tokens of the row.
      slots: Slots S per row.
      window: Number of visible positions, including the query's own; 0 means no limit.
    """
    last = length - 1
    newest = jax.lax.rem(jnp.maximum(last, 0), jnp.asarray(slots, last.dtype))
    # In a ring, slots up to the newest token's belong to the current lap and later slots to the previous one.
    position = slot + (last - newest)
    position = jnp.where(slot > newest, position - slots, position)
    mask = (slot < jnp.minimum(length, slots)) & (position >= 0) & (position <= query)
    if window:
        mask &= query - position < window
    return mask
