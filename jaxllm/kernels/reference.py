"""Reference attention in plain JAX: kernels are tested against it, and it is the CPU implementation."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

# Large, but far from float32's limit, so the difference of two such values is finite.
_MASK_VALUE = -1e30


def attention_mask(
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"] | None,
    k_segments: Int[Array, "B S"] | None,
    window: int,
) -> Bool[Array, "B T S"]:
    """Returns the causal attention mask, restricted by window, segments and empty slots; True marks visible keys.

    Args:
      q_positions: Position of each query.
      k_positions: Position of each key; a negative value marks an absent key (an empty cache slot).
      q_segments, k_segments: Segment of each query and key; None disables segment masking.
      window: Number of visible keys, including the query's own position; 0 means no limit.
    """
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    mask = (distance >= 0) & (k_positions[:, None, :] >= 0)
    if window:
        mask &= distance < window
    if q_segments is not None and k_segments is not None:
        mask &= q_segments[:, :, None] == k_segments[:, None, :]
    return mask


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    *,
    scale: float,
    softcap: float,
    named: bool = True,
) -> Float[Array, "B T N H"]:
    """Computes softmax(cap(q·k·scale)) · v over the keys of `mask`, with grouped heads (Ainslie et al. 2023).

    Query head n uses key head n // (N / K). Scores and softmax are float32. The output of a query without visible
    keys is 0.

    Args:
      q: Queries.
      k, v: Keys and values.
      mask: True marks visible keys.
      scale: Factor of q·k.
      softcap: Applies c·tanh(score / c) before the mask (Gemma 2); 0 disables it.
      named: Whether scores and probabilities get checkpoint names, by which a remat policy can save them.

    Returns:
      The attention output, in the dtype of v.
    """
    B, T, N, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    # Merging the heads of a group with their queries makes both einsums plain batched matmuls. With five-index
    # einsums XLA's CPU backend takes four times as long for the gradients.
    grouped = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    scores = jnp.einsum("bkqh,bksh->bkqs", grouped, k, preferred_element_type=jnp.float32) * scale
    if softcap:
        scores = softcap * jnp.tanh((checkpoint_name(scores, "attn_scores") if named else scores) / softcap)
    bias = jnp.where(mask, 0.0, _MASK_VALUE)
    probs = _softmax(scores.reshape(B, K, G, T, S) + bias[:, None, None], named)
    probs = probs.reshape(B, K, G * T, S).astype(v.dtype)
    out = jnp.einsum("bkqs,bksh->bkqh", probs, v, preferred_element_type=jnp.float32)
    out = out.reshape(B, K, G, T, H) * mask.any(-1)[:, None, None, :, None]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(v.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _softmax(scores: Float[Array, "*batch S"], named: bool) -> Float[Array, "*batch S"]:
    return jax.nn.softmax(scores)


@_softmax.defjvp
def _softmax_jvp(named: bool, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # The derivative reads only the named result, so a remat policy can save it instead of the scores.
    probs = jax.nn.softmax(primals[0])
    if named:
        probs = checkpoint_name(probs, "attn_probs")
    d_out = probs * tangents[0]
    return probs, d_out - probs * d_out.sum(-1, keepdims=True)


def chunked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"] | None,
    k_segments: Int[Array, "B S"] | None,
    *,
    window: int,
    scale: float,
    softcap: float,
    chunk: int,
) -> Float[Array, "B T N H"]:
    """Computes `attention` for `chunk` queries at a time, so only one chunk's scores are in memory at once.

    The backward pass also handles one chunk at a time and recomputes its scores (Rabe & Staats 2021).

    Args:
      q: Queries.
      k, v: Keys and values.
      q_positions, k_positions, q_segments, k_segments, window: See `attention_mask`.
      scale, softcap: See `attention`.
      chunk: Queries per chunk; must divide T.

    Returns:
      The attention output.
    """
    B, T = q.shape[:2]

    def split_chunks(x: Array) -> Array:
        return x.reshape(B, T // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend_chunk(k: Array, v: Array, inputs: tuple[Array, Array, Array | None]) -> Array:
        queries, positions, segments = inputs
        mask = attention_mask(positions, k_positions, segments, k_segments, window)
        # Unnamed: a remat policy that saves these names would save them for every chunk.
        return attention(queries, k, v, mask, scale=scale, softcap=softcap, named=False)

    chunks = (split_chunks(q), split_chunks(q_positions), None if q_segments is None else split_chunks(q_segments))
    _, out = jax.lax.scan(lambda _, inputs: (None, attend_chunk(k, v, inputs)), None, chunks)
    return out.swapaxes(0, 1).reshape(q.shape)
