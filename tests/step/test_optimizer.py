"""Learning-rate schedules, update rules, and the parameters that weight decay and Muon apply to."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from jaxllm.config import CHOICES, OptimizerConfig
from jaxllm.model import specs
from jaxllm.step.optimizers import clip_by_global_norm, make_optimizer, make_schedule, map_state

MODEL = models.EXPERTS
PARAMS = specs.initialize(specs.param_specs(MODEL), jax.random.key(0), jnp.float32)
GRADIENTS = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), PARAMS)


def rates(steps, **fields):
    schedule = make_schedule(OptimizerConfig(**fields), steps)
    return [float(schedule(jnp.asarray(i))) for i in range(steps)]


def test_linear_schedule_values():
    """The schedule gives 1e-5, 9e-6 … 1e-6 in ten updates; the sixth, the first after a resume at five, has 5e-6."""
    got = rates(10, schedule="linear", peak_lr=1e-5)
    np.testing.assert_allclose(got, [1e-6 * k for k in range(10, 0, -1)], rtol=1e-5)
    assert got[5] == pytest.approx(5e-6)


def test_warmup_reaches_the_peak_and_never_wastes_the_first_step():
    got = rates(20, schedule="constant", peak_lr=1.0, warmup_steps=4)
    np.testing.assert_allclose(got[:5], [0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_and_wsd_shapes():
    cosine = rates(100, schedule="cosine", peak_lr=1.0, warmup_steps=10, final_lr_fraction=0.1)
    assert cosine[10] == pytest.approx(1.0)
    assert cosine[55] == pytest.approx(0.55, abs=1e-3)
    assert 0.1 < cosine[99] < 0.102
    wsd = rates(100, schedule="wsd", peak_lr=1.0, warmup_steps=10, decay_steps=20)
    assert set(wsd[9:81]) == {1.0}
    assert wsd[90] == pytest.approx(0.5)
    assert wsd[99] == pytest.approx(0.05)


@pytest.mark.parametrize("name", CHOICES["optimizer.name"])
def test_decay_only_where_it_belongs(name):
    """With zero gradients, weight decay moves only parameters that multiply activations, not norms and biases."""
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=0.5), models.LEARNED)
    params = specs.initialize(specs.param_specs(models.LEARNED), jax.random.key(0), jnp.float32)
    params = jax.tree.map(jnp.ones_like, params)
    direction, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert all(bool(jnp.isfinite(d).all()) for d in jax.tree.leaves(direction))
    want = specs.map_specs(lambda s: 0.5 if s.decays and name != "adam" else 0.0, specs.param_specs(models.LEARNED))
    jax.tree.map(lambda d, w: np.testing.assert_allclose(d, np.full(d.shape, w), atol=1e-6), direction, want)


@pytest.mark.parametrize("name", CHOICES["optimizer.name"])
def test_direction_descends(name):
    optimizer = make_optimizer(OptimizerConfig(name=name), MODEL)
    direction, _ = optimizer.update(GRADIENTS, optimizer.init(PARAMS), PARAMS)
    for (path, d), g in zip(jax.tree_util.tree_leaves_with_path(direction), jax.tree.leaves(GRADIENTS), strict=True):
        assert float(jnp.vdot(d, g)) > 0, f"{jax.tree_util.keystr(path)} does not go down"


def test_adam_first_step_is_the_sign_of_the_gradient():
    optimizer = make_optimizer(OptimizerConfig(name="adam"), MODEL)
    direction, _ = optimizer.update(GRADIENTS, optimizer.init(PARAMS), PARAMS)
    jax.tree.map(lambda d, g: np.testing.assert_allclose(d, jnp.sign(g), atol=1e-3), direction, GRADIENTS)


def spread(matrix):
    """Returns largest / lower-quartile singular value (five iterations leave the smallest ones small)."""
    values = np.linalg.svd(np.asarray(matrix), compute_uv=False)
    return values[0] / values[int(0.75 * len(values))]


def test_muon_orthogonalises_each_matrix_of_layers_and_experts():
    """Singular values of each matrix's update are close to one another; embeddings use Adam."""
    optimizer = make_optimizer(OptimizerConfig(name="muon"), MODEL)
    direction, _ = optimizer.update(GRADIENTS, optimizer.init(PARAMS), PARAMS)
    layer = direction["layers"][0]
    experts = layer["mlp"]["up"]  # [L, E, D, F]
    attention = layer["attn"]["q"][0].reshape(MODEL.width, -1)
    for matrix in (experts[0, 0], experts[1, 3], attention, layer["mlp"]["router"][1]):
        assert spread(matrix) < 1.8
    assert spread(GRADIENTS["layers"][0]["mlp"]["up"][0, 0]) > 2, "the gradient itself must not pass"
    # Adam's first step (with Nesterov's look-ahead, in optax's Muon) has the same magnitude for every element.
    sizes = jnp.abs(direction["embed"]["tokens"])
    np.testing.assert_allclose(sizes / sizes.mean(), 1.0, atol=1e-3)


