"""What decoding carries from one token to the next."""

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

PAD = -1  # in buffers of tokens: none
END_SLOTS = 16  # end ids a row may have

# Why a row ended. "stop" is a word of the host, which alone sees text.
RUNNING, END, LENGTH = range(3)
REASONS = {END: "end", LENGTH: "length"}


class History(flax.struct.PyTreeNode):
    """What stands in for a cache where there is none: the tokens themselves.

    Attributes:
      tokens: ids; anything from `lengths` on.
      lengths, capacity: as in KVCache.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    capacity: int = flax.struct.field(pytree_node=False)


class DecodeState(flax.struct.PyTreeNode):
    """All that decoding carries from one token to the next.

    Attributes:
      cache: of the tokens so far.
      next: each row's next token, drawn and not yet emitted. Its logits are of no more use: kept, they would be written
        to memory and read back for every token.
      seen: tokens in the row's prompt and text, for the repetition penalty.
      finished: rows that emit no more.
      reason: RUNNING, END (an end id) or LENGTH (its limit, or the cache is full).
      generated: tokens emitted, an end id included.
      limits: most tokens a row may emit.
      end_ids: PAD where a row has fewer; all PAD ignores every end id.
    """

    cache: KVCache | History
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
    cache: KVCache | History,
    sampling: SamplingParams,
    limits: Sequence[int],
    end_ids: Sequence[Sequence[int]],
) -> DecodeState:
    """The state before prefill; `limits` and `end_ids` have an entry for each row."""
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
    """The state of `decode_without_cache`, with the prompts in it: there is nothing to prefill."""
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    state = start(model, History(jnp.array(tokens), lengths, capacity), sampling, limits, end_ids)
    valid = jnp.arange(capacity)[None, :] < lengths[:, None]
    return state.replace(seen=mark_seen(state.seen, jnp.array(tokens), valid))


def abstract(
    model: Architecture, batch: int, capacity: int, dtype: jax.typing.DTypeLike, with_cache: bool = True
) -> DecodeState:
    """Shapes and dtypes of the state, its cache in `dtype`; nothing is allocated."""

    def build() -> DecodeState:
        prompts = [np.zeros(1, np.int32)] * batch
        sampling = sampling_lib.make_params([sampling_lib.SamplingOptions()] * batch, prompts, model.vocab_size)
        if not with_cache:
            return start_without_cache(model, prompts, capacity, sampling, [1] * batch, [()] * batch)
        return start(model, cache_lib.create(model, batch, capacity, dtype), sampling, [1] * batch, [()] * batch)

    return jax.eval_shape(build)


def mark_seen(seen: Bool[Array, "B V"], tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]) -> Bool[Array, "B V"]:
    """The tokens so far, with some more; padding left out."""
    rows = jnp.arange(seen.shape[0])[:, None]
    return seen.at[rows, jnp.where(valid, tokens, seen.shape[1])].set(True, mode="drop")  # padding: out of bounds
