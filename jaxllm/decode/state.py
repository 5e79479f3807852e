"""Decoding state: the cache, the pending token and the stopping and sampling state of each row."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.config import Architecture
from jaxllm.decode import cache as cache_lib
from jaxllm.decode import sampling as sampling_lib
from jaxllm.decode.cache import KVCache
from jaxllm.decode.sampling import SamplingParams

PAD = -1  # marks an empty entry in token buffers
END_SLOTS = 16  # maximum number of end ids per row

# Finish reasons. The reason "stop" (a stop string) exists only on the host, which alone has the text.
RUNNING, END, LENGTH = range(3)
REASONS = {END: "end", LENGTH: "length"}


class TokenBuffer(flax.struct.PyTreeNode):
    """Token buffer that replaces the KV cache in decoding without a cache.

    Attributes:
      tokens: Token ids; undefined from `lengths` on.
      lengths: Number of tokens of each row.
      capacity: Maximum tokens per row; static.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    capacity: int = flax.struct.field(pytree_node=False)


class DecodeState(flax.struct.PyTreeNode):
    """State of decoding between two tokens, a pytree.

    Attributes:
      cache: KV cache or token buffer of the tokens so far.
      next: Next token of each row, sampled but not yet emitted. The token is stored rather than its logits, which would
        be written to memory and read back for every token.
      seen: True for tokens of the row's prompt and text, for the repetition penalty.
      finished: Rows that emit no more tokens.
      reason: RUNNING, END (an end id) or LENGTH (the row's limit is reached or its cache is full).
      generated: Number of emitted tokens, including an end id.
      limits: Maximum number of emitted tokens per row.
      end_ids: End ids of each row, padded with PAD to E = END_SLOTS; a row of PAD only ignores all end ids.
      sampling: Sampling parameters of each row.
    """

    cache: KVCache | TokenBuffer
    next: Int[Array, " B"]
    seen: Bool[Array, "B V"]
    finished: Bool[Array, " B"]
    reason: Int[Array, " B"]
    generated: Int[Array, " B"]
    limits: Int[Array, " B"]
    end_ids: Int[Array, "B E"]
    sampling: SamplingParams


def start(
    model: Architecture,
    cache: KVCache | TokenBuffer,
    sampling: SamplingParams,
    limits: Sequence[int],
    end_ids: Sequence[Sequence[int]],
) -> DecodeState:
    """Creates the state before prefill.

    Args:
      model: Architecture of the model.
      cache: Empty KV cache, or token buffer.
      sampling: Sampling parameters of each row.
      limits: Maximum number of emitted tokens of each row.
      end_ids: End ids of each row, at most END_SLOTS.
    """
    B, V = len(limits), model.vocab_size
    ends = np.full((B, END_SLOTS), PAD, np.int32)
    for row, ids in enumerate(end_ids):
        assert len(ids) <= END_SLOTS, ids
        ends[row, : len(ids)] = ids
    return DecodeState(
        cache=cache,
        next=jnp.full(B, PAD, jnp.int32),
        seen=jnp.zeros((B, V), bool),
        finished=jnp.zeros(B, bool),
        reason=jnp.full(B, RUNNING, jnp.int32),
        generated=jnp.zeros(B, jnp.int32),
        limits=jnp.array(limits, jnp.int32),
        end_ids=jnp.array(ends),
        sampling=sampling,
    )


def start_without_cache(
    model: Architecture,
    prompts: Sequence[np.ndarray],
    capacity: int,
    sampling: SamplingParams,
    limits: Sequence[int],
    end_ids: Sequence[Sequence[int]],
) -> DecodeState:
    """Creates the state of `decode_without_cache`, which already contains the prompts and needs no prefill."""
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    state = start(model, TokenBuffer(jnp.array(tokens), lengths, capacity), sampling, limits, end_ids)
    valid = jnp.arange(capacity)[None, :] < lengths[:, None]
    return state.replace(seen=mark_seen(state.seen, jnp.array(tokens), valid))


def abstract(
    model: Architecture, batch: int, capacity: int, dtype: jax.typing.DTypeLike, with_cache: bool = True
) -> DecodeState:
    """Returns the shapes and dtypes of the state, with a cache in `dtype`, without allocating arrays."""

    def build() -> DecodeState:
        prompts = [np.zeros(1, np.int32)] * batch
        sampling = sampling_lib.make_params([sampling_lib.SamplingOptions()] * batch, prompts, model.vocab_size)
        if not with_cache:
            return start_without_cache(model, prompts, capacity, sampling, [1] * batch, [()] * batch)
        return start(model, cache_lib.create(model, batch, capacity, dtype), sampling, [1] * batch, [()] * batch)

    return jax.eval_shape(build)


def mark_seen(seen: Bool[Array, "B V"], tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]) -> Bool[Array, "B V"]:
    """Marks tokens as seen; tokens that are not valid (padding) are ignored."""
    rows = jnp.arange(seen.shape[0])[:, None]
    return seen.at[rows, jnp.where(valid, tokens, seen.shape[1])].set(True, mode="drop")  # out of bounds: dropped
