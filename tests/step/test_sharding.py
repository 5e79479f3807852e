"""Every ZeRO stage, with and without tensor parallelism and accumulation, trains like one device."""

import dataclasses
import functools

import jax
import models
import numpy as np
import pytest
import steps

from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.ledger.device import tree_bytes
from jaxllm.parallel.collectives import Collectives
from jaxllm.parallel.mesh import Placement

# No mesh divides the vocabulary, so tensor parallelism always pads it. Initial values are the usual ones, because the
# large ones of the small models multiply rounding errors layer by layer.
ALL = {name: dataclasses.replace(model, vocab_size=67, init_std=0.02) for name, model in models.ALL.items()}


@functools.cache
def one_device(name: str, count: int, accumulate: int) -> list[float]:
    return steps.Run(steps.config(train_accumulate=accumulate), ALL[name]).losses(count)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_20_steps_reach_the_loss_of_one_device(zero, tensor, accumulate):
    config = steps.config(mesh_data=2, mesh_tensor=tensor, mesh_zero=zero, train_accumulate=accumulate)
    got = steps.Run(config, ALL["rotary"]).losses(20)
    np.testing.assert_allclose(got, one_device("rotary", 20, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("learned", {"mesh_data": 2, "mesh_tensor": 2, "mesh_zero": 1}),
        ("sliding", {"mesh_data": 2, "mesh_tensor": 2, "mesh_zero": 3}),
        ("experts", {"mesh_data": 2, "mesh_tensor": 2, "mesh_replica": 2, "mesh_zero": 2}),
        pytest.param("post", {"mesh_data": 2, "mesh_tensor": 2, "mesh_zero": 3}, marks=pytest.mark.slow),
        pytest.param("longrope", {"mesh_data": 2, "mesh_tensor": 2, "mesh_zero": 2}, marks=pytest.mark.slow),
        pytest.param(
            *("rotary", {"mesh_data": 4, "mesh_replica": 2, "mesh_zero": 3, "train_attention_chunk": 8}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_models_on_hybrid_meshes(name, axes):
    """Other models train alike on hybrid (replicated and sharded) meshes.

    They have: learned positions and biases; sandwich norms, caps and windows; experts; norms over the heads of all
    devices; positions by layer and by sequence.
    """
    want = one_device(name, 3, 1)
    np.testing.assert_allclose(steps.Run(steps.config(**axes), ALL[name]).losses(3), want, atol=1e-5)
    assert len(set(want)) == 3


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.slow) for zero in (1, 2)), 3])
def test_what_does_not_divide_is_padded_and_trains_alike(zero):
    """Three devices divide no dimension of the model, so every stage pads all of it."""
    whole = steps.config(train_batch_size=6)
    split = steps.config(train_batch_size=6, mesh_data=3, mesh_zero=zero)
    run = steps.Run(split, ALL["learned"])
    np.testing.assert_allclose(run.losses(3), steps.Run(whole, ALL["learned"]).losses(3), atol=1e-5)
    moments = tree_bytes(run.state.opt_state)
    assert moments < 0.5 * tree_bytes(steps.Run(whole, ALL["learned"]).state.opt_state)


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.slow) for zero in (1, 2)), 3])
def test_a_model_shorter_than_its_pattern_trains_alike(zero):
    """A model with fewer layers than its pattern has no stacked layers to scan over."""
    short = dataclasses.replace(ALL["sliding"], layers=1)
    split = steps.config(precision_policy="bf16", mesh_data=2, mesh_zero=zero)
    want = steps.Run(steps.config(precision_policy="bf16"), short).losses(2)
    np.testing.assert_allclose(steps.Run(split, short).losses(2), want, atol=2e-2)


def test_a_forgotten_sum_over_tensor_is_caught(monkeypatch):
    """The tolerance above detects norm gradients that are not summed over the devices that share their tokens."""
    from jaxllm.step import gradients

    monkeypatch.setattr(gradients, "_reduce_gradients", lambda g, layout: g)
    got = steps.Run(steps.config(mesh_tensor=2), ALL["rotary"]).losses(3)
    assert np.abs(np.subtract(got, one_device("rotary", 3, 1))).max() > 1e-4


