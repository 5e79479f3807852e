"""Saved activations: the closed form, tag by tag, against what JAX's derivative of the program saves."""

import dataclasses

import models
import pytest

from jaxllm.config import Architecture, Config
from jaxllm.config.remat import TAGS
from jaxllm.ledger import rows, trace
from jaxllm.ledger.formula.exact import activations, block_graph
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.training_memory import training
from jaxllm.ledger.reconcile import reconcile

# `sqrt` forms groups from four repeats on; five layers of two kinds leave a remainder of one.
MODELS = models.ALL | {
    "deep": dataclasses.replace(models.ROTARY, layers=6),
    "deep, sliding": dataclasses.replace(models.SLIDING, layers=9),
}
POLICIES = (
    "none",
    "full",
    "sqrt",
    "dots",
    "names:attn_qkv,mlp_up",
    "names:attn_context,mlp_hidden,attn_out,mlp_out,resid_mid",
    "names:attn_norm,mlp_norm,mlp_gate,attn_probs",
    "offload:attn_qkv,mlp_down,attn_scores",
)


def run(policy: str = "none", **fields) -> Config:
    config = Config()
    config.train.batch_size, config.data.sequence_length = 4, 16
    config.optimizer.name, config.precision.policy, config.remat.policy = "adamw", "fp32", policy
    for name, value in fields.items():
        section, _, field = name.partition("_")
        setattr(getattr(config, section), field, value)
    return config


def by_tag(made: list[rows.Row], phase: str) -> dict[str, int]:
    """Returns bytes by tag; all untagged ones are summed under one name."""
    found: dict[str, int] = {}
    for row in made:
        if row.phase == phase and row.bytes_per_device:
            name = row.name if row.name in TAGS else trace.UNTAGGED
            found[name] = found.get(name, 0) + row.bytes_per_device
    return found


def assert_equal(model: Architecture, config: Config, platform: str = "cpu"):
    traced = trace.residuals(config, model, platform)
    settled = run_lib.make(model, config, config.precision.policy, platform)
    made = list(activations.rows_between_passes(settled, rows.BOUNDARY))
    assert by_tag(made, rows.BOUNDARY) == traced.tags
    assert by_tag(made, rows.HOST) == traced.host
    assert activations.loss_gradients(settled) * settled.compute_bytes == traced.loss


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_exact(name, policy):
    """Both values of `tensor` occur with every model and with every policy."""
    turn = (list(MODELS).index(name) + POLICIES.index(policy)) % 2
    assert_equal(MODELS[name], run(policy, mesh_tensor=1 + turn))


SHARED = ["none", "full", "dots"]


@pytest.mark.parametrize("policy", SHARED)
@pytest.mark.parametrize("name", models.ALL)
def test_activations_in_16_bit_and_in_shares_are_exact(name, policy):
    cells = [(0, "bf16"), (1, "fp16"), (2, "bf16_pure"), (3, "bf16")]
    turn = (list(models.ALL).index(name) + SHARED.index(policy)) % 2
    for stage, precision in cells[turn::2]:  # each cell occurs with every model and with every policy
        assert_equal(
            models.ALL[name],
            run(policy, mesh_data=2, mesh_tensor=2, mesh_zero=stage, precision_policy=precision),
        )


@pytest.mark.parametrize("policy", ["none", "full", "names:attn_probs"])
@pytest.mark.parametrize("name", ["learned", "sliding"])
def test_activations_of_chunks_and_micro_batches_are_exact(name, policy):
    assert_equal(models.ALL[name], run(policy, train_attention_chunk=4))
    assert_equal(models.ALL[name], run(policy, train_accumulate=2, train_loss_chunk=5))


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if "attn_probs" not in policy])
@pytest.mark.parametrize("name", MODELS)
def test_activations_of_kernels_are_exact(name, policy):
    """Kernels save the attention context and one float32 per query and head; no array has an element per pair."""
    model = dataclasses.replace(MODELS[name], head_dim=16)
    turn = (list(MODELS).index(name) + POLICIES.index(policy)) % 2  # both occur with every model and with every policy
    platform, fields = (("gpu", {"mesh_tensor": 2}), ("tpu", {"precision_policy": "bf16"}))[turn]
    config = run(policy.replace(",attn_scores", ",attn_lse"), **fields)
    assert run_lib.make(model, config, config.precision.policy, platform).attention.implementation == "pallas"
    assert_equal(model, config, platform)


def test_log_sums_are_kept_where_a_policy_names_them():
    model = dataclasses.replace(models.SLIDING, head_dim=16)
    numbers = {
        policy: trace.residuals(run(policy), model, "gpu").tags.get("attn_lse", 0)
        for policy in ("none", "full", "dots", "names:attn_context", "names:attn_lse")
    }
    every = model.layers * 4 * 16 * model.heads * 4
    assert numbers == {"none": every, "full": 0, "dots": 0, "names:attn_context": 0, "names:attn_lse": every}


@pytest.mark.parametrize("stage", range(4))
def test_a_head_is_padded_for_data_only_where_it_is_put_together_from_shares(stage):
    """27 words over 2 devices along `tensor` are 14 on each; shards of them over 3 along `data` make 15."""
    model = dataclasses.replace(models.LEARNED, vocab_size=27, layers=1, width=16, heads=2, kv_heads=2, mlp_width=12)
    for precision in ("fp32", "bf16"):
        config = run(
            mesh_data=3, mesh_tensor=2, mesh_zero=stage, train_batch_size=3, data_sequence_length=8, train_loss_chunk=1
        )
        config.precision.policy = precision
        assert_equal(model, config)
        settled = run_lib.make(model, config, precision, "cpu")
        assert activations.head_elements(settled) == (15 if stage else 14) * model.width


def test_the_trace_column_is_the_formulas():
    config = run("dots", mesh_data=2, mesh_zero=3)
    ledger = training(models.SLIDING, config, "fp32")
    result = reconcile(ledger, trace_figures=trace.figures(config, models.SLIDING, "cpu"))
    assert result.ok(0.0), result.faults(0.0)
    assert [figure.gap("trace") for figure in result.figures[:4]] == [0.0] * 4
    assert isinstance(result.figures[4].gap("trace"), rows.Unknown)


def test_a_forgotten_tag_is_caught(monkeypatch):
    block = block_graph._block

    def careless(*arguments) -> block_graph.Block:
        made = block(*arguments)
        return dataclasses.replace(made, read=tuple(name for name in made.read if name != "mlp_hidden"))

    monkeypatch.setattr(block_graph, "_block", careless)
    with pytest.raises(AssertionError):
        assert_equal(models.ROTARY, run())


def test_forgotten_log_sums_are_caught(monkeypatch):
    of_attention = block_graph._attention
    monkeypatch.setattr(block_graph, "_attention", lambda *a: (of_attention(*a)[0], ("attn_context",)))
    with pytest.raises(AssertionError):
        assert_equal(dataclasses.replace(models.ROTARY, head_dim=16), run(), "gpu")


def test_state_in_host_memory_is_counted_there():
    config = run(optimizer_offload="moments", precision_policy="bf16")
    state = trace.abstract_state(config, models.ROTARY, "cpu")
    moments = 2 * 4 * training(models.ROTARY, config, "bf16").parameters
    assert trace.bytes_per_device(state, "pinned_host") == moments
    assert trace.bytes_per_device(state) > moments
