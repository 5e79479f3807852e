"""Reference attention, which the kernels are checked against, compared with float64."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kernels import reference


def case(B=2, T=5, S=7, N=4, K=2, H=8):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (B, T, N, H))
    k, v = (jax.random.normal(key, (B, K, S, H)) for key in keys[1:])
    return q, k, v


def float64_attention(q, k, v, mask, scale):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        if len(seen):
            head = n // (q.shape[2] // k.shape[1])
            s = k[b, head, seen] @ q[b, t, n] * scale
            w = np.exp(s - s.max())
            out[b, t, n] = (w / w.sum()) @ v[b, head, seen]
    return out


def test_against_float64_with_random_masks():
    q, k, v = case()
    mask = np.array(jax.random.uniform(jax.random.key(3), (2, 5, 7)) > 0.5)
    mask[0, 2] = False
    got = np.asarray(reference.attention(q, k, v, jnp.asarray(mask), scale=0.3, softcap=0.0))
    np.testing.assert_allclose(got, float64_attention(q, k, v, mask, 0.3), atol=1e-6)
    assert np.all(got[0, 2] == 0), "a query that sees nothing gets zeros"


def test_fully_masked_rows_have_finite_gradients():
    q, k, v = case()
    mask = jnp.zeros((2, 5, 7), bool)
    grads = jax.grad(lambda *a: reference.attention(*a, mask, scale=0.3, softcap=30.0).sum(), (0, 1, 2))(q, k, v)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)


def test_mask():
    positions = jnp.arange(4)[None]
    causal = reference.attention_mask(positions, positions, None, None, 0)[0]
    np.testing.assert_array_equal(causal, np.tril(np.ones((4, 4), bool)))
    window = reference.attention_mask(positions, positions, None, None, 2)[0]
    np.testing.assert_array_equal(window, np.tril(np.ones((4, 4), bool)) & ~np.tril(np.ones((4, 4), bool), -2))
    segments = jnp.array([[1, 1, 2, 0]])
    packed = reference.attention_mask(positions, positions, segments, segments, 0)[0]
    np.testing.assert_array_equal(packed, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    empty = reference.attention_mask(positions, jnp.array([[0, -1, 2, -5]]), None, None, 0)[0]
    np.testing.assert_array_equal(empty[3], [1, 0, 1, 0])