def test_zero_gradient_gives_zero_adam_update():
    optimizer = make_optimizer(OptimizerConfig(name="adam"), MODEL)
    state = optimizer.init(PARAMS)
    for _ in range(3):
        direction, state = optimizer.update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)
        assert all(not d.any() for d in jax.tree.leaves(direction))


def test_zero_gradient_of_float16_weights_gives_zero_adam_update():  # optax#1755
    """Adam's epsilon, 1e-8, is 0 in float16, so the update must not be computed in float16."""
    optimizer = make_optimizer(OptimizerConfig(name="adam"), MODEL)
    weights = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = optimizer.init(weights)
    for _ in range(3):
        direction, state = optimizer.update(zeros, state, weights)
        assert all(d.dtype == jnp.float32 and not d.any() for d in jax.tree.leaves(direction))
    assert np.float16(OptimizerConfig().eps) == 0, "the guard is for this"


def test_second_moment_of_bfloat16_weights_is_float32():  # optax#1552
    """Over 1000 steps with a constant gradient, a bfloat16 average of its square would stop growing."""
    config = OptimizerConfig(name="adam", b2=0.999)
    optimizer = make_optimizer(config, MODEL)
    whole = jax.tree.map(lambda p: jnp.ones((), jnp.bfloat16), PARAMS)
    gradients = jax.tree.map(lambda p: jnp.full((), 1e-3, jnp.bfloat16), whole)
    state = optimizer.init(whole)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}

    def many(state):
        return jax.lax.fori_loop(0, 1000, lambda _, s: optimizer.update(gradients, s, whole)[1], state)

    second = jax.tree.leaves(jax.jit(many)(state))[-1]
    gradient = float(jnp.asarray(1e-3, jnp.bfloat16))
    assert float(second) == pytest.approx(gradient**2 * (1 - 0.999**1000), rel=1e-4)
    # The value if the moment itself were bfloat16.
    narrow = make_optimizer(dataclasses.replace(config, moment_dtype="bfloat16"), MODEL)
    assert {x.dtype for x in jax.tree.leaves(narrow.init(whole))} == {jnp.dtype("bfloat16"), jnp.dtype("int32")}
    state = jax.jit(lambda s: jax.lax.fori_loop(0, 1000, lambda _, s: narrow.update(gradients, s, whole)[1], s))(
        narrow.init(whole)
    )
    assert float(jax.tree.leaves(state)[-1]) < 0.7 * float(second)


def test_moments_are_found_by_their_parameter():
    """Every leaf of every optimizer state except counters belongs to one parameter."""
    tree = specs.param_specs(MODEL)
    for name in CHOICES["optimizer.name"]:
        state = make_optimizer(OptimizerConfig(name=name), MODEL).init(PARAMS)
        owners = []
        map_state(lambda leaf, owner, spec, owners=owners: owners.append((leaf, owner, spec)), state, tree)
        counters = [leaf for leaf, owner, _ in owners if not owner]
        assert all(leaf.size <= 3 for leaf in counters), name
        for leaf, owner, spec in owners:
            assert not owner or name == "adafactor" or leaf.shape == spec.shape, (name, owner)


def test_clipping():
    clipped, norm = clip_by_global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, 1.0)
    assert float(norm) == pytest.approx(5.0)
    assert float(clipped["b"][0]) == pytest.approx(0.8)
    same, _ = clip_by_global_norm({"a": jnp.array([3.0])}, 0.0)
    assert float(same["a"][0]) == 3.0
    zero, _ = clip_by_global_norm({"a": jnp.zeros(2)}, 1.0)
    assert not zero["a"].any()
