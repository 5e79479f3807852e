"""The forward pass compared with a naive implementation written from the papers, and its invariants."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from jaxllm.kernels.decode import common as decode_common
from jaxllm.model import layers, specs, transformer

KEY = jax.random.key(0)


@functools.cache
def make(model, rows=2, length=20):
    params = specs.initialize(specs.param_specs(model), KEY, jnp.float32)
    # Norms and biases are away from their identities, so that an omitted one is detected.
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, model.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    return params, tokens, positions


@functools.partial(jax.jit, static_argnums=0)
def jitted_logits(model, params, tokens, positions, segments):
    hidden, _, _ = transformer.forward(params, tokens, positions, model, segments=segments)
    return transformer.logits(hidden, params, model)


def logits_of(model, params, tokens, positions, segments=None):
    return np.asarray(jitted_logits(model, params, tokens, positions, segments))


# -- naive reference: one token, one head, one layer at a time, in float64 NumPy --


def naive_norm(x, p, kind, eps):
    if kind == "layernorm":
        return (x - x.mean()) / math.sqrt(x.var() + eps) * p["scale"] + p["bias"]
    return x / math.sqrt((x * x).mean() + eps) * (1 + p["scale"] if kind == "rmsnorm_plus_one" else p["scale"])


def naive_rotate(x, position, base, factors, magnitude=1.0):
    """Rotates `x` with one factor per pair; elements of x beyond the factors are not rotated."""
    half = len(factors)
    out = x.copy()
    for i in range(half):
        angle = position / factors[i] * base ** (-i / half)
        out[i] = magnitude * (x[i] * math.cos(angle) - x[i + half] * math.sin(angle))
        out[i + half] = magnitude * (x[i + half] * math.cos(angle) + x[i] * math.sin(angle))
    return out


def naive_positions(x, t, T, kind, m):
    """Applies positions to one head's query or key at position t of T."""
    if m.rope_scaling == "longrope":
        factors = m.rope_long_factors if m.rope_original_context < T else m.rope_short_factors
        magnitude = math.sqrt(1 + math.log(m.rope_factor) / math.log(m.rope_original_context))
        return naive_rotate(x, t, m.rope_theta, factors, magnitude)
    own_base = kind == "sliding" and m.rope_theta_sliding
    base, factor = (m.rope_theta_sliding, 1) if own_base else (m.rope_theta, m.rope_factor)
    return naive_rotate(x, t, base, [factor] * (len(x) // 2))


def naive_act(x, mlp):
    if mlp == "swiglu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def naive_mlp(x, p, m):
    def project(w, name, e=None):
        bias = p.get(f"{name}_bias", np.zeros(1))
        return x_in @ (w if e is None else w[e]) + (bias if e is None or not m.mlp_bias else bias[e])

    def one(e=None):
        nonlocal x_in
        x_in = x
        up = project(p["up"], "up", e)
        hidden = naive_act(project(p["gate"], "gate", e), m.mlp) * up if m.gated else naive_act(up, m.mlp)
        x_in = hidden
        return project(p["down"], "down", e)

    x_in = x
    if not m.experts:
        return one()
    score = x @ p["router"]
    prob = np.exp(score - score.max())
    prob /= prob.sum()
    chosen = np.argsort(-prob)[: m.experts_per_token]
    weight = prob[chosen] / prob[chosen].sum() if m.normalize_routing else prob[chosen]
    return sum(w * one(e) for w, e in zip(weight, chosen, strict=True))


def naive_logits(m, params, tokens):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    kinds = [m.pattern[i % len(m.pattern)] for i in range(m.layers)]

    def layer(i):
        if i >= m.repeats * len(m.pattern):
            return params["tail"][i - m.repeats * len(m.pattern)]
        repeat, place = divmod(i, len(m.pattern))
        return jax.tree.map(lambda x: x[repeat], params["layers"][place])

    T, G = len(tokens), m.heads // m.kv_heads
    x = [params["embed"]["tokens"][t] * m.embedding_scale for t in tokens]
    if m.positions == "learned":
        x = [v + params["embed"]["positions"][i] for i, v in enumerate(x)]
    for i, kind in enumerate(kinds):
        p = layer(i)
        a = p["attn"]
        heads = {"q": [], "k": [], "v": []}
        for t in range(T):
            y = x[t] if m.norm_placement == "post" else naive_norm(x[t], p["attn_norm"], m.norm, m.norm_eps)
            for name in "qkv":
                h = np.einsum("d,dnh->nh", y, a[name]) + (a[f"{name}_bias"] if m.qkv_bias else 0)
                if m.qk_norm and name in "qk":
                    scale = a[f"{name}_norm"]
                    if m.qk_norm_over == "projection":
                        flat = {"scale": scale["scale"].reshape(-1)}
                        h = naive_norm(h.reshape(-1), flat, m.norm, m.norm_eps).reshape(h.shape)
                    else:
                        h = np.array([naive_norm(v, scale, m.norm, m.norm_eps) for v in h])
                if m.positions == "rotary" and kind != "nope" and name in "qk":
                    h = np.array([naive_positions(v, t, T, kind, m) for v in h])
                heads[name].append(h)
        for t in range(T):
            out = np.zeros(m.width)
            for n in range(m.heads):
                first = max(0, t - m.window + 1) if kind == "sliding" else 0
                s = np.array(
                    [heads["q"][t][n] @ heads["k"][u][n // G] * m.attention_scale for u in range(first, t + 1)]
                )
                if m.attention_softcap:
                    s = m.attention_softcap * np.tanh(s / m.attention_softcap)
                w = np.exp(s - s.max())
                w /= w.sum()
                mixed = sum(w[j] * heads["v"][first + j][n // G] for j in range(len(w)))
                out += mixed @ a["out"][n]
            if m.out_bias:
                out += a["out_bias"]
            if m.norm_placement != "pre":
                out = naive_norm(out, p["attn_post_norm"], m.norm, m.norm_eps)
            x[t] = x[t] + out
            y = x[t] if m.norm_placement == "post" else naive_norm(x[t], p["mlp_norm"], m.norm, m.norm_eps)
            y = naive_mlp(y, p["mlp"], m)
            if m.norm_placement != "pre":
                y = naive_norm(y, p["mlp_post_norm"], m.norm, m.norm_eps)
            x[t] = x[t] + y
    head = params.get("head", params["embed"]["tokens"])
    out = np.array([naive_norm(v, params["final_norm"], m.norm, m.norm_eps) @ head.T for v in x])
    return m.logit_softcap * np.tanh(out / m.logit_softcap) if m.logit_softcap else out


@pytest.mark.parametrize(("name", "length"), [*((name, 20) for name in models.ALL), ("longrope", 10)])
def test_logits_equal_naive_implementation(name, length):
    model = models.ALL[name]
    params, tokens, positions = make(model, length=length)
    got = logits_of(model, params, tokens, positions)
    want = np.stack([naive_logits(model, params, np.asarray(row)) for row in tokens])
    assert np.abs(want).max() > 1, "logits too small for the comparison to mean anything"
    np.testing.assert_allclose(got, want, atol=2e-4, rtol=2e-4)


FAULTS = {
    "wrong rope base": {"rope_theta": 5_000.0},
    "window one too wide": {"window": 7},
    "kinds swapped": {"pattern": ("full", "sliding")},
    "no attention cap": {"attention_softcap": 0.0},
    "no logit cap": {"logit_softcap": 0.0},
    "sandwich norms left out": {"norm_placement": "pre"},
    "plain norm scale": {"norm": "rmsnorm"},
    "embedding not scaled": {"embedding_scale": 1.0},
    "head_dim scale": {"query_scale": 0.0},
    "sliding base ignored": {"rope_theta_sliding": 0.0},
    "rope not scaled": {"rope_factor": 1.0},
    "SiLU gate": {"mlp": "swiglu"},
    "eps": {"norm_eps": 1e-2},
}
OWN_FACTOR = math.sqrt(1 + math.log(4) / math.log(10))
MORE_FAULTS = {
    "all of a head rotated": (
        "longrope",
        {"rope_dim": 8, "rope_short_factors": (1.0,) * 4, "rope_long_factors": (1.2, 2.5, 3.9, 3.9)},
    ),
    "short factors": ("longrope", {"rope_long_factors": models.LONGROPE.rope_short_factors}),
    "long ten tokens late": ("longrope", {"rope_original_context": 20, "rope_attention_factor": OWN_FACTOR}),
    "queries and keys not scaled": ("longrope", {"rope_attention_factor": 1.0}),
    "unrotated layers rotated": ("longrope", {"pattern": ("full", "full")}),
    "norms of heads": ("post", {"qk_norm_over": "head"}),
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [*(("sliding", changes) for changes in FAULTS.values()), *MORE_FAULTS.values()],
    ids=[*FAULTS, *MORE_FAULTS],
)
def test_comparison_catches(name, changes):
    """The tolerance above is tight enough to detect each of these planted faults."""
    model = models.ALL[name]
    params, tokens, positions = make(model)
    want = logits_of(model, params, tokens, positions)
    wrong = logits_of(dataclasses.replace(model, **changes), params, tokens, positions)
    assert np.abs(wrong - want).max() > 5e-3


@pytest.mark.parametrize("name", models.ALL)
def test_segments_do_not_see_each_other(name):
    """Two documents packed in one row give the results that each gives alone."""
    model = models.ALL[name]
    params, tokens, _ = make(model, rows=1, length=20)
    cut = 8
    segments = jnp.where(jnp.arange(20) < cut, 1, 2)[None]
    positions = jnp.where(jnp.arange(20) < cut, jnp.arange(20), jnp.arange(20) - cut)[None]
    packed = logits_of(model, params, tokens, positions, segments=segments)
    for part in (slice(0, cut), slice(cut, 20)):
        alone = logits_of(model, params, tokens[:, part], positions[:, part])
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-4)
    leaking = logits_of(model, params, tokens, positions)
    assert np.abs(leaking - packed)[:, cut:].max() > 1e-2, "without segments the documents must leak"


@pytest.mark.once
@pytest.mark.parametrize("name", models.ALL)
def test_unrolling_and_attention_in_chunks_change_nothing(name):
    model = models.ALL[name]
    params, tokens, positions = make(model)
    segments = jnp.where(jnp.arange(20) < 9, 1, 2)[None].repeat(2, 0)

    def loss(params, model, chunk):
        hidden, _, aux_loss = transformer.forward(
            params, tokens, positions, model, segments=segments, attention_chunk=chunk
        )
        return jnp.square(hidden).mean() + aux_loss

    want = jax.jit(jax.grad(loss), static_argnums=(1, 2))(params, model, 0)
    for variant, chunk in ((dataclasses.replace(model, unroll=2), 0), (model, 5)):
        got = jax.jit(jax.grad(loss), static_argnums=(1, 2))(params, variant, chunk)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), got, want)


def test_dropless_routing_ignores_neighbours():
    """A row gives the same result alone and in a batch that overloads its experts."""
    params, tokens, positions = make(models.EXPERTS, rows=6)
    together = logits_of(models.EXPERTS, params, tokens, positions)
    alone = logits_of(models.EXPERTS, params, tokens[:1], positions[:1])
    np.testing.assert_allclose(together[:1], alone, atol=1e-5)


def test_balance_loss_is_one_when_even_and_grows_when_not():
    from jaxllm.model.moe import load_balancing_loss

    even = jnp.full((8, 4), 0.25)
    experts = jnp.stack([jnp.arange(8) % 4, (jnp.arange(8) + 1) % 4], axis=1)
    real = jnp.ones(8, bool)
    assert float(load_balancing_loss(even, experts, real)) == pytest.approx(1.0)
    skewed = jnp.tile(jnp.array([[0.7, 0.1, 0.1, 0.1]]), (8, 1))
    crowded = jnp.tile(jnp.array([[0, 1]]), (8, 1))
    assert float(load_balancing_loss(skewed, crowded, real)) == pytest.approx(4 * (0.5 * 0.7 + 0.5 * 0.1))
    # Padding must not count.
    half = jnp.arange(8) < 4
    mixed = jnp.where(half[:, None], even, skewed)
    assert float(load_balancing_loss(mixed, experts, half)) == pytest.approx(1.0)


def test_llama3_frequencies():
    """Llama 3.2's published RoPE scaling: pairs kept, blended, and divided by 32."""
    model = dataclasses.replace(
        models.ROTARY,
        head_dim=64,
        rope_theta=5e5,
        rope_scaling="llama3",
        rope_factor=32.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_context=8192,
    )
    scaled, factor = layers.rope_frequencies(model, "full")
    plain, _ = layers.rope_frequencies(dataclasses.replace(model, rope_scaling="none"), "full")
    ratio = scaled / plain
    assert factor == 1.0
    np.testing.assert_allclose(ratio[:15], 1)
    np.testing.assert_allclose(ratio[15:18], [0.605573, 0.303743, 0.103448], atol=1e-6)
    np.testing.assert_allclose(ratio[18:], 1 / 32)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    model = dataclasses.replace(
        models.ROTARY, head_dim=128, rope_scaling="yarn", rope_factor=4.0, rope_original_context=4096
    )
    scaled, factor = layers.rope_frequencies(model, "full")
    plain, _ = layers.rope_frequencies(dataclasses.replace(model, rope_scaling="none"), "full")
    # Pairs with 32 or more rotations in the original context are kept; those with less than one are divided.
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose((scaled / plain)[turns > 33], 1)
    np.testing.assert_allclose((scaled / plain)[turns < 0.9], 1 / 4)
    assert np.all(np.diff(scaled / plain) <= 0)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


def test_a_sequence_is_long_by_its_own_length_alone():
    """LongRoPE: each token's factors depend on the length of its own sequence, in one row and in one batch."""
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0]])
    positions = jnp.array([[0, 1, 2, 0, 1, 0, 0, 0]])
    assert layers.last_positions(positions, segments).tolist() == [[2, 2, 2, 1, 1, 0, 0, 0]]
    assert layers.last_positions(positions, None).tolist() == [[2]]
    model = models.LONGROPE
    params, tokens, positions = make(model)
    together = logits_of(model, params, tokens, jnp.stack([positions[0], positions[0] % 8]))
    alone = logits_of(model, params, tokens[:1], positions[:1])
    np.testing.assert_allclose(together[:1], alone, atol=1e-5)


def test_longrope_in_a_cache_goes_by_its_capacity():
    """Chunked and whole prefill agree; the cache's capacity, not the current length, selects long or short factors."""
    model = models.LONGROPE
    params, tokens, positions = make(model)

    @functools.partial(jax.jit, static_argnums=0)
    def go_on(capacity, tokens, positions, cache, lengths):
        hidden, cache, _ = transformer.forward(
            params, tokens, positions, model, cache=cache, lengths=lengths, capacity=capacity
        )
        return transformer.logits(hidden[:, -1], params, model), cache

    def in_chunks(capacity, length, chunk):
        cache = specs.initialize(specs.cache_specs(model, 2, capacity), KEY, jnp.float32)
        for at in range(0, length, chunk):
            part, lengths = slice(at, at + chunk), jnp.full(2, at, jnp.int32)
            last, cache = go_on(capacity, tokens[:, part], positions[:, part], cache, lengths)
        return np.asarray(last)

    def whole(length):
        return logits_of(model, params, tokens[:, :length], positions[:, :length])[:, -1]

    np.testing.assert_allclose(in_chunks(20, 20, 5), whole(20), atol=1e-4)  # the first chunks are short
    np.testing.assert_allclose(in_chunks(10, 10, 5), whole(10), atol=1e-4)
    assert np.abs(in_chunks(20, 10, 5) - whole(10)).max() > 1e-2, "a short sequence with room to become long is long"