def test_a_norm_over_one_device_s_heads_is_caught(monkeypatch):
    monkeypatch.setattr(Collectives, "all_reduce_heads", lambda self, x: x * self.tensor)
    got = steps.Run(steps.config(mesh_tensor=2), ALL["post"]).losses(3)
    assert np.abs(np.subtract(got, one_device("post", 3, 1))).max() > 1e-4


def bytes_of(config: Config, part: str) -> int:
    return tree_bytes(getattr(steps.Run(config).state, part))


def test_live_shards_follow_the_stage():  # DeepSpeed#4093
    """Stage 1 shards the optimizer, stage 3 the parameters; with twice the devices each stores half."""
    whole = {part: bytes_of(steps.config(), part) for part in ("params", "opt_state")}
    counters = 4
    for devices in (2, 8):
        for zero in (0, 1, 2, 3):
            config = steps.config(mesh_data=devices, mesh_zero=zero)
            run = steps.Run(config)
            params, moments = tree_bytes(run.state.params), tree_bytes(run.state.opt_state)
            assert params == (whole["params"] // devices if zero == 3 else whole["params"])
            want = (whole["opt_state"] - counters) // devices + counters if zero else whole["opt_state"]
            assert moments == want
            split = jax.tree.leaves(run.layout.moments, is_leaf=lambda p: isinstance(p, Placement))
            assert all((p.zero_dim is None) == (zero == 0) for p in split)


def test_initial_values_do_not_depend_on_the_mesh():
    one = steps.Run(steps.config(), ALL["learned"]).state.params
    other = steps.Run(steps.config(mesh_data=2, mesh_tensor=2, mesh_zero=3), ALL["learned"]).state.params
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        inside = np.asarray(b)[tuple(slice(0, size) for size in a.shape)]
        np.testing.assert_array_equal(inside, np.asarray(a))
    table = np.asarray(other["embed"]["tokens"])
    assert table.shape[0] == 68
    assert not table[67].any()


@pytest.mark.slow
def test_mixed_precision_masters_are_split_from_stage_one():
    """With 16-bit compute the float32 weights are optimizer state: ZeRO's 4 + 12/N, 2 + 14/N, 16/N bytes."""
    whole = bytes_of(steps.config(), "params")
    run = steps.Run(steps.config(precision_policy="bf16", mesh_data=4, mesh_zero=1))
    assert tree_bytes(run.state.params) == whole // 4
    want = steps.Run(steps.config(precision_policy="bf16")).losses(3)
    for zero in (1, 2, 3):
        got = steps.Run(steps.config(precision_policy="bf16", mesh_data=4, mesh_zero=zero)).losses(3)
        np.testing.assert_allclose(got, want, atol=2e-2)


@pytest.mark.parametrize("fields", [{"optimizer_offload": "moments"}, {"optimizer_offload": "moments", "mesh_zero": 3}])
def test_offloaded_moments_train_alike(fields):
    run = steps.Run(steps.config(mesh_data=2, **fields))
    np.testing.assert_allclose(run.losses(3), one_device_64(), atol=1e-5)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(run.state.opt_state) if x.ndim}
    assert kinds == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(run.state.params)} != kinds


def test_offloaded_masters_train_alike():
    want = steps.Run(steps.config(precision_policy="bf16")).losses(3)
    run = steps.Run(steps.config(precision_policy="bf16", optimizer_offload="all"))
    np.testing.assert_allclose(run.losses(3), want, atol=1e-6)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(run.state.params)} == {"pinned_host"}


@functools.cache
def one_device_64() -> list[float]:
    return steps.Run(steps.config()).losses(3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer_offload": "all"}, "no master weights"),
        ({"optimizer_offload": "moments", "optimizer_name": "muon"}, "array by array"),
        ({"optimizer_name": "adafactor", "mesh_tensor": 2}, "embed.tokens"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(fields, message):
    with pytest.raises(UserError, match=message) as caught:
        steps.Run(steps.config(**fields), ALL["rotary"])
    assert "\n" not in str(caught.value)
