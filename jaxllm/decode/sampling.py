"""Sampling of the next token, with separate settings and noise for each row of a batch.

The order is repetition penalty, temperature, and then top-k, top-p and min-p. Each of the three allows a prefix of the
tokens in order of decreasing probability; the shortest prefix is used. The noise depends only on the row's seed, its
prompt and the sampled position, so other rows, batch size and padding do not change a row's tokens.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxllm.errors import UserError


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """Sampling settings of one prompt; each field is a flag of `jaxllm.sample`."""

    temperature: float = 1.0  # 0 is greedy decoding
    top_k: int = 0  # number of most likely tokens to sample from; 0 is all
    top_p: float = 1.0  # sample from the fewest most likely tokens with this total probability (Holtzman et al. 2020)
    min_p: float = 0.0  # minimum probability, as a fraction of the most likely token's (Nguyen et al. 2024)
    repetition_penalty: float = 1.0  # above 1: tokens of the prompt and of the text so far become less likely
    seed: int = 0


class SamplingParams(flax.struct.PyTreeNode):
    """Sampling parameters of a batch as arrays: the `SamplingOptions`, vocabulary size and random key of each row.

    Attributes:
      vocab_size: Number of valid ids; further ids are padding of the model's vocabulary and are never sampled.
      keys: Random key of each row's noise, derived from its seed and prompt.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    vocab_size: Int[Array, " B"]
    keys: Key[Array, " B"]


def check(options: SamplingOptions) -> None:
    """Validates sampling options.

    Raises:
      UserError: A value is out of range or NaN; the message names the flag.
    """
    if not 0 <= options.temperature < math.inf:
        raise UserError(f"--temperature is {options.temperature}; it must be 0 (greedy) or positive")
    if options.top_k < 0:
        raise UserError(f"--top_k is {options.top_k}; it must be 0 (off) or positive")
    if not 0 <= options.top_p <= 1:
        raise UserError(f"--top_p is {options.top_p}; it must be between 0 and 1 (1 is off)")
    if not 0 <= options.min_p <= 1:
        raise UserError(f"--min_p is {options.min_p}; it must be between 0 (off) and 1")
    if not 0 < options.repetition_penalty < math.inf:
        raise UserError(f"--repetition_penalty is {options.repetition_penalty}; it must be positive (1 is off)")
    if not 0 <= options.seed < 2**32:
        raise UserError(f"--seed is {options.seed}; it must be between 0 and {2**32 - 1}")


def row_keys(seeds: Sequence[int], prompts: Sequence[Sequence[int] | np.ndarray]) -> Key[Array, " B"]:
    """Derives each row's random key from its seed and prompt, so equal seeds give different prompts different noise."""
    digests = np.array([zlib.crc32(np.asarray(prompt, "<i4").tobytes()) for prompt in prompts], np.uint32)
    seeded = jax.vmap(lambda seed, digest: jax.random.fold_in(jax.random.key(seed), digest))
    return seeded(np.array(seeds, np.uint32), digests)


def make_params(
    options: Sequence[SamplingOptions], prompts: Sequence[Sequence[int] | np.ndarray], vocab_size: int
) -> SamplingParams:
    """Builds the sampling parameters of a batch, one row per prompt.

    Args:
      options: Options of each prompt.
      prompts: Token ids of each prompt.
      vocab_size: Number of valid ids.
    """

    def column(name: str, dtype: jax.typing.DTypeLike) -> Array:
        return jnp.array([getattr(one, name) for one in options], dtype)

    return SamplingParams(
        temperature=column("temperature", jnp.float32),
        # All values >= the vocabulary size mean "all"; clamp, because a larger value may not fit in an int32.
        top_k=jnp.array([min(one.top_k, vocab_size) for one in options], jnp.int32),
        top_p=column("top_p", jnp.float32),
        min_p=column("min_p", jnp.float32),
        repetition_penalty=column("repetition_penalty", jnp.float32),
        vocab_size=jnp.full(len(options), vocab_size, jnp.int32),
        keys=row_keys([one.seed for one in options], prompts),
    )


def penalize(logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, " B"]) -> Float[Array, "B V"]:
    """Applies the repetition penalty: divides positive logits of seen tokens by it and multiplies negative ones.

    The penalty is applied once, however often a token has been seen.

    Source: Keskar et al. 2019 (CTRL), section 4.1, which always divides and so favors repeats of unlikely tokens.
    """
    penalized = jnp.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
    return jnp.where(seen, penalized, logits)


def num_kept(logits: Float[Array, "B V"], params: SamplingParams) -> Int[Array, " B"]:
    """Returns how many tokens top-k, top-p and min-p keep, at least 1, given logits in decreasing order."""
    rank = jnp.arange(logits.shape[1])[None, :]
    allowed = (params.top_k[:, None] == 0) | (rank < params.top_k[:, None])
    # Top-p and min-p apply to the distribution renormalized after top-k.
    logits = jnp.where(allowed, logits, -jnp.inf)
    probabilities = jax.nn.softmax(logits)
    before = jnp.cumsum(probabilities, axis=1) - probabilities
    # With top_p = 1, rounding of the cumulative sum must not remove the tail.
    allowed &= (params.top_p[:, None] >= 1) | (before < params.top_p[:, None])
    allowed &= probabilities >= params.min_p[:, None] * probabilities[:, :1]
    return jnp.maximum(allowed.sum(1, dtype=jnp.int32), 1)


def _draw(logits: Float[Array, "B V"], params: SamplingParams, positions: Int[Array, " B"]) -> Int[Array, " B"]:
    """Samples with the Gumbel-max trick; noise is generated per token id, so filters do not change it."""
    V = logits.shape[1]

    def row_noise(key: Key[Array, ""], position: Int[Array, ""]) -> Float[Array, " V"]:
        return jax.random.gumbel(jax.random.fold_in(key, position), (V,), jnp.float32)

    noise = jax.vmap(row_noise)(params.keys, positions)
    logits = logits / jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]

    def plain() -> Array:
        return jnp.argmax(logits + noise, axis=1)

    def filtered() -> Array:
        # Sort noise and ids together with the logits: a gather by the sorted order is far slower on accelerators.
        ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        negated, noise_sorted, ids_sorted = jax.lax.sort((-logits, noise, ids), dimension=1, num_keys=1, is_stable=True)
        decreasing = -negated
        kept = jnp.arange(V)[None, :] < num_kept(decreasing, params)[:, None]
        noisy = jnp.where(kept, decreasing + noise_sorted, -jnp.inf)
        return jnp.take_along_axis(ids_sorted, jnp.argmax(noisy, axis=1)[:, None], axis=1)[:, 0]

    # Sorting a large vocabulary can take longer than a small model's step, and most requests use no filters.
    filters = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
    return jax.lax.cond(filters.any(), filtered, plain)


def next_tokens(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], params: SamplingParams, positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Samples the next token of each row; rows with temperature 0 take the most likely token.

    Args:
      logits: Float32 logits.
      seen: True for tokens of the row's prompt and text so far, without padding.
      params: Sampling parameters of each row.
      positions: Position of the sampled token in its sequence.
    """
    logits = penalize(logits, seen, params.repetition_penalty)
    logits = jnp.where(jnp.arange(logits.shape[1])[None, :] < params.vocab_size[:, None], logits, -jnp.inf)
    best = jnp.argmax(logits, axis=1)
    sampled = params.temperature > 0
    drawn = jax.lax.cond(sampled.any(), lambda: _draw(logits, params, positions), lambda: best)
    return jnp.where(sampled, drawn, best).astype(jnp.int32)
