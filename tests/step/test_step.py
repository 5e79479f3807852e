"""The training step: equal token weights, no effect of accumulation and device count, and a donated state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from steps import assert_close, assert_equal

from jaxllm import programs
from jaxllm.checkpoints.checkpoint import Checkpointer
from jaxllm.parallel.mesh import batch_sharding
from jaxllm.step.gradients import accumulate
from jaxllm.step.train_step import train_step


def run(**fields):
    plain = {"optimizer_name": "sgd", "optimizer_clip_norm": 0.0, "optimizer_weight_decay": 0.0}
    return steps.Run(steps.config(train_batch_size=4, **plain, **fields))


def sums(run):
    """Returns a function from parameters and a batch to (sums, gradients)."""
    return jax.jit(functools.partial(accumulate, step_spec=run.step_spec, layout=run.layout, factor=1.0))


def make_batch(trained, length=16, rows=4):
    """Returns a batch whose rows have the given numbers of trained tokens."""
    tokens = jax.random.randint(jax.random.key(5), (rows, length), 0, 64)
    weights = (jnp.arange(length)[None] < jnp.asarray(trained)[:, None]).astype(jnp.float32)
    return {
        "tokens": tokens,
        "targets": jnp.roll(tokens, -1, axis=1),
        "segment_ids": (weights > 0).astype(jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(length), tokens.shape).astype(jnp.int32),
        "weights": weights,
    }


def test_accumulation_weighs_every_token_once():  # transformers#24725, #34191
    """10 and 30 trained tokens in two micro-batches: each token has weight 1/40, as in one batch, not 1/20 and 1/60."""
    one = run()
    batch = make_batch([5, 5, 15, 15])
    want, whole = one.updated(batch)
    # Rows are assigned in turn: micro-batches (0, 2) and (1, 3); then with the roles exchanged.
    for order in ([0, 1, 2, 3], [0, 2, 1, 3]):
        dealt = {name: x[jnp.array(order)] for name, x in batch.items()}
        got, parts = one.updated(dealt, accumulate=2)
        assert_close(got, want, 1e-6)
        assert float(parts["loss"]) == pytest.approx(float(whole["loss"]), rel=1e-6)
        assert float(parts["tokens"]) == 40
    # The tolerance detects a planted mean of means.
    halves = [jax.tree.map(lambda x, r=r: x[r], batch) for r in (slice(0, 2), slice(2, 4))]
    (_, first), (_, second) = map(functools.partial(sums(one), one.state.params), halves)
    wrong = jax.tree.map(lambda a, b: (a / 10 + b / 30) / 2, first, second)
    right = jax.tree.map(lambda a, b: (a + b) / 40, first, second)
    gaps = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), wrong, right)
    assert max(jax.tree.leaves(gaps)) > 1e-4


def test_sequences_of_10_and_100_tokens():
    """Every token has weight 1/110, on one device and with each sequence on a separate device."""
    batch = make_batch([10, 100], length=128, rows=2)
    fields = {"train_batch_size": 2, "data_sequence_length": 128, "optimizer_name": "sgd"}
    fields |= {"optimizer_clip_norm": 0.0, "optimizer_weight_decay": 0.0}
    one, two = (steps.Run(steps.config(mesh_data=devices, **fields)) for devices in (1, 2))
    want, _ = one.updated(batch)
    assert_close(one.updated(batch, accumulate=2)[0], want, 1e-6)
    assert two.step(batch)["tokens"] == 110
    assert_close(two.state.params, want, 1e-6)
    _, gradients = sums(one)(one.state.params, batch)
    lr = one.step_spec.schedule(jnp.zeros((), jnp.int32))
    assert_close(want, jax.tree.map(lambda p, g: p - lr * g / 110, one.state.params, gradients), 1e-6)


def test_masked_micro_batch_contributes_nothing():
    one = run()
    alone, _ = one.updated(jax.tree.map(lambda x: x[:2], make_batch([7, 9, 0, 0])))
    padded, _ = one.updated(make_batch([7, 9, 0, 0]), accumulate=2)
    assert_close(padded, alone, 1e-6)
    nothing, metrics = one.updated(make_batch([0, 0, 0, 0]), accumulate=2)
    assert_equal(nothing, one.state.params)
    assert float(metrics["loss"]) == 0


def test_the_schedule_advances_once_an_update():  # transformers#34053, optax#415
    """The schedule gives 1e-5, 9e-6 … in ten updates, with or without accumulation; 5e-6 after a resume at five."""
    for accumulate_ in (1, 4):
        one = steps.Run(
            steps.config(
                train_steps=10, optimizer_schedule="linear", optimizer_peak_lr=1e-5, train_accumulate=accumulate_
            )
        )
        rates = [one.step(steps.batch(one.config, one.model, i))["lr"] for i in range(5)]
        resumed = steps.Run(one.config)
        resumed.state = one.state
        rates += [resumed.step(steps.batch(one.config, one.model, i))["lr"] for i in range(5, 10)]
        np.testing.assert_allclose(rates, [1e-6 * k for k in range(10, 0, -1)], rtol=1e-5)


def test_state_is_donated_whole():
    """The compiled step writes the new state into the old state's memory: aliased bytes equal the state's bytes."""
    one = steps.Run(steps.config())
    program = programs.train_step(one.config, one.step_spec, one.mesh)
    size = sum(x.nbytes for x in jax.tree.leaves(one.state))
    assert program.compile().memory_analysis().alias_size_in_bytes == size
    # Without donation there are no aliased bytes.
    plain = jax.jit(lambda s, b: train_step(s, b, one.step_spec, one.layout)).lower(*program.inputs).compile()
    assert plain.memory_analysis().alias_size_in_bytes == 0


def test_an_unused_donation_is_an_error_in_tests():
    with pytest.raises(UserWarning, match="donated buffers"):
        jax.jit(lambda x: x.sum(), donate_argnums=0)(jnp.ones((8, 8)))


def test_a_buffer_given_twice_is_refused():  # jax#12627
    one = steps.Run(steps.config())
    batch = steps.batch(one.config, one.model, 0)
    one.step(batch)
    moments = one.state.opt_state
    one.state = one.state.replace(params=jax.tree.leaves(moments, is_leaf=lambda x: hasattr(x, "mu"))[0].mu)
    with pytest.raises(Exception, match="donate"):
        one.step(batch)


def test_five_steps_with_a_resume_and_a_short_batch_compile_once(tmp_path):  # maxtext#4174
    """Initialized, stepped and restored states, with full and short batches, all use one executable."""
    one = steps.Run(steps.config(mesh_data=2, mesh_tensor=2, mesh_zero=3, train_batch_size=4))
    program = programs.train_step(one.config, one.step_spec, one.mesh)
    placed = batch_sharding(one.mesh)
    state = one.state
    for i in range(5):
        if i == 3:
            with Checkpointer(tmp_path, one.config, print) as store:
                store.save(i, state, {"0": {}})
            with Checkpointer(tmp_path, one.config, print) as store:
                state = store.restore(programs.abstract_state(one.config, one.step_spec, one.mesh)).state
        batch = steps.batch(one.config, one.model, i)
        if i == 4:  # the last batch of an epoch, padded with rows of zero weight
            batch = {name: np.where(np.arange(4)[:, None] < 3, x, 0).astype(x.dtype) for name, x in batch.items()}
        state, _ = program.jitted(state, jax.device_put(batch, placed))
    assert program.jitted._cache_size() == 1
    # A batch with another sharding compiles again, which is detected.
    program.jitted(state, batch)
    assert program.jitted._cache_size() == 2
