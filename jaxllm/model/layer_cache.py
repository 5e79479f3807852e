"""One layer's keys and values of the tokens so far: written, and attended to."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.kernels import reference
from jaxllm.kernels.decode import int8 as decode_int8
from jaxllm.kernels.decode import slots as decode_slots
from jaxllm.kernels.decode import write_tpu as decode_write_tpu
from jaxllm.kernels.decode.api import decode_attention

Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's view of the stacked cache arrays while a block runs.

    The stacks travel whole and are written in place at `layer`: slices taken out and stacked again would
    be a second copy of the cache. Position p lives in slot p mod S.

    Attributes:
      arrays: "k" and "v", [repeats, B, K, S, H]; in int8 with "k_scale" and "v_scale", [repeats, B, K, S].
      layer: index into the first dimension.
      lengths: tokens of each row in the cache before this pass.
      capacity: tokens a row may have; fewer slots than that make the layer a ring.
    """

    arrays: Arrays
    layer: Int[Array, ""] | int
    lengths: Int[Array, " B"]
    capacity: int

    @property
    def slots(self) -> int:
        return self.arrays["k"].shape[3]

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

        A pass of one token attends by the decode kernel. One of several does not, even where there are few: of a chunk
        that is padded the last T tokens of a row are not its new ones, and a ring that has taken all of them in has
        lost what the first of them see.

        Args:
          valid: False for padding, which is not written, and whose output means nothing; None where all are real.
        """
        valid = jnp.ones(positions.shape, bool) if valid is None else valid
        new = self._stored(k, v)
        if q.shape[1] == 1:
            cache = self._write_one(new, positions, valid)
            y = decode_attention(
                q,
                cache.arrays["k"],
                cache.arrays["v"],
                self.lengths + valid[:, 0],
                layer=self.layer,
                window=window,
                scale=scale,
                softcap=softcap,
                capacity=self.capacity,
                k_scale=cache.arrays.get("k_scale"),
                v_scale=cache.arrays.get("v_scale"),
                platform="auto",
            )
            return y, cache
        keys, values, key_positions, cache = self._extend(new, positions, valid, q.dtype)
        mask = reference.attention_mask(positions, key_positions, None, None, window)
        return reference.attention(q, keys, values, mask, scale=scale, softcap=softcap), cache

    def _stored(self, k: Float[Array, "B K T H"], v: Float[Array, "B K T H"]) -> Arrays:
        """New tokens as the cache has them."""
        if "k_scale" not in self.arrays:
            return {"k": k.astype(self.arrays["k"].dtype), "v": v.astype(self.arrays["v"].dtype)}
        (k, k_scale), (v, v_scale) = decode_int8.quantize(k), decode_int8.quantize(v)
        return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}

    def _write_one(self, new: Arrays, positions: Array, valid: Array) -> "LayerCache":
        """A token of each row."""
        kept = valid & (positions < self.capacity)
        slot = jnp.where(kept, positions % self.slots, self.slots)
        return dataclasses.replace(self, arrays=_write(self.arrays, new, self.layer, slot))

    def _extend(
        self, new: Arrays, positions: Array, valid: Array, dtype: jax.typing.DTypeLike
    ) -> tuple[Array, Array, Int[Array, "B s"], "LayerCache"]:
        """Writes T tokens; returns keys, values, the position of each (negative: none), and the new cache.

        A ring cannot hold T new tokens and all that the first of them may see, so there the new tokens attend to the
        old slots and themselves, and are written after.
        """
        S = self.slots
        after = self.lengths + valid.sum(1, dtype=jnp.int32)
        # Of tokens that share a slot only the last is written; padding goes nowhere (out of bounds: dropped).
        kept = valid & (positions >= after[:, None] - S) & (positions < self.capacity)
        slot = jnp.where(kept, positions % S, S)
        stacks = self.arrays
        wraps = self.capacity > S
        if wraps:
            # Old slots are read first. A read and a write of the stacks in no order would cost a copy of them.
            old, stacks = jax.lax.optimization_barrier((_layer(stacks, self.layer), stacks))
        cache = dataclasses.replace(self, arrays=_write(stacks, new, self.layer, slot))
        if not wraps:
            keys, values = _numbers(_layer(cache.arrays, self.layer), dtype)
            return keys, values, decode_slots.slot_positions(after, S), cache
        pairs = zip(_numbers(old, dtype), _numbers(new, dtype), strict=True)
        keys, values = (jnp.concatenate(pair, axis=2) for pair in pairs)
        held = decode_slots.slot_positions(self.lengths, S)
        return keys, values, jnp.concatenate([held, jnp.where(valid, positions, -1)], axis=1), cache


def _layer(stacks: Arrays, layer: Array | int) -> Arrays:
    return {name: stack[layer] for name, stack in stacks.items()}


def _numbers(stored: Arrays, dtype: jax.typing.DTypeLike) -> tuple[Float[Array, "B K s H"], Float[Array, "B K s H"]]:
    """Keys and values as they compute."""
    k, v = stored["k"], stored["v"]
    if "k_scale" in stored:
        k, v = decode_int8.dequantize(k, stored["k_scale"]), decode_int8.dequantize(v, stored["v_scale"])
    return k.astype(dtype), v.astype(dtype)


def _write(stacks: Arrays, new: Arrays, layer: Array | int, slot: Int[Array, "B T"]) -> Arrays:
    """The stacks with tokens in their slots, which follow one another; those of slot S are dropped."""
    layer = jnp.asarray(layer, jnp.int32)
    return jax.lax.platform_dependent(stacks, new, layer, slot, tpu=_write_on_tpu, default=_scatter)


def _scatter(stacks: Arrays, new: Arrays, layer: Array | int, slot: Int[Array, "B T"]) -> Arrays:
    rows = jnp.arange(slot.shape[0])[:, None]
    return {
        name: stack.at[layer, rows, :, slot].set(new[name].swapaxes(1, 2), mode="drop")
        for name, stack in stacks.items()
    }


def _write_on_tpu(stacks: Arrays, new: Arrays, layer: Array, slot: Int[Array, "B T"]) -> Arrays:
    return decode_write_tpu.write_tokens(stacks, new, layer, slot)
