"""Prefill and decoding as pure functions of parameters and state.

Decoding runs on the device in loops of a few tokens. A finished row, including its cache and length, stays unchanged
while other rows continue. There are two versions: with a KV cache, and with a full forward pass per token, which is
slow but so simple that it is the reference for the first.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.config import Architecture
from jaxllm.decode import sampling as sampling_lib
from jaxllm.decode.cache import KVCache
from jaxllm.decode.state import END, LENGTH, PAD, RUNNING, DecodeState, TokenBuffer, mark_seen
from jaxllm.model import transformer
from jaxllm.parallel.collectives import SINGLE_DEVICE, Collectives

PREFILL_CHUNK = 128  # prompt tokens per row and prefill call
DECODE_STEPS = 8  # tokens per row and decode call; the host checks the text between calls


def _select_token(hidden: Float[Array, "B T D"], indices: Int[Array, " B"]) -> Float[Array, "B D"]:
    """Selects the hidden state of one token per row."""
    return jnp.take_along_axis(hidden, indices[:, None, None], axis=1)[:, 0]


def _positions(lengths: Int[Array, " B"], valid: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Computes the positions of new tokens; padding gets position 0, which is valid for learned positions."""
    return jnp.where(valid, lengths[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)


def extend(
    params: Any,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    model: Architecture,
    collectives: Collectives = SINGLE_DEVICE,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Runs new tokens through the model and appends them to the cache.

    Args:
      params: Parameter tree.
      cache: KV cache.
      tokens: New tokens of each row.
      valid: False for padding, which may be anywhere: the position of a token is the number of valid tokens before it.
      model: Architecture of the model.
      collectives: Collectives for the mesh sizes.

    Returns:
      (float32 logits after the last valid token of each row, undefined for rows without one; the updated cache).
    """
    positions = _positions(cache.lengths, valid)
    hidden, kv, _ = transformer.forward(
        params,
        jnp.where(valid, tokens, 0),
        positions,
        model,
        valid=valid,
        collectives=collectives,
        cache=cache.kv,
        lengths=cache.lengths,
        capacity=cache.capacity,
    )
    counts = valid.sum(1, dtype=jnp.int32)
    last = (valid * jnp.arange(tokens.shape[1])[None, :]).max(1)
    logits = transformer.logits(_select_token(hidden, last), params, model, collectives)
    return logits, KVCache(kv, cache.lengths + counts, cache.capacity)


def prefill(
    params: Any,
    state: DecodeState,
    tokens: Int[Array, "B C"],
    valid: Bool[Array, "B C"],
    model: Architecture,
    collectives: Collectives = SINGLE_DEVICE,
) -> DecodeState:
    """Prefills one chunk of the prompts and samples each row's next token.

    Args:
      params: Parameter tree.
      state: Decoding state with a KV cache.
      tokens: Next C tokens of every prompt; rows with fewer are padded, on either side.
      valid: False for padding. Rows without valid tokens keep their next token.
      model: Architecture of the model.
      collectives: Collectives for the mesh sizes.
    """
    assert isinstance(state.cache, KVCache)
    logits, cache = extend(params, state.cache, tokens, valid, model, collectives)
    seen = mark_seen(state.seen, tokens, valid)
    sampled = sampling_lib.next_tokens(logits, seen, state.sampling, cache.lengths)
    return state.replace(cache=cache, next=jnp.where(valid.any(1), sampled, state.next), seen=seen)


def _emit(state: DecodeState, tokens: Int[Array, " B"]) -> tuple[Int[Array, " B"], DecodeState]:
    """Emits one token per row (PAD for finished rows) and updates which rows are finished.

    A row finishes by length once the token fills its cache: a further token could not be cached, and the output after
    it would be wrong without any sign of it.
    """
    active = ~state.finished
    generated = state.generated + active
    ended = (tokens[:, None] == state.end_ids).any(1)
    full = (generated >= state.limits) | (state.cache.lengths + 1 >= state.cache.capacity)
    reason = jnp.where(ended, END, jnp.where(full, LENGTH, RUNNING)).astype(jnp.int32)
    reason = jnp.where(active, reason, state.reason)
    state = state.replace(
        seen=mark_seen(state.seen, tokens[:, None], active[:, None]),
        finished=state.finished | (reason != RUNNING),
        reason=reason,
        generated=generated,
    )
    return jnp.where(active, tokens, PAD), state


def _decode_loop(
    state: DecodeState,
    step: Callable[[DecodeState], tuple[Int[Array, " B"], DecodeState]],
    steps: int,
    limit: Int[Array, ""],
    collectives: Collectives,
) -> tuple[DecodeState, Int[Array, "B steps"]]:
    """Runs steps in a device loop until all rows are finished, at most `limit` times.

    Devices with different rows all make `limit` steps, because those with the same rows meet in every step and finished
    rows do not change.
    """

    def unfinished(carry: tuple[Array, DecodeState, Array]) -> Array:
        i, state, _ = carry
        more = i < jnp.minimum(limit, steps)
        return more if collectives.batch > 1 else more & ~state.finished.all()

    def body(carry: tuple[Array, DecodeState, Array]) -> tuple[Array, DecodeState, Array]:
        i, state, buffer = carry
        tokens, state = step(state)
        return i + 1, state, buffer.at[:, i].set(tokens)

    buffer = jnp.full((state.finished.shape[0], steps), PAD, jnp.int32)
    _, state, buffer = jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state, buffer))
    return state, buffer


def decode(
    params: Any,
    state: DecodeState,
    limit: Int[Array, ""],
    model: Architecture,
    steps: int,
    collectives: Collectives = SINGLE_DEVICE,
) -> tuple[DecodeState, Int[Array, "B steps"]]:
    """Decodes up to `limit` more tokens of every unfinished row.

    Args:
      params: Parameter tree.
      state: Decoding state with a KV cache.
      limit: Maximum number of tokens per row in this call.
      model: Architecture of the model.
      steps: Static upper bound of `limit`, the width of the returned tokens.
      collectives: Collectives for the mesh sizes.

    Returns:
      (state, tokens; PAD where a row was finished or no step was made).
    """

    def step(state: DecodeState) -> tuple[Array, DecodeState]:
        cache = state.cache
        assert isinstance(cache, KVCache)
        tokens, state = _emit(state, state.next)
        logits, cache = extend(params, cache, tokens[:, None], ~state.finished[:, None], model, collectives)
        sampled = sampling_lib.next_tokens(logits, state.seen, state.sampling, cache.lengths)
        return tokens, state.replace(cache=cache, next=jnp.where(state.finished, state.next, sampled))

    return _decode_loop(state, step, steps, limit, collectives)


def decode_without_cache(
    params: Any,
    state: DecodeState,
    limit: Int[Array, ""],
    model: Architecture,
    steps: int,
    collectives: Collectives = SINGLE_DEVICE,
) -> tuple[DecodeState, Int[Array, "B steps"]]:
    """Decodes like `decode`, but with a full forward pass over the whole token buffer per token."""

    def step(state: DecodeState) -> tuple[Array, DecodeState]:
        history = state.cache
        assert isinstance(history, TokenBuffer)
        positions = jnp.broadcast_to(jnp.arange(history.capacity), history.tokens.shape)
        hidden, _, _ = transformer.forward(params, history.tokens, positions, model, collectives=collectives)
        logits = transformer.logits(_select_token(hidden, history.lengths - 1), params, model, collectives)
        sampled = sampling_lib.next_tokens(logits, state.seen, state.sampling, history.lengths)
        tokens, state = _emit(state, sampled)
        # The token of a finished row gets an out-of-bounds index and is dropped.
        slots = jnp.where(state.finished, history.capacity, history.lengths)
        written = history.tokens.at[jnp.arange(slots.shape[0]), slots].set(tokens, mode="drop")
        history = history.replace(tokens=written, lengths=history.lengths + ~state.finished)
        return tokens, state.replace(cache=history)

    return _decode_loop(state, step, steps, limit, collectives)
