"""What holds for every ledger: sums, order, shapes of the state, and the cache's growth."""

import dataclasses
import json
import time

import chex
import jax
import models
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from jaxllm import programs
from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import CHOICES, Architecture, Config, MeshConfig
from jaxllm.errors import UserError
from jaxllm.ledger import communication, compute, rows, setting, trace
from jaxllm.ledger.device import tree_bytes
from jaxllm.ledger.inference import inference
from jaxllm.ledger.memory import training
from jaxllm.ledger.rows import HOST, PERSISTENT, PHASES, Ledger
from jaxllm.model.specs import abstract, param_specs
from jaxllm.train import state as state_lib

OPTIMIZERS = CHOICES["optimizer.name"]
REMAT = ["none", "full", "sqrt", "dots", "names:attn_qkv,mlp_up", "offload:attn_context"]
quick = settings(max_examples=40, deadline=None)


@st.composite
def architectures(draw) -> Architecture:
    """One of the test models with other sizes."""
    base = draw(st.sampled_from(list(models.ALL.values())))
    kv_heads = draw(st.integers(1, 4))
    return dataclasses.replace(
        base,
        layers=draw(st.integers(1, 9)),
        width=draw(st.sampled_from([16, 48, 128, 200])),
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([8, 16, 64])),
        mlp_width=draw(st.integers(1, 300)),
        vocab_size=draw(st.integers(2, 1000)),
        tied_embeddings=draw(st.booleans()),
        unroll=draw(st.integers(1, 3)),
    )


@st.composite
def runs(draw) -> Config:
    config = Config()
    config.train.accumulate = draw(st.integers(1, 4))
    config.mesh.replica, config.mesh.data = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    config.mesh.zero = draw(st.integers(0, 3))
    rows_of_devices = config.train.accumulate * config.mesh.replica * config.mesh.data
    config.train.batch_size = rows_of_devices * draw(st.integers(1, 4))
    config.data.sequence_length = 8 * draw(st.integers(1, 16))
    config.train.attention_chunk = draw(st.sampled_from([0, 4]))
    config.optimizer.moment_dtype = draw(st.sampled_from(CHOICES["optimizer.moment_dtype"]))
    config.optimizer.offload = draw(st.sampled_from(["none", "moments"]))
    config.optimizer.name = draw(st.sampled_from(OPTIMIZERS))
    config.optimizer.weight_decay = draw(st.sampled_from([0.0, 0.1]))
    config.remat.policy = draw(st.sampled_from(REMAT))
    config.train.loss_chunk = draw(st.sampled_from([1, 16, 4096]))
    return config


policies = st.sampled_from(["fp32", "bf16", "fp16", "bf16_pure"])
platforms = st.sampled_from(["cpu", "gpu"])


@quick
@given(architectures(), runs(), policies, platforms)
def test_rows_sum_to_the_peak(model, config, policy, platform):
    ledger = training(model, config, policy, platform)
    sums = dict.fromkeys(PHASES, 0)
    for row in ledger.rows:
        assert row.bytes_per_device >= 0
        assert row.formula.endswith(f"= {rows.format_bytes(row.bytes_per_device)}")
        sums[row.phase] += row.bytes_per_device
    persistent, host = sums.pop(PERSISTENT), sums.pop(HOST)
    assert ledger.persistent_bytes == persistent
    assert ledger.host_bytes == host
    assert ledger.peak_bytes == persistent + max(sums.values())
    for phase in PHASES:
        names = [row.name for row in ledger.rows if row.phase == phase]
        assert len(names) == len(set(names)), names


@quick
@given(architectures(), runs(), policies)
def test_json_round_trip(model, config, policy):
    ledger = training(model, config, policy)
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


@quick
@given(architectures(), runs(), policies, st.sampled_from(["batch", "length", "layers", "width", "vocabulary"]))
def test_more_of_anything_never_costs_less(model, config, policy, what):
    if what == "layers" and model.repeats <= model.unroll:
        model = dataclasses.replace(model, layers=model.layers + len(model.pattern) * model.unroll)
    # Groups of `sqrt` are divisors of the layers: more layers may have better ones.
    assume(what != "layers" or config.remat.policy != "sqrt")
    before = training(model, config, policy).peak_bytes
    if what == "batch":
        config.train.batch_size *= 2
    elif what == "length":
        config.data.sequence_length += 8
    else:
        field = {"layers": "layers", "width": "width", "vocabulary": "vocab_size"}[what]
        more = len(model.pattern) if what == "layers" else 1
        model = dataclasses.replace(model, **{field: getattr(model, field) + more})
    assert training(model, config, policy).peak_bytes > before


def state_bytes(ledger: Ledger) -> int:
    """Of all that persists, in the device's memory or the host's."""
    return ledger.persistent_bytes + ledger.host_bytes - ledger.kind_bytes("activations", HOST)


@quick
@given(architectures(), runs(), policies)
def test_persistent_state_is_exact(model, config, policy):
    config.precision.policy = policy
    arrays = setting.make(model, config, policy, "cpu").parameters
    # Weights that are whole and moments that are padded: no step can be traced.
    assume(policy in ("bf16", "fp16") or all(p.weight.shape == p.moment.shape for p in arrays))
    try:
        state = trace.abstract_state(config, model, "cpu")
    except UserError:  # an optimizer that cannot do it, and says so
        reject()
    ledger = training(model, config, policy)
    assert state_bytes(ledger) == trace.bytes_per_device(state)
    assert ledger.host_bytes - ledger.kind_bytes("activations", HOST) == trace.bytes_per_device(state, "pinned_host")
    if config.mesh.data == 1:
        chex.assert_trees_all_equal_shapes(state.params, abstract(param_specs(model), "float32"))


