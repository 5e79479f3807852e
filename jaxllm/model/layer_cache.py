"""One layer's keys and values of the tokens so far: written, and attended to."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.kernels import decode_slots, decode_write_tpu, reference
from jaxllm.kernels.decode_attention import decode_attention


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's view of the stacked cache arrays while a block runs.

    The stacks travel whole and are written in place at `layer`: slices taken out and stacked again would
    be a second copy of the cache. Position p lives in slot p mod S.

    Attributes:
      k, v: [repeats, B, K, S, H].
      layer: index into the first dimension.
      lengths: tokens of each row in the cache before this pass.
      capacity: tokens a row may have; fewer slots than that make the layer a ring.
    """

    k: Float[Array, "L B K S H"]
    v: Float[Array, "L B K S H"]
    layer: Int[Array, ""] | int
    lengths: Int[Array, " B"]
    capacity: int

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T H"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"] | None,
        *,
        window: int,
        scale: float,
        softcap: float,
    ) -> tuple[Float[Array, "B T N H"], "LayerCache"]:
        """Writes T tokens, which attend to those of the cache and to one another.

        Args:
          valid: False for padding, which is not written, and whose output means nothing; None where all are real.
        """
        valid = jnp.ones(positions.shape, bool) if valid is None else valid
        if q.shape[1] == 1:
            cache = self._write_one(k, v, positions, valid)
            y = decode_attention(
                q,
                cache.k,
                cache.v,
                self.lengths + valid[:, 0],
                layer=self.layer,
                window=window,
                scale=scale,
                softcap=softcap,
                capacity=self.capacity,
                platform="auto",
            )
            return y, cache
        keys, values, key_positions, cache = self._extend(k, v, positions, valid)
        mask = reference.attention_mask(positions, key_positions, None, None, window)
        return reference.attention(q, keys, values, mask, scale=scale, softcap=softcap), cache

    def _write_one(
        self, k: Float[Array, "B K 1 H"], v: Float[Array, "B K 1 H"], positions: Array, valid: Array
    ) -> "LayerCache":
        """A token of each row."""
        S = self.k.shape[3]
        kept = valid & (positions < self.capacity)
        slot = jnp.where(kept, positions % S, S)
        layer = jnp.asarray(self.layer, jnp.int32)
        new_k, new_v = jax.lax.platform_dependent(
            self.k, self.v, k, v, layer, slot, tpu=_write_on_tpu, default=_scatter
        )
        return dataclasses.replace(self, k=new_k, v=new_v)

    def _extend(
        self, k: Float[Array, "B K T H"], v: Float[Array, "B K T H"], positions: Array, valid: Array
    ) -> tuple[Array, Array, Int[Array, "B s"], "LayerCache"]:
        """Writes T tokens; returns keys, values, the position of each (negative: none), and the new cache.

        A ring cannot hold T new tokens and all that the first of them may see, so there the new tokens attend to the
        old slots and themselves, and are written after.
        """
        S = self.k.shape[3]
        after = self.lengths + valid.sum(1, dtype=jnp.int32)
        # Of tokens that share a slot only the last is written; padding goes nowhere (out of bounds: dropped).
        kept = valid & (positions >= after[:, None] - S) & (positions < self.capacity)
        slot = jnp.where(kept, positions % S, S)
        stack_k, stack_v = self.k, self.v
        wraps = self.capacity > S
        if wraps:
            # Old slots are read first. A read and a write of the stacks in no order would cost a copy of them.
            old_k, old_v, stack_k, stack_v = jax.lax.optimization_barrier(
                (self.k[self.layer], self.v[self.layer], self.k, self.v)
            )
        new_k, new_v = _scatter(stack_k, stack_v, k, v, self.layer, slot)
        cache = dataclasses.replace(self, k=new_k, v=new_v)
        if not wraps:
            keys, values = new_k[self.layer].astype(k.dtype), new_v[self.layer].astype(v.dtype)
            return keys, values, decode_slots.slot_positions(after, S), cache
        old = decode_slots.slot_positions(self.lengths, S)
        keys = jnp.concatenate([old_k.astype(k.dtype), k], axis=2)
        values = jnp.concatenate([old_v.astype(v.dtype), v], axis=2)
        return keys, values, jnp.concatenate([old, jnp.where(valid, positions, -1)], axis=1), cache


def _scatter(
    stack_k: Array, stack_v: Array, k: Array, v: Array, layer: Array | int, slot: Int[Array, "B T"]
) -> tuple[Array, Array]:
    """The stacks with tokens in their slots; those of slot S are dropped."""
    rows = jnp.arange(slot.shape[0])[:, None]
    stacks = []
    for stack, new in ((stack_k, k), (stack_v, v)):
        stacks.append(stack.at[layer, rows, :, slot].set(new.swapaxes(1, 2).astype(stack.dtype), mode="drop"))
    return stacks[0], stacks[1]


def _write_on_tpu(
    stack_k: Array, stack_v: Array, k: Array, v: Array, layer: Array, slot: Int[Array, "B 1"]
) -> tuple[Array, Array]:
    """The same of one token a row."""
    return decode_write_tpu.write_token(stack_k, stack_v, k[:, :, 0], v[:, :, 0], layer, slot[:, 0])
