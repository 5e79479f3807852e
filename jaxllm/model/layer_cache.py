"""KV cache of one layer while a block runs: writes new tokens and computes attention over the cached ones."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.kernels import reference
from jaxllm.kernels.decode import common as decode_common
from jaxllm.kernels.decode import write_tpu as decode_write_tpu
from jaxllm.kernels.decode.api import decode_attention

Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """KV cache of one layer: arrays of its own, or a view of the stacked arrays of several layers.

    Stacked arrays are passed whole and written in place at index `layer`; slicing a layer out and stacking it again
    would make a second copy of the cache. Position p is stored in slot p mod S.

    Attributes:
      arrays: "k" and "v", [B, K, S, H]; an int8 cache also has "k_scale" and "v_scale", [B, K, S]. Stacked arrays have
        one more dimension in front.
      layer: Index into the first dimension of stacked arrays; None for a layer's own arrays.
      lengths: Number of cached tokens of each row before this pass.
      capacity: Maximum tokens per row. A layer with fewer slots than this is a ring buffer.
    """

    arrays: Arrays
    layer: Int[Array, ""] | None
    lengths: Int[Array, " B"]
    capacity: int

    @property
    def slots(self) -> int:
        """Slots S per row."""
        return self.arrays["k"].shape[-2]

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
        """Writes T tokens to the cache and computes their attention over the cached tokens and one another.

        A pass of one token uses the decode kernel. A pass of several tokens does not, however few they are: in a padded
        chunk, the last T tokens of a row are not its new tokens, and a ring buffer into which all of them are written
        has overwritten tokens that the first of them attend to.

        Args:
          q: Queries.
          k: Keys of the new tokens.
          v: Values of the new tokens.
          positions: Position of each token in its sequence.
          valid: False for padding, which is not written and whose output is undefined. None if there is no padding.
          window: Sliding-window size in tokens; 0 is full attention.
          scale: Factor on the scores before softmax.
          softcap: Cap of the scores, cap·tanh(score / cap); 0 is no cap.

        Returns:
          (attention output, the cache including the new tokens; its `lengths` are unchanged).
        """
        valid = jnp.ones(positions.shape, bool) if valid is None else valid
        new = self._to_cache_dtype(k, v)
        if q.shape[1] == 1:
            cache = self._append_one(new, positions, valid)
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
        keys, values, key_positions, cache = self._append(new, positions, valid, q.dtype)
        mask = reference.attention_mask(positions, key_positions, None, None, window)
        return reference.attention(q, keys, values, mask, scale=scale, softcap=softcap), cache

    def _to_cache_dtype(self, k: Float[Array, "B K T H"], v: Float[Array, "B K T H"]) -> Arrays:
        """Converts new keys and values to the cache's format: cast to its dtype, or quantized to int8 with scales."""
        if "k_scale" not in self.arrays:
            return {"k": k.astype(self.arrays["k"].dtype), "v": v.astype(self.arrays["v"].dtype)}
        (k, k_scale), (v, v_scale) = decode_common.quantize(k), decode_common.quantize(v)
        return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}

    def _append_one(self, new: Arrays, positions: Array, valid: Array) -> "LayerCache":
        """Writes one token per row."""
        is_written = valid & (positions < self.capacity)
        slot = jnp.where(is_written, positions % self.slots, self.slots)
        return dataclasses.replace(self, arrays=_write_tokens(self.arrays, new, self.layer, slot))

    def _append(
        self, new: Arrays, positions: Array, valid: Array, dtype: jax.typing.DTypeLike
    ) -> tuple[Array, Array, Int[Array, "B s"], "LayerCache"]:
        """Writes T tokens; returns keys, values, the position of each key (negative if empty), and the new cache.

        A ring buffer cannot store T new tokens together with every token that the first of them attends to. In a ring,
        the new tokens therefore attend to the old slots concatenated with themselves.
        """
        S = self.slots
        after = self.lengths + valid.sum(1, dtype=jnp.int32)
        # Of tokens with the same slot, only the last is written. Padding gets an out-of-bounds index and is dropped.
        is_written = valid & (positions >= after[:, None] - S) & (positions < self.capacity)
        slot = jnp.where(is_written, positions % S, S)
        arrays = self.arrays
        wraps = self.capacity > S
        if wraps:
            # Order the read of old slots before the write; otherwise XLA would copy the arrays.
            old, arrays = jax.lax.optimization_barrier((_layer(arrays, self.layer), arrays))
        cache = dataclasses.replace(self, arrays=_write_tokens(arrays, new, self.layer, slot))
        if not wraps:
            keys, values = _to_compute_dtype(_layer(cache.arrays, self.layer), dtype)
            return keys, values, decode_common.slot_positions(after, S), cache
        pairs = zip(_to_compute_dtype(old, dtype), _to_compute_dtype(new, dtype), strict=True)
        keys, values = (jnp.concatenate(pair, axis=2) for pair in pairs)
        old_positions = decode_common.slot_positions(self.lengths, S)
        return keys, values, jnp.concatenate([old_positions, jnp.where(valid, positions, -1)], axis=1), cache


def _layer(arrays: Arrays, layer: Array | None) -> Arrays:
    return arrays if layer is None else {name: stack[layer] for name, stack in arrays.items()}


def _to_compute_dtype(
    stored: Arrays, dtype: jax.typing.DTypeLike
) -> tuple[Float[Array, "B K s H"], Float[Array, "B K s H"]]:
    """Returns cached keys and values in the compute dtype, dequantized if the cache is int8."""
    k, v = stored["k"], stored["v"]
    if "k_scale" in stored:
        k, v = decode_common.dequantize(k, stored["k_scale"]), decode_common.dequantize(v, stored["v_scale"])
    return k.astype(dtype), v.astype(dtype)


def _write_tokens(arrays: Arrays, new: Arrays, layer: Array | None, slot: Int[Array, "B T"]) -> Arrays:
    """Writes tokens to their slots, which are consecutive; tokens with slot S are dropped."""
    return jax.lax.platform_dependent(
        *(arrays, new, layer, slot), cpu=_scatter_on_cpu, tpu=_write_on_tpu, default=_scatter
    )


def _scatter(arrays: Arrays, new: Arrays, layer: Array | None, slot: Int[Array, "B T"]) -> Arrays:
    rows = jnp.arange(slot.shape[0])[:, None]
    index = (rows, slice(None), slot) if layer is None else (layer, rows, slice(None), slot)
    return {name: x.at[index].set(new[name].swapaxes(1, 2), mode="drop") for name, x in arrays.items()}


def _scatter_on_cpu(arrays: Arrays, new: Arrays, layer: Array | None, slot: Int[Array, "B T"]) -> Arrays:
    if slot.size == 1:
        # XLA turns a scatter of one index into an update that it fuses into every reader of the cache, and copies the
        # cache for each. A second index, which is dropped, keeps it a scatter, in place.
        slot = jnp.concatenate([slot, jnp.full_like(slot, arrays["k"].shape[-2])], axis=1)
        new = {name: jnp.repeat(x, 2, axis=2) for name, x in new.items()}
    return _scatter(arrays, new, layer, slot)


def _write_on_tpu(arrays: Arrays, new: Arrays, layer: Array | None, slot: Int[Array, "B T"]) -> Arrays:
    if layer is not None:
        return decode_write_tpu.write_tokens(arrays, new, layer, slot)
    stacked = {name: x[None] for name, x in arrays.items()}
    written = decode_write_tpu.write_tokens(stacked, new, jnp.zeros((), jnp.int32), slot)
    return {name: x[0] for name, x in written.items()}
