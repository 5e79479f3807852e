"""Training gives equal loss and gradients with every attention implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import steps

from jaxllm.config.attention import PLAIN, Attention
from jaxllm.kernels import cudnn
from jaxllm.kernels.flash import api as flash_attention
from jaxllm.model import attention as attention_lib
from jaxllm.step import gradients

LENGTH = 40
# Grouped heads; as many key heads as query heads with learned positions; windows and soft caps. Kernels support each.
MODELS = {
    name: dataclasses.replace(models.ALL[name], layers=2, head_dim=16, init_std=0.1)
    for name in ("rotary", "learned", "sliding")
}


def interpreted(platform):
    return Attention("pallas", platform, interpret=True)


@functools.cache
def of_run(name, attention, remat="none"):
    """Returns (sums, gradients) of a packed batch with two documents per row followed by padding."""
    model = MODELS[name]
    config = steps.config(data_sequence_length=LENGTH, train_batch_size=2, remat_policy=remat)
    run = steps.Run(config, model)
    step_spec = dataclasses.replace(run.step_spec, attention=attention)
    batch = steps.batch(config, model, 0)
    params = run.state.params
    return jax.jit(lambda p, b: gradients.accumulate(p, b, step_spec, run.layout, 1.0))(params, batch)


def furthest(got, want):
    """Returns the largest difference of gradients relative to the largest gradient."""
    scale = max(float(jnp.abs(b).max()) for b in jax.tree.leaves(want))
    return max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)) / scale


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("rotary", "gpu"),
        pytest.param("sliding", "gpu", marks=pytest.mark.slow),
        pytest.param("learned", "tpu", marks=pytest.mark.slow),
        pytest.param("sliding", "tpu", marks=pytest.mark.slow),
    ],
)
def test_kernels_train_as_plain_attention_does(name, platform):
    (sums, got), (plain, want) = of_run(name, interpreted(platform)), of_run(name, PLAIN)
    np.testing.assert_allclose(sums["nll"], plain["nll"], rtol=1e-6)
    assert furthest(got, want) < 1e-5


def test_cudnn_is_asked_for_the_same(monkeypatch):
    """Checks cuDNN's mask, window, scale and head order with JAX's XLA form of the same call, so no GPU is needed."""
    monkeypatch.setattr(cudnn, "IMPLEMENTATION", "xla")
    rotary = dataclasses.replace(MODELS["sliding"], attention_softcap=0.0)
    monkeypatch.setitem(MODELS, "without a cap", rotary)
    (sums, got), (plain, want) = (of_run("without a cap", how) for how in (Attention("cudnn", "gpu"), PLAIN))
    np.testing.assert_allclose(sums["nll"], plain["nll"], rtol=1e-6)
    assert furthest(got, want) < 1e-5


@pytest.mark.parametrize(
    "fault", ["window", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("segments", "softcap"))]
)
def test_a_fault_is_caught(fault, monkeypatch):
    """Planted faults are detected: a window one too wide, attention across documents, a missing soft cap."""

    def broken(q, k, v, a, b, **rules):
        if fault == "window":
            rules["window"] += rules["window"] > 0
        if fault == "softcap":
            rules["softcap"] = 0.0
        segments = (None, None) if fault == "segments" else (a, b)
        return flash_attention.flash_attention(q, k, v, *segments, **rules)

    monkeypatch.setattr(attention_lib, "flash_attention", broken)
    _, got = of_run.__wrapped__("sliding", interpreted("gpu"))
    assert furthest(got, of_run("sliding", PLAIN)[1]) > 1e-3


@pytest.mark.slow
def test_a_step_over_several_devices_is_the_same():
    """Kernels run on each device's own heads and rows."""
    mesh = {"mesh_data": 2, "mesh_tensor": 2, "mesh_zero": 3}
    config = steps.config(train_batch_size=4, optimizer_name="sgd", remat_policy="names:attn_context,attn_lse", **mesh)
    run = steps.Run(config, MODELS["sliding"])
    batch = steps.batch(config, run.model, 1)
    want, expected_metrics = run.updated(batch)
    got, by_kernels = run.updated(batch, attention=interpreted("gpu"))
    np.testing.assert_allclose(by_kernels["loss"], expected_metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(by_kernels["grad_norm"], expected_metrics["grad_norm"], rtol=1e-5)
    steps.assert_close(got, want, atol=1e-7)


def test_evaluation_runs_by_the_recipe_s():
    config = steps.config(data_sequence_length=LENGTH, train_batch_size=2)
    run = steps.Run(config, MODELS["sliding"])
    step_spec = dataclasses.replace(run.step_spec, attention=interpreted("gpu"))
    evaluated = functools.partial(gradients.evaluate, run.state.params, None, steps.batch(config, run.model, 0))
    assert "flash_attention" in str(jax.make_jaxpr(lambda: evaluated(step_spec, run.layout))())
    np.testing.assert_allclose(
        evaluated(step_spec, run.layout)["nll"], evaluated(run.step_spec, run.layout)["nll"], rtol=1e-6
    )
