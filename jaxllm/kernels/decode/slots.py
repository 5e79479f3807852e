"""Which token lies in which slot of a cache, and which slots the newest tokens see.

Position p lies in slot p mod S. A full cache has a slot for every position that a row may reach; a ring has fewer, and
a token takes the slot of the one S before it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def slot_positions(lengths: Int[Array, " B"], slots: int) -> Int[Array, "B S"]:
    """Position held by each slot of rows that have `lengths` tokens; negative where none is."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots


def span(length: Int[Array, ""], tokens: int, slots: int, window: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """(first, end): all slots of a row that any of its last `tokens` tokens can see lie between.

    Args:
      length: tokens of the row, the last ones included.
      window: positions that a token sees, its own included; 0 is all.
    """
    end = jnp.minimum(length, slots)
    if not window:
        return jnp.zeros_like(end), end
    earliest = jnp.maximum(length - tokens - window + 1, 0)
    return jnp.where(length <= slots, earliest, 0), end


def query_tokens(rows: Int[Array, "R 1"], tokens: int, group: int) -> Int[Array, "R 1"]:
    """Which of a row's new tokens a query belongs to: queries come token by token, the heads of a group together.

    Compared and not divided: a TPU's vector unit has no division of integers.
    """
    token = jnp.zeros_like(rows)
    for later in range(1, tokens):
        token += (rows >= later * group).astype(jnp.int32)
    return token


def visible(
    slot: Int[Array, "1 n"], query: Int[Array, "R 1"], length: Int[Array, ""], slots: int, window: int
) -> Bool[Array, "R n"]:
    """Whether the token in a slot is seen from a position: it is there, not later, and in the window.

    Args:
      slot: indices, past the last slot too: those hold nothing.
      query: positions of the queries.
    """
    last = length - 1
    newest = jax.lax.rem(jnp.maximum(last, 0), jnp.asarray(slots, last.dtype))
    # Slots up to the newest token's are of this lap of a ring, those after it of the one before.
    position = slot + (last - newest)
    position = jnp.where(slot > newest, position - slots, position)
    mask = (slot < jnp.minimum(length, slots)) & (position >= 0) & (position <= query)
    if window:
        mask &= query - position < window
    return mask
