"""Chunked cross entropy compared with the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.model.loss import Head, cross_entropy
from jaxllm.model.transformer import softcap as cap_of


def plain(hidden, table, targets, weights, softcap):
    logits = cap_of(hidden @ table.T, softcap)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return -(weights * chosen).sum()


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 1000])
def test_equals_plain_form(softcap, chunk):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, table = jax.random.normal(keys[0], (50, 12)), jax.random.normal(keys[1], (33, 12))
    targets = jax.random.randint(keys[2], (50,), 0, 33)
    weights = (jax.random.uniform(keys[3], (50,)) > 0.3) / 50.0
    got, got_grads = jax.value_and_grad(cross_entropy, (0, 1))(
        hidden, table, targets, weights, Head(33, softcap, chunk)
    )
    want, want_grads = jax.value_and_grad(plain, (0, 1))(hidden, table, targets, weights, softcap)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # The value alone takes a different code path from the value with its gradient.
    np.testing.assert_allclose(
        cross_entropy(hidden, table, targets, weights, Head(33, softcap, chunk)), want, rtol=1e-6
    )


def test_known_value():
    """The loss is -ln 0.72 for probabilities [0.05, 0.72, 0.08, 0.15] and target 1."""
    logits = jnp.log(jnp.array([[0.05, 0.72, 0.08, 0.15]]))
    loss = cross_entropy(logits, jnp.eye(4), jnp.array([1]), jnp.ones(1), Head(4, 0.0, 8))
    assert float(loss) == pytest.approx(0.3285, abs=1e-4)


def test_cotangent_scales_gradients():
    hidden, table = jax.random.normal(jax.random.key(0), (4, 3)), jax.random.normal(jax.random.key(1), (5, 3))
    targets, weights = jnp.arange(4), jnp.ones(4)
    one = jax.grad(lambda h: cross_entropy(h, table, targets, weights, Head(5, 0.0, 2)))(hidden)
    three = jax.grad(lambda h: 3 * cross_entropy(h, table, targets, weights, Head(5, 0.0, 2)))(hidden)
    np.testing.assert_allclose(three, 3 * one, rtol=1e-6)


def test_no_array_of_all_logits():
    """Temporaries of the compiled gradient are much smaller than the logits of the whole batch."""
    M, D, V = 4096, 16, 1024
    args = (jnp.ones((M, D)), jnp.ones((V, D)), jnp.zeros(M, jnp.int32), jnp.ones(M))

    def temporaries(chunk):
        grad = jax.jit(jax.grad(lambda h, t, y, w: cross_entropy(h, t, y, w, Head(V, 0.0, chunk)), (0, 1)))
        return grad.lower(*args).compile().memory_analysis().temp_size_in_bytes

    whole = M * V * 4
    assert temporaries(128) < whole / 4
    assert temporaries(M) >= whole, "the measure must be able to see the whole logits"


def test_bfloat16_hidden_float32_loss():
    hidden = jax.random.normal(jax.random.key(0), (8, 4), jnp.bfloat16)
    table = jax.random.normal(jax.random.key(1), (6, 4), jnp.bfloat16)
    loss, grads = jax.value_and_grad(
        lambda h, t: cross_entropy(h, t, jnp.arange(8) % 6, jnp.ones(8), Head(6, 0.0, 4)), (0, 1)
    )(hidden, table)
    assert loss.dtype == jnp.float32
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]


def test_padding_of_the_vocabulary_is_no_word():
    """Vocabulary rows added as padding for a mesh change neither the loss nor any gradient, and get zero gradient."""
    hidden, table = jax.random.normal(jax.random.key(0), (8, 4)), jax.random.normal(jax.random.key(1), (6, 4))
    padded = jnp.concatenate([table, jnp.full((2, 4), 3.0)])
    targets, weights = jnp.arange(8) % 6, jnp.ones(8)
    for softcap in (0.0, 5.0):
        head = Head(6, softcap, 4)
        want, (h, t) = jax.value_and_grad(cross_entropy, (0, 1))(hidden, table, targets, weights, head)
        got, (padded_h, padded_t) = jax.value_and_grad(cross_entropy, (0, 1))(hidden, padded, targets, weights, head)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        np.testing.assert_allclose(padded_h, h, atol=1e-6)
        np.testing.assert_allclose(padded_t[:6], t, atol=1e-6)
        assert not padded_t[6:].any()
        words = Head(8, softcap, 4)  # counted as vocabulary, the padding would change the loss
        assert abs(float(cross_entropy(hidden, padded, targets, weights, words)) - float(want)) > 0.1