@quick
@given(architectures(), runs(), policies)
def test_a_higher_stage_never_holds_more(model, config, policy):
    sizes = []
    for stage in range(4):
        config.mesh.zero = stage
        ledger = training(model, config, policy)
        padding = sum(row.bytes_per_device for row in ledger.rows if row.name.startswith("padding"))
        sizes.append(state_bytes(ledger) - padding)
    assert sizes == sorted(sizes, reverse=True)


@quick
@given(architectures(), runs(), policies)
def test_more_devices_never_hold_more_each(model, config, policy):
    """Twice the devices along `data`, each with as many tokens: what persists shrinks, but for padding."""
    before = training(model, config, policy)
    config.mesh.data, config.train.batch_size = 2 * config.mesh.data, 2 * config.train.batch_size
    after = training(model, config, policy)
    assert after.count == 2 * before.count
    padding = sum(row.bytes_per_device for row in after.rows if row.name.startswith("padding"))
    assert state_bytes(after) - padding <= state_bytes(before)


@quick
@given(architectures(), runs(), policies)
def test_shares_of_stage_3_are_the_whole(model, config, policy):
    """Weights and elementwise moments of all devices together: what one device would hold, within their padding."""
    config.mesh.zero, config.mesh.replica, config.optimizer.name = 3, 1, "adam"
    shared = training(model, config, policy)
    alone = training(model, dataclasses.replace(config, mesh=MeshConfig()), policy)
    counters = shared.kind_bytes("state") + 4
    all_shares = config.mesh.data * (state_bytes(shared) - counters)
    padding = config.mesh.data * sum(row.bytes_per_device for row in shared.rows if row.name.startswith("padding"))
    whole = state_bytes(alone) - counters
    # Each array's own part of a share is rounded down to a whole number, the rest is in the padding.
    assert whole <= all_shares <= whole + padding


@pytest.mark.parametrize("name", models.ALL)
def test_gradients_and_moments_have_the_parameters_shapes(name):
    model, config = models.ALL[name], Config()
    recipe = programs.make_recipe(config, model, "cpu")
    state = jax.eval_shape(lambda: state_lib.create(recipe.model, recipe.optimizer, 0))
    adam = state.opt_state[0]
    gradients = jax.eval_shape(jax.grad(lambda params: sum(x.sum() for x in jax.tree.leaves(params))), state.params)
    for tree in (adam.mu, adam.nu, gradients):
        chex.assert_trees_all_equal_shapes(state.params, tree)
        assert tree_bytes(tree) == tree_bytes(state.params)


@quick
@given(architectures(), st.integers(1, 8), st.integers(1, 60))
def test_a_full_layers_cache_is_linear_and_a_sliding_ones_stops(model, batch, capacity):
    def cache(tokens: int, sequences: int = batch) -> dict[str, int]:
        made = inference(model, sequences, tokens, 1, "fp32", "fp32").rows
        return {row.name: row.bytes_per_device for row in made if row.kind == "KV cache"}

    one, some, twice = cache(1), cache(capacity), cache(2 * capacity)
    for name in one:
        cap = model.window if name.endswith("sliding") else 10**9
        assert some[name] == min(capacity, cap) * one[name]
        assert twice[name] == min(2 * capacity, cap) * one[name]
        assert cache(capacity, 3 * batch)[name] == 3 * some[name]


@quick
@given(architectures(), runs())
def test_inference_is_training_without_its_state_and_gradients(model, config):
    """The weights stay; optimizer, gradients and what the backward pass needs have no row."""
    config.mesh, config.optimizer.offload = MeshConfig(), "none"
    train = training(model, config, "fp32")
    infer = inference(model, 1, 16, 4, "fp32", "fp32")
    gone = sum(row.bytes_per_device for row in train.rows if row.phase == PERSISTENT and row.kind != "weights")
    assert train.persistent_bytes - gone == infer.kind_bytes("weights")
    kinds = {row.kind for row in infer.rows}
    assert not kinds & {"optimizer", "gradients", "gradient accumulator", "activations", "master weights"}


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3.1-405b", "mixtral-8x7b", "gemma3-27b"])
def test_a_closed_form_takes_less_than_ten_milliseconds(name):
    model, config = ARCHITECTURES[name], Config()
    config.optimizer.name, config.mesh.data, config.mesh.zero, config.train.batch_size = "muon", 8, 3, 8

    def seconds(make) -> float:
        begun = time.perf_counter()
        make()
        return time.perf_counter() - begun

    assert min(seconds(lambda: training(model, config, "bf16")) for _ in range(15)) < 0.01
    assert min(seconds(lambda: compute.train_step(model, config, "bf16")) for _ in range(15)) < 0.01
    assert min(seconds(lambda: communication.train_step(model, config, "bf16")) for _ in range(15)) < 0.01
    assert min(seconds(lambda: inference(model, 8, 4096, 256, "bf16", "bf16")) for _ in range(15)) < 0.01
