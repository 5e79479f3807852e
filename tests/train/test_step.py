"""The step: every token weighs the same, accumulation and devices change nothing, the state is donated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from jaxllm import architectures, mesh, programs
from jaxllm.train import step as step_lib


def build(**fields):
    config = runs.tiny_config("unused", **fields)
    config.optimizer.name, config.optimizer.clip_norm = fields.get("optimizer_name", "sgd"), 0.0
    model = architectures.resolve(config.model)
    devices = mesh.make_mesh(config.mesh)
    recipe = programs.make_recipe(config, model, "cpu")
    return config, recipe, devices, programs.init_state(config, recipe, devices).jitted()


def make_batch(trained, length=32, rows=4):
    """Rows with so many trained tokens each."""
    tokens = jax.random.randint(jax.random.key(5), (rows, length), 0, 257)
    weights = (jnp.arange(length)[None] < jnp.asarray(trained)[:, None]).astype(jnp.float32)
    return {
        "tokens": tokens,
        "targets": jnp.roll(tokens, -1, axis=1),
        "segment_ids": (weights > 0).astype(jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(length), tokens.shape).astype(jnp.int32),
        "weights": weights,
    }


def updated(recipe, state, batch):
    new, metrics = jax.jit(lambda s, b: step_lib.train_step(s, b, recipe))(state, batch)
    return new.params, metrics


def assert_close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def test_accumulation_weighs_every_token_once():
    """10 and 30 trained tokens in two micro-batches: each token 1/40, as in one batch, not 1/20 and 1/60."""
    _, recipe, _, state = build()
    batch = make_batch([5, 5, 15, 15])
    want, whole = updated(recipe, state, batch)
    # Rows are dealt out in turn: micro-batches (0, 2) and (1, 3); and the other way round.
    for order in ([0, 1, 2, 3], [0, 2, 1, 3]):
        dealt = {name: x[jnp.array(order)] for name, x in batch.items()}
        got, parts = updated(dataclasses.replace(recipe, accumulate=2), state, dealt)
        assert_close(got, want, 1e-6)
        assert float(parts["loss"]) == pytest.approx(float(whole["loss"]), rel=1e-6)
        assert float(parts["tokens"]) == 40
    # A planted mean of means is seen by that tolerance.
    halves = [jax.tree.map(lambda x, r=r: x[r], batch) for r in (slice(0, 2), slice(2, 4))]
    (_, first), (_, second) = (step_lib.accumulate_gradients(state.params, half, recipe) for half in halves)
    wrong = jax.tree.map(lambda a, b: (a / 10 + b / 30) / 2, first, second)
    right = jax.tree.map(lambda a, b: (a + b) / 40, first, second)
    gaps = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), wrong, right)
    assert max(jax.tree.leaves(gaps)) > 1e-4


def test_masked_micro_batch_contributes_nothing():
    _, recipe, _, state = build()
    alone, _ = updated(recipe, state, jax.tree.map(lambda x: x[:2], make_batch([7, 9, 0, 0])))
    padded, metrics = updated(dataclasses.replace(recipe, accumulate=2), state, make_batch([7, 9, 0, 0]))
    assert_close(padded, alone, 1e-6)
    nothing, metrics = updated(dataclasses.replace(recipe, accumulate=2), state, make_batch([0, 0, 0, 0]))
    assert_close(nothing, state.params, 0)
    assert float(metrics["loss"]) == 0


def test_two_devices_train_like_one():
    results = []
    for count in (1, 2):
        config, recipe, devices, state = build(mesh_data=count)
        program = programs.train_step(config, recipe, devices).compile()
        batch = jax.device_put(make_batch([32, 20, 9, 31]), mesh.sharding(devices, ("batch", "sequence")))
        for _ in range(3):
            state, metrics = program(state, batch)
        results.append((state.params, float(metrics["loss"])))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
    assert_close(jax.device_get(results[0][0]), jax.device_get(results[1][0]), 1e-5)


def test_state_is_donated_whole():
    """The compiled step writes the new state into the old one's memory: aliased bytes are the state's."""
    config, recipe, devices, state = build(optimizer_name="adamw")
    program = programs.train_step(config, recipe, devices)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    assert program.compile().memory_analysis().alias_size_in_bytes == size
    # Without donation the same measure finds nothing.
    plain = jax.jit(lambda s, b: step_lib.train_step(s, b, recipe)).lower(*program.inputs).compile()
    assert plain.memory_analysis().alias_size_in_bytes == 0


def test_bf16_policy_keeps_float32_state():
    _, recipe, _, state = build(precision_policy="bf16")
    assert recipe.policy.compute == jnp.bfloat16
    params, metrics = updated(recipe, state, make_batch([32, 32, 32, 32]))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    _, fp32, _, _ = build(precision_policy="fp32")
    _, want = updated(fp32, state, make_batch([32, 32, 32, 32]))
    assert metrics["loss"] == pytest.approx(float(want["loss"]), rel=1e-2)
    assert float(metrics["loss"]) != float(want["loss"])
