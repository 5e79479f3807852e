"""The attention sub-layer: projections, positions, and keys and values from the sequence or from a cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.kernels import reference
from jaxllm.model.layers import align, matmul, norm, rotate
from jaxllm.model.partition import WHOLE, Partition


@dataclasses.dataclass(frozen=True)
class Span:
    """Where the tokens of one forward pass stand.

    Attributes:
      positions: of each token in its own sequence.
      segments: tokens attend within one segment only; None where a row is one sequence.
      valid: False for padding, which is never written to a cache; None where every token is real.
      angles: rotary (cos, sin) of each layer kind; empty for learned positions.
      chunk: queries whose scores exist at one time; 0 is all of them.
    """

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None
    valid: Bool[Array, "B T"] | None
    angles: dict[str, tuple[Array, Array]]
    chunk: int = 0


def _project(x: Array, params: dict[str, Any], name: str, model: Architecture) -> Array:
    y = matmul(x, params[name])
    if model.qkv_bias:
        y = y + align(params[f"{name}_bias"], y)
    return y


def attention(
    x: Float[Array, "B T D"],
    params: dict[str, Any],
    model: Architecture,
    kind: str,
    span: Span,
    cache: "LayerCache | None" = None,
    partition: Partition = WHOLE,
) -> tuple[Float[Array, "B t D"], "LayerCache | None"]:
    """Self-attention of one layer, over the tokens given or over those and a cache's.

    Args:
      x: all tokens of the sequences.
    Returns:
      (output, the cache with these tokens written; None where none was given).
    """
    q, k, v = (_project(x, params, name, model) for name in "qkv")
    if model.qk_norm:
        kind_of_norm = "rmsnorm" if model.norm == "layernorm" else model.norm
        q = norm(q, params["q_norm"], kind_of_norm, model.norm_eps)
        k = norm(k, params["k_norm"], kind_of_norm, model.norm_eps)
    if span.angles:
        q, k = rotate(q, span.angles[kind]), rotate(k, span.angles[kind])
    q, k, v = (checkpoint_name(y, "attn_qkv") for y in (q, k, v))
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)

    if cache is None:
        key_positions, key_segments = span.positions, span.segments
    else:
        k, v, key_positions, cache = cache.extend(k, v, span)
        key_segments = None
    window = model.window if kind == "sliding" else 0
    scale, softcap = model.attention_scale, model.attention_softcap
    if cache is None and span.chunk:
        segments = span.segments
        y = reference.chunked_attention(
            *(q, k, v, span.positions, key_positions, segments, key_segments),
            window=window,
            scale=scale,
            softcap=softcap,
            chunk=span.chunk,
        )
    else:
        mask = reference.attention_mask(span.positions, key_positions, span.segments, key_segments, window)
        y = reference.attention(q, k, v, mask, scale=scale, softcap=softcap)
    y = checkpoint_name(y, "attn_context")
    y = partition.leave(matmul(y, params["out"], fan_in=2))
    if model.out_bias:
        y = y + align(params["out_bias"], y)
    return checkpoint_name(y, "attn_out"), cache


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's view of the stacked cache arrays while a block runs.

    The stacks travel whole and are written in place at `layer`: slices taken out and stacked again would
    be a second copy of the cache.

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

    def extend(self, k: Float[Array, "B K T H"], v: Float[Array, "B K T H"], span: Span) -> tuple[Any, ...]:
        """Writes T tokens; returns keys, values, the position of each (negative: none), and the new cache.

        Position p lives in slot p mod S. A ring cannot hold T new tokens and all that the first of them
        may see, so there several new tokens attend to the old slots and themselves, and are written after.
        """
        B, _, T, _ = k.shape
        S = self.k.shape[3]
        valid = jnp.ones((B, T), bool) if span.valid is None else span.valid
        after = self.lengths + valid.sum(1, dtype=jnp.int32)
        # Of tokens that share a slot only the last is written; padding goes nowhere (out of bounds: dropped).
        kept = valid & (span.positions >= after[:, None] - S) & (span.positions < self.capacity)
        slot = jnp.where(kept, span.positions % S, S)
        rows = jnp.arange(B)[:, None]
        wraps = T > 1 and self.capacity > S
        stack_k, stack_v = self.k, self.v
        if wraps:
            # Old slots are read first. A read and a write of the stacks in no order would cost a copy of them.
            old_k, old_v, stack_k, stack_v = jax.lax.optimization_barrier(
                (self.k[self.layer], self.v[self.layer], self.k, self.v)
            )
        new_k = stack_k.at[self.layer, rows, :, slot].set(k.swapaxes(1, 2).astype(self.k.dtype), mode="drop")
        new_v = stack_v.at[self.layer, rows, :, slot].set(v.swapaxes(1, 2).astype(self.v.dtype), mode="drop")
        cache = dataclasses.replace(self, k=new_k, v=new_v)
        if not wraps:
            positions = _slot_positions(after, S)
            return new_k[self.layer].astype(k.dtype), new_v[self.layer].astype(v.dtype), positions, cache
        old = _slot_positions(self.lengths, S)
        new = jnp.where(valid, span.positions, -1)
        keys = jnp.concatenate([old_k.astype(k.dtype), k], axis=2)
        values = jnp.concatenate([old_v.astype(v.dtype), v], axis=2)
        return keys, values, jnp.concatenate([old, new], axis=1), cache


def _slot_positions(lengths: Int[Array, " B"], slots: int) -> Int[Array, "B S"]:
    """Position held by each slot of rows that have `lengths` tokens; negative where none is."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots
