"""Token sampling: tokens kept by each filter, penalties computed by hand, and noise that depends only on the row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.decode import sampling
from jaxllm.decode.sampling import SamplingOptions, check, make_params, next_tokens, num_kept, penalize
from jaxllm.errors import UserError

LOGITS = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
PROMPT = np.array([1, 2, 3], np.int32)

# Compiled with fewer optimizations than in production, since compilation dominates the time of these tests.
choose = jax.jit(next_tokens, compiler_options={"xla_backend_optimization_level": 0})


def params_of(*options, vocab_size=4, prompts=None):
    return make_params(options, prompts or [PROMPT] * len(options), vocab_size)


def draws(options, count=400, logits=LOGITS, seen=None):
    """Samples tokens of one row at `count` positions."""
    rows = jnp.tile(logits, (count, 1))
    params = params_of(*[options] * count, vocab_size=logits.shape[1])
    seen = jnp.zeros(rows.shape, bool) if seen is None else jnp.tile(seen, (count, 1))
    return np.asarray(choose(rows, seen, params, jnp.arange(count)))


@pytest.mark.parametrize(("top_p", "count"), [(0.0, 1), (0.79, 2), (0.81, 3), (1.0, 4)])
def test_survivors_of_top_p(top_p, count):
    assert num_kept(LOGITS, params_of(SamplingOptions(top_p=top_p))).tolist() == [count]
    assert set(draws(SamplingOptions(top_p=top_p))) == set(range(count))


@pytest.mark.parametrize(("top_k", "count"), [(0, 4), (1, 1), (2, 2), (4, 4), (10, 4), (2**40, 4)])
def test_survivors_of_top_k(top_k, count):
    assert num_kept(LOGITS, params_of(SamplingOptions(top_k=top_k))).tolist() == [count]


@pytest.mark.parametrize(("min_p", "count"), [(0.0, 4), (0.09, 4), (0.11, 3), (0.31, 2), (0.61, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_likeliest(min_p, count):
    assert num_kept(LOGITS, params_of(SamplingOptions(min_p=min_p))).tolist() == [count]


def test_top_p_sees_what_top_k_left():
    # With three tokens the probabilities are .526, .316, .158; two exceed .81. With all four, three tokens are needed.
    assert num_kept(LOGITS, params_of(SamplingOptions(top_k=3, top_p=0.81))).tolist() == [2]


def test_a_tie_at_the_border_keeps_exactly_k():
    tied = jnp.zeros((1, 6))
    assert set(draws(SamplingOptions(top_k=2), logits=tied)) == {0, 1}
    assert set(draws(SamplingOptions(top_k=1), logits=tied)) == {0}


def test_greedy_is_argmax_is_top_k_1_is_top_p_0():
    logits = jax.random.normal(jax.random.key(3), (32, 50))
    best = np.asarray(logits.argmax(1))
    seen, positions = jnp.zeros(logits.shape, bool), jnp.arange(32)
    assert len(set(best.tolist())) > 5  # rows do not all choose one token
    for options in (SamplingOptions(temperature=0.0), SamplingOptions(top_k=1), SamplingOptions(top_p=0.0)):
        np.testing.assert_array_equal(
            choose(logits, seen, params_of(*[options] * 32, vocab_size=50), positions), best, err_msg=str(options)
        )


def test_rows_of_one_batch_have_their_own_settings():
    options = [
        SamplingOptions(temperature=0.0),
        SamplingOptions(temperature=1.5, seed=7),
        SamplingOptions(top_k=3, top_p=0.9, seed=8),
        SamplingOptions(min_p=0.2, repetition_penalty=1.3, seed=9),
    ]
    logits = jax.random.normal(jax.random.key(4), (4, 50))
    seen = jax.random.bernoulli(jax.random.key(5), 0.3, (4, 50))
    positions = jnp.array([3, 1, 4, 1])
    together = np.asarray(choose(logits, seen, params_of(*options, vocab_size=50), positions))
    alone = [
        choose(logits[i : i + 1], seen[i : i + 1], params_of(options[i], vocab_size=50), positions[i : i + 1])[0]
        for i in range(4)
    ]
    np.testing.assert_array_equal(together, alone)


def test_frequencies_are_the_softmax():
    counts = np.bincount(draws(SamplingOptions(), count=8000), minlength=4) / 8000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.02)
    counts = np.bincount(draws(SamplingOptions(temperature=0.5), count=8000), minlength=4) / 8000
    squared = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(counts, squared / squared.sum(), atol=0.02)


def test_penalty_by_hand():
    seen = jnp.array([[True, True, False]])  # history 0, 1, 1: the second 1 has no further effect
    got = penalize(jnp.array([[2.0, -2.0, 1.0]]), seen, jnp.array([2.0]))
    np.testing.assert_array_equal(got, [[1.0, -4.0, 1.0]])


def test_penalty_1_changes_no_bit():
    logits = jax.random.normal(jax.random.key(6), (2, 50))
    np.testing.assert_array_equal(penalize(logits, jnp.ones(logits.shape, bool), jnp.ones(2)), logits)


def test_padding_of_the_vocabulary_is_never_chosen():
    logits = jnp.array([[0.0, 1.0, 0.0, 9.0]])
    params = params_of(*[SamplingOptions(), SamplingOptions(temperature=0.0)] * 50, vocab_size=3)
    got = choose(jnp.tile(logits, (100, 1)), jnp.zeros((100, 4), bool), params, jnp.arange(100))
    assert got.max() == 2
    assert set(np.asarray(got)[1::2]) == {1}


def test_noise_depends_on_seed_prompt_and_position_only():
    flat = jnp.zeros((1, 1000))
    seen = jnp.zeros(flat.shape, bool)

    def draw(seed=0, prompt=PROMPT, position=5):
        params = params_of(SamplingOptions(seed=seed), vocab_size=1000, prompts=[prompt])
        return int(choose(flat, seen, params, jnp.array([position]))[0])

    assert draw() == draw()
    others = [draw(seed=1), draw(seed=2**32 - 1), draw(prompt=PROMPT[:2]), draw(prompt=PROMPT[::-1]), draw(position=6)]
    assert len({draw(), *others}) == 6


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"top_k": -1}, "--top_k"),
        ({"top_p": 1.1}, "--top_p"),
        ({"top_p": -0.1}, "--top_p"),
        ({"min_p": 2.0}, "--min_p"),
        ({"repetition_penalty": 0.0}, "--repetition_penalty"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**32}, "--seed"),
    ],
)
def test_bad_values_name_their_flag(change, flag):
    check(SamplingOptions())
    with pytest.raises(UserError, match=flag):
        check(dataclasses.replace(SamplingOptions(), **change))


def test_a_key_without_the_prompt_would_be_caught(monkeypatch):
    monkeypatch.setattr(sampling, "row_keys", lambda seeds, _prompts: jax.vmap(jax.random.key)(np.array(seeds)))
    with pytest.raises(AssertionError):
        test_noise_depends_on_seed_prompt_and_position_only()
