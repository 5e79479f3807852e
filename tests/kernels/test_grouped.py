"""Grouped matmuls compared with the plain form, for every distribution of rows over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.grouped import block_count, block_layout, block_length, grouped_matmul


def product(x, weights, row_groups):
    layout = block_layout(row_groups, weights.shape[0])
    return layout.gather(grouped_matmul(layout.scatter(x), weights, layout.group))


def plain(x, weights, row_groups):
    return jnp.einsum("rd,rdf->rf", x, weights[row_groups])


@pytest.mark.parametrize(
    ("rows", "groups", "fall"),
    [
        (1, 4, "even"),
        (2, 8, "even"),
        (64, 4, "even"),
        (64, 4, "one"),
        (67, 4, "random"),
        (200, 3, "random"),
        (200, 16, "skewed"),
        (9, 1, "one"),
    ],
)
def test_equals_the_plain_product(rows, groups, fall):
    generator = np.random.default_rng(rows)
    row_groups = {
        "even": np.arange(rows) % groups,
        "one": np.full(rows, groups - 1),
        "random": generator.integers(0, groups, rows),
        "skewed": np.minimum(generator.geometric(0.5, rows) - 1, groups - 1),
    }[fall].astype(np.int32)
    x, weights = jax.random.normal(jax.random.key(0), (rows, 6)), jax.random.normal(jax.random.key(1), (groups, 6, 5))
    np.testing.assert_allclose(product(x, weights, row_groups), plain(x, weights, row_groups), atol=1e-5)

    def loss(function):
        return lambda x, w: jnp.sin(function(x, w, row_groups)).sum()

    got, want = (jax.grad(loss(function), (0, 1))(x, weights) for function in (product, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 5, 8])
@pytest.mark.parametrize("rows", [1, 7, 8, 40, 129])
def test_blocks_hold_the_worst_distribution(rows, groups):
    """Each row has a unique index within the bounds, in a block of its own group."""
    length, count = block_length(rows, groups), block_count(rows, groups)
    # The number of blocks is largest if every group has one row more than a whole number of blocks.
    worst = [1 + length * ((rows // groups - 1) // length)] * groups if rows >= groups else [1] * rows
    worst[0] += rows - sum(worst)
    for sizes in (worst, [rows]):
        of_rows = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
        layout = block_layout(jnp.asarray(of_rows), groups)
        indices = np.asarray(layout.index)
        assert len(set(indices.tolist())) == rows
        assert indices.max() < count * length
        np.testing.assert_array_equal(np.asarray(layout.group)[indices // length], of_rows)


def test_a_token_reads_its_own_experts_only():
    """In decoding there is one block per assignment and none for other experts."""
    assert block_count(2, 8) == 2
    assert block_count(8, 128) == 8
    assert block_length(8192, 8) == 512
    assert block_count(8192, 8) * 512 < 1.5 * 8192
