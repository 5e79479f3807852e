"""Low-rank adapters in the training step: initial values, gradients, meshes and precision policies."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import steps

from jaxllm.model import adapter_specs, adapters, specs
from jaxllm.parallel.mesh import path_name
from jaxllm.step import gradients

EVERY = ("q", "k", "v", "out", "gate", "up", "down")


def config(targets=EVERY, **fields):
    return steps.config(lora_rank=4, lora_alpha=8.0, lora_targets=targets, **fields)


@pytest.fixture(scope="module")
def one():
    """Returns (losses of five steps, the run after them, its state before) on one device."""
    run = steps.Run(config())
    before = steps.copy(run.state)
    return run.losses(5), run, before


def test_the_first_step_is_the_models_own(one):
    """B is zero, so the first loss equals that of the base weights to the bit; a nonzero B changes it."""
    losses, run, before = one
    plain = steps.Run(steps.config())
    steps.assert_equal(before.frozen, plain.state.params)
    assert plain.losses(1)[0] == losses[0]
    shifted = jax.tree.map(lambda x: x + 0.1, before.params)
    _, metrics = jax.jit(lambda s, b: train(run, s, b))(
        dataclasses.replace(before, params=shifted), steps.batch(run.config, run.model, 0)
    )
    assert float(metrics["loss"]) != losses[0]


def train(run, state, batch):
    return steps.train_step(state, batch, run.step_spec, run.layout)


def test_adapters_alone_are_trained(one):
    _, run, before = one
    steps.assert_equal(run.state.frozen, before.frozen)
    for path, x in jax.tree_util.tree_leaves_with_path(run.state.params):
        start = before.params
        for key in path:
            start = start[getattr(key, "key", getattr(key, "idx", None))]
        assert np.abs(np.asarray(x) - np.asarray(start)).max() > 0, path_name(path)
    trained = sum(x.size for x in jax.tree.leaves(run.state.params))
    moments = sum(x.size for x in jax.tree.leaves(run.state.opt_state) if x.ndim)
    assert moments == 2 * trained


def test_the_gradient_is_that_of_the_merged_weights():
    """dA and dB equal the chain rule applied to the gradient of W + scale · A·B, for every target and model kind."""
    model, run = models.SLIDING, steps.Run(config(), models.SLIDING)
    noise, batch = _noise(run), steps.batch(run.config, model, 0)

    def through_merged(pairs, scale):
        merged = adapters.merged(model, run.state.frozen, pairs, scale, jnp.float32)
        return gradients.loss_sums(merged, batch, run.step_spec, gradients.make_collectives(run.layout))[0]

    def through_adapters(pairs):
        return gradients.accumulate(pairs, batch, run.step_spec, run.layout, 1.0, run.state.frozen)[1]

    merged_gradient = jax.jit(jax.grad(through_merged))
    got = jax.jit(through_adapters)(noise)
    assert _distance(merged_gradient(noise, adapters.scale_of(run.config.lora)), got) < 1e-4
    assert _distance(merged_gradient(noise, 1.0), got) > 1e-2


def _noise(run):
    return jax.tree.map(lambda x: 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), run.state.params)


def _distance(want, got):
    """Returns the largest error of an array relative to its largest value."""
    errors = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max() / jnp.abs(x).max()), want, got)
    return max(jax.tree.leaves(errors))


SLOW_MESHES = [
    {"mesh_data": 2, "mesh_zero": 0},
    {"mesh_data": 2, "mesh_zero": 1},
    {"mesh_data": 2, "mesh_zero": 2, "mesh_tensor": 2, "mesh_replica": 2},
    {"mesh_tensor": 2, "train_accumulate": 2},
]
MESHES = [
    {"mesh_data": 2, "mesh_zero": 3, "mesh_tensor": 2},
    *(pytest.param(fields, marks=pytest.mark.slow) for fields in SLOW_MESHES),
]


@pytest.mark.parametrize("fields", MESHES, ids=str)
def test_meshes_agree_with_one_device(one, fields):
    run = steps.Run(config(**fields))
    np.testing.assert_allclose(run.losses(5), one[0], atol=1e-5)
    axes = run.mesh.shape
    if fields.get("mesh_zero") == 3:  # frozen weights are sharded too
        for x in jax.tree.leaves(run.state.frozen["layers"][0]["mlp"]):
            assert x.addressable_shards[0].data.size * axes["data"] * axes["tensor"] == x.size
    else:
        x = run.state.frozen["layers"][0]["mlp"]["up"]
        assert x.addressable_shards[0].data.size * axes["tensor"] == x.size


def test_a_mesh_that_forgets_a_sum_is_caught(one, monkeypatch):
    """Planted fault: gradients of adapters that are replicated along `tensor` are not summed over it."""
    real = gradients._reduce_gradients
    monkeypatch.setattr(
        gradients, "_reduce_gradients", lambda g, layout: g if layout.sizes["tensor"] > 1 else real(g, layout)
    )
    run = steps.Run(config(mesh_tensor=2))
    assert np.abs(np.array(run.losses(5)) - one[0]).max() > 1e-4


@pytest.mark.parametrize(
    "policy", [*(pytest.param(policy, marks=pytest.mark.slow) for policy in ("bf16", "fp16")), "bf16_pure"]
)
def test_policies(one, policy):
    """Frozen weights are stored in the compute dtype, and only adapters have master weights."""
    run = steps.Run(config(precision_policy=policy, optimizer_name="lion" if policy == "bf16_pure" else "adamw"))
    frozen, stored = jnp.dtype(run.step_spec.policy.compute_dtype), jnp.dtype(run.step_spec.policy.param_dtype)
    assert {x.dtype for x in jax.tree.leaves(run.state.frozen)} == {frozen}
    assert {x.dtype for x in jax.tree.leaves(run.state.params)} == {stored}
    before = steps.copy(run.state)
    loss = run.losses(1)[0]
    assert abs(loss - one[0][0]) < 0.05
    steps.assert_equal(before.frozen, run.state.frozen)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "adafactor")), "muon"]
)
def test_optimizers_lower_the_loss(name):
    """Adafactor's step is relative to an array's size, and B starts at zero (optax's minimum is 1e-3)."""
    lr = {"sgd": 1.0, "adafactor": 0.5}.get(name, 0.02)
    run = steps.Run(config(optimizer_name=name, optimizer_peak_lr=lr, remat_policy="names:lora"))
    batch = steps.batch(run.config, run.model, 0)
    losses = [run.step(batch)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.02, losses


@pytest.mark.slow
def test_experts_with_adapters_of_attention():
    """Frozen experts have no gradient, and gradients that flow through them are correct."""
    run = steps.Run(config(("q", "v", "out")), models.EXPERTS)
    batch = steps.batch(run.config, run.model, 0)
    noise = _noise(run)
    collectives = gradients.make_collectives(run.layout)

    def loss(pairs, frozen):
        variables = adapters.joined(frozen, adapters.scaled(pairs, run.step_spec.adapter_scale))
        return gradients.loss_sums(variables, batch, run.step_spec, collectives)[0]

    want = jax.jit(jax.grad(loss, argnums=(0, 1)))(noise, run.state.frozen)[0]
    got = jax.jit(jax.grad(loss))(noise, run.state.frozen)
    steps.assert_close(want, got, 2e-4)


def test_specs_stand_beside_their_weights():
    model = models.SLIDING
    lora = config().lora
    made = adapter_specs.adapter_specs(model, lora)
    q = made["layers"][1]["attn"]["q"]
    assert (q["a"].shape, q["a"].axes) == ((2, 32, 4), ("layers", "embed", "rank"))
    assert (q["b"].shape, q["b"].axes) == ((2, 4, 4, 8), ("layers", "rank", "heads", "head_dim"))
    out = made["tail"][0]["attn"]["out"]
    assert (out["a"].shape, out["a"].fan_in) == ((4, 8, 4), (0, 1))
    assert (out["b"].shape, out["b"].axes, out["b"].fan_in) == ((4, 32), ("rank", "embed"), (0,))
    assert out["a"].scale == pytest.approx((3 * 32) ** -0.5)
    assert adapter_specs.adapter_specs(model, dataclasses.replace(lora, rank=0)) is None
    assert adapter_specs.trained_specs(model, dataclasses.replace(lora, rank=0)) == specs.param_specs(model)