def test_longrope_frequencies():
    """LongRoPE of Phi-3: one factor per pair, and √(1 + ln 32 / ln 4096) on q and k for 32 times 4096 positions."""
    model = dataclasses.replace(models.LONGROPE, rope_factor=32.0, rope_original_context=4096)
    plain, _ = layers.rope_frequencies(dataclasses.replace(model, rope_scaling="none"), "full")
    np.testing.assert_allclose(plain, 100.0 ** (-np.arange(3) / 3))
    for long, factors in ((False, model.rope_short_factors), (True, model.rope_long_factors)):
        scaled, factor = layers.rope_frequencies(model, "full", long)
        np.testing.assert_allclose(plain / scaled, factors)
        assert factor == pytest.approx(1.190238, abs=1e-6)


def test_initial_values_depend_on_place_alone():
    """Initial values depend only on an array's path: other layer counts and new arrays do not change them."""
    small = specs.initialize(specs.param_specs(models.ROTARY), KEY, jnp.float32)
    large = specs.initialize(
        specs.param_specs(dataclasses.replace(models.ROTARY, layers=2, qk_norm=True)), KEY, jnp.float32
    )
    np.testing.assert_array_equal(small["layers"][0]["attn"]["q"], large["layers"][0]["attn"]["q"])
    q, k = small["layers"][0]["attn"]["q"], small["layers"][0]["attn"]["k"]
    assert not np.array_equal(q[:, :, :2], k), "arrays must not share random numbers"
    assert float(q.std()) == pytest.approx(models.ROTARY.init_std, rel=0.1)
    out = small["layers"][0]["attn"]["out"]
    assert float(out.std()) == pytest.approx(models.ROTARY.init_std / math.sqrt(2 * models.ROTARY.layers), rel=0.15)


def test_spec_tree_matches_parameters():
    for model in models.ALL.values():
        params = specs.initialize(specs.param_specs(model), KEY, jnp.float32)
        assert sum(x.size for x in jax.tree.leaves(params)) == specs.parameter_count(model)
        shapes = specs.abstract(specs.param_specs(model), jnp.float32)
        assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda x: x.shape, shapes)


def test_slot_positions_of_a_ring():
    got = decode_common.slot_positions(jnp.array([0, 3, 4, 6]), 4)
    assert got[0].max() < 0, "an empty row has no key"
    assert got[1, :3].tolist() == [0, 1, 2]
    assert int(got[1, 3]) < 0
    assert got[2].tolist() == [0, 1, 2, 3]
    assert got[3].tolist() == [4, 5, 2, 3], "positions 4 and 5 took the places of 0 and 1"
