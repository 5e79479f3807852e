"""Precision policies, and loss scaling for fp16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from steps import assert_equal, copy

from jaxllm.step.precision import adjust, policy_for
from jaxllm.step.state import LossScale


@pytest.mark.parametrize(
    ("name", "compute", "store"),
    [
        ("fp32", "float32", "float32"),
        ("bf16", "bfloat16", "float32"),
        ("fp16", "float16", "float32"),
        ("bf16_pure", "bfloat16", "bfloat16"),
    ],
)
def test_dtypes_of_a_policy(name, compute, store):
    run = steps.Run(steps.config(precision_policy=name))
    assert {x.dtype for x in jax.tree.leaves(run.state.params)} == {jnp.dtype(store)}
    text = str(jax.make_jaxpr(lambda s, b: run.updated(b)[0])(run.state, steps.batch(run.config, run.model, 0)))
    products = [line for line in text.splitlines() if "dot_general" in line and "bkq" not in line]
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[compute]
    assert products
    run.step(steps.batch(run.config, run.model, 0))
    moments = [x.dtype for x in jax.tree.leaves(run.state.opt_state) if x.ndim]
    assert set(moments) == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(run.state.params)} == {jnp.dtype(store)}
    assert f":{short}[" in text


def test_policies_train_alike():
    want = steps.Run(steps.config()).losses(4)
    for name in ("bf16", "fp16", "bf16_pure"):
        got = steps.Run(steps.config(precision_policy=name)).losses(4)
        np.testing.assert_allclose(got, want, rtol=1e-2)
        assert got != want, name


def test_auto_is_float32_on_a_cpu_only():
    assert policy_for("auto", "cpu").name == "fp32"
    assert policy_for("auto", "gpu").name == policy_for("auto", "tpu").name == "bf16"


def overflowing(run: steps.Run) -> None:
    """Makes the next gradients overflow in float16."""
    run.state = run.state.replace(loss_scale=LossScale(jnp.asarray(2.0**40), run.state.loss_scale.good_steps))


def test_an_overflow_changes_nothing_but_the_scale():  # accelerate#4289, DeepSpeed#931
    run = steps.Run(steps.config(precision_policy="fp16", precision_loss_scale=1024.0))
    for i in range(3):
        assert run.step(steps.batch(run.config, run.model, i))["skipped"] == 0
    overflowing(run)
    before = copy(run.state)
    metrics = run.step(steps.batch(run.config, run.model, 3))
    assert metrics["skipped"] == 1
    assert not np.isfinite(metrics["grad_norm"])
    assert np.isfinite(metrics["loss"])
    for part in ("params", "opt_state", "step", "key"):
        assert_equal(getattr(run.state, part), getattr(before, part))
    # The scale recovers: halved until gradients fit, from the cap downwards.
    skipped = 1
    while metrics["skipped"]:
        metrics = run.step(steps.batch(run.config, run.model, 4))
        skipped += int(metrics["skipped"])
    assert 1 <= skipped < 30
    assert int(run.state.step) == int(before.step) + 1
    assert run.state.loss_scale.scale.dtype == jnp.float32


def test_the_scale_grows_halves_and_stays_in_bounds():
    scale = LossScale(jnp.asarray(4.0), jnp.zeros((), jnp.int32))
    seen = []
    for finite in (True, True, False, True, True, True):
        scale = adjust(scale, jnp.asarray(finite), 2)
        seen.append((float(scale.scale), int(scale.good_steps)))
    assert seen == [(4, 1), (8, 0), (4, 0), (4, 1), (8, 0), (8, 1)]
    highest = LossScale(jnp.asarray(2.0**24), jnp.asarray(1, jnp.int32))
    assert float(adjust(highest, jnp.asarray(True), 2).scale) == 2.0**24
    lowest = LossScale(jnp.asarray(1.0), jnp.asarray(1, jnp.int32))
    assert float(adjust(lowest, jnp.asarray(False), 2).scale) == 1.0


@pytest.mark.slow
def test_the_scale_does_not_change_the_update():
    """Gradients equal those of the unscaled loss; with a scale of 1, float16 flushes the small ones to zero."""
    batches = [steps.batch(steps.config(), steps.models.ROTARY, i) for i in range(2)]
    norms = {}
    for scale in (1.0, 2.0**8, 2.0**14):
        run = steps.Run(steps.config(precision_policy="fp16", precision_loss_scale=scale, train_accumulate=2))
        norms[scale] = [run.step(batch)["grad_norm"] for batch in batches]
    want = [steps.Run(steps.config()).step(batches[0])["grad_norm"]]
    assert norms[2.0**14][0] == pytest.approx(want[0], rel=5e-3)
    assert norms[2.0**8][0] == pytest.approx(want[0], rel=5e-3)
