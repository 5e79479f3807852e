"""The memory bill: exact state, peaks near XLA's, the anchored figures, and faults that must be caught."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import pytest

from jaxllm import mesh, programs
from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import CHOICES, Architecture, Config
from jaxllm.decode import state as decode_state
from jaxllm.ledger import compiled, memory, rows
from jaxllm.ledger.device import tree_bytes
from jaxllm.ledger.inference import inference
from jaxllm.ledger.memory import training
from jaxllm.ledger.reconcile import reconcile
from jaxllm.ledger.rows import DECODE, PREFILL, UPDATE, Ledger
from jaxllm.model.specs import abstract, param_specs, parameter_count
from jaxllm.train import state as state_lib

OPTIMIZERS = CHOICES["optimizer.name"]
# Large enough that arrays outweigh XLA's small change, and that Adafactor factors.
SIZES = {"vocab_size": 512, "layers": 4, "width": 128, "head_dim": 32, "mlp_width": 384, "context_length": 512}
BASE = dataclasses.replace(models.ROTARY, **SIZES, init_std=0.02)
EXPERTS = dataclasses.replace(BASE, experts=4, experts_per_token=2, mlp_width=128)
GPT = dataclasses.replace(models.LEARNED, **SIZES, init_std=0.02)
GEMMA = dataclasses.replace(
    BASE,
    mlp="geglu",
    norm="rmsnorm_plus_one",
    norm_placement="sandwich",
    pattern=("sliding", "full"),
    window=32,
    attention_softcap=50.0,
    logit_softcap=30.0,
    qk_norm=True,
)
WIDE = dataclasses.replace(BASE, width=384, heads=6, kv_heads=6, head_dim=64, mlp_width=1536)


def run(**fields) -> Config:
    """4 sequences of 128 tokens, AdamW, float32; `fields` are `section_field=value`."""
    config = Config()
    config.train.batch_size, config.data.sequence_length = 4, 128
    config.optimizer.name, config.optimizer.weight_decay, config.precision.policy = "adamw", 0.1, "fp32"
    for name, value in fields.items():
        section, _, field = name.partition("_")
        setattr(getattr(config, section), field, value)
    return config


def abstract_state(model: Architecture, config: Config) -> state_lib.TrainState:
    recipe = programs.make_recipe(config, model, "cpu")
    return jax.eval_shape(lambda: state_lib.create(recipe.model, recipe.optimizer, config.train.seed))


def of_state(ledger: Ledger, state: state_lib.TrainState):
    return reconcile(ledger, state_trees={"weights": state.params, "optimizer": state.opt_state, "state": state})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [BASE, EXPERTS, GPT, GEMMA, models.ROTARY], ids=list("BEGMR"))
def test_persistent_state_is_exact(model, optimizer):
    config = run(optimizer_name=optimizer)
    result = of_state(training(model, config, "fp32"), abstract_state(model, config))
    assert result.ok(0.0), result.faults(0.0)
    assert [result.lines[i].gap("device") for i in range(3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b", "gemma3-27b"])
def test_persistent_state_of_published_models_is_exact(name):
    for optimizer in ("adamw", "adafactor", "muon"):
        config = run(optimizer_name=optimizer)
        ledger = training(ARCHITECTURES[name], config, "bf16")
        assert ledger.persistent_bytes == tree_bytes(abstract_state(ARCHITECTURES[name], config)), optimizer


def without(ledger: Ledger, name: str) -> Ledger:
    kept = tuple(row for row in ledger.rows if row.name != name)
    assert len(kept) < len(ledger.rows), f"there is no row {name}"
    return dataclasses.replace(ledger, rows=kept)


def test_a_forgotten_moment_is_caught():
    config = run()
    broken = without(training(BASE, config, "fp32"), "v, second moment")
    assert any(fault.startswith("optimizer:") for fault in of_state(broken, abstract_state(BASE, config)).faults(0.5))


def test_a_head_left_out_is_caught(monkeypatch):
    config = run()
    headless = {name: part for name, part in param_specs(GPT).items() if name != "head"}
    monkeypatch.setattr(memory, "param_specs", lambda model: headless)
    broken = training(GPT, config, "fp32")
    assert any(fault.startswith("weights:") for fault in of_state(broken, abstract_state(GPT, config)).faults(0.5))


# Peaks on this machine's CPU, of arguments + outputs − aliases + temporaries.
CELLS = {
    "experts": (EXPERTS, run()),
    "gpt": (GPT, run(train_batch_size=8, train_accumulate=2)),
    "gemma": (GEMMA, run()),
    "vocabulary": (dataclasses.replace(BASE, vocab_size=32000, layers=2), run(train_loss_chunk=128)),
    "remat": (
        dataclasses.replace(BASE, layers=6, pattern=("sliding", "full"), window=32),
        run(remat_policy="full", data_sequence_length=256),
    ),
    "bf16": (BASE, run(precision_policy="bf16")),
    "muon": (WIDE, run(optimizer_name="muon", train_batch_size=1, data_sequence_length=32)),
}


@pytest.mark.parametrize("cell", CELLS)
def test_training_peak_is_near_xlas(cell):
    model, config = CELLS[cell]
    recipe = programs.make_recipe(config, model, "cpu")
    program = programs.train_step(config, recipe, mesh.make_mesh(config.mesh))
    figures = compiled.figures(program.compile())
    ledger = training(model, config, config.precision.policy)
    gap = reconcile(ledger, figures).lines[-1].gap("compiled")
    assert abs(gap) < 0.1, f"formula {ledger.peak_bytes:,} B, XLA {figures['peak']:,} B"
    batch = next(row.bytes_per_device for row in ledger.rows if row.kind == "batch")
    assert figures["arguments"] == ledger.persistent_bytes + batch


def test_inference_peaks_are_near_xlas():
    model, batch, capacity, chunk = dataclasses.replace(BASE, vocab_size=4096), 4, 1024, 64
    ledger = inference(model, batch, capacity, chunk, "fp32", "fp32")
    made = {
        PREFILL: programs.prefill(model, batch, chunk, capacity, jnp.float32),
        DECODE: programs.decode(model, batch, 8, capacity, jnp.float32),
    }
    for phase, program in made.items():
        peak = compiled.figures(program.compile())["peak"]
        assert abs((ledger.persistent_bytes + ledger.phase_bytes(phase)) / peak - 1) < 0.12, (phase, peak)


@pytest.mark.parametrize("model", [BASE, EXPERTS, GEMMA, dataclasses.replace(GEMMA, layers=3)], ids=list("BEMT"))
@pytest.mark.parametrize(("dtype", "name"), [(jnp.float32, "fp32"), (jnp.bfloat16, "bf16")])
def test_inference_state_is_exact(model, dtype, name):
    ledger = inference(model, 3, 100, 16, name, name)
    held = (abstract(param_specs(model), dtype), decode_state.abstract(model, 3, 100, dtype))
    assert ledger.persistent_bytes == tree_bytes(held)


def test_keys_without_values_are_caught():
    ledger = inference(GEMMA, 2, 64, 16, "fp32", "fp32")
    cache = tree_bytes(decode_state.abstract(GEMMA, 2, 64, jnp.float32).cache.kv)
    halved = [row.bytes_per_device // 2 for row in ledger.rows if row.kind == "KV cache"]
    assert ledger.kind_bytes("KV cache") == cache != sum(halved)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"), [("sgd", 8), ("momentum", 12), ("lion", 12), ("adam", 16), ("adamw", 16)]
)
def test_bytes_a_parameter_in_float32(optimizer, bytes_per_parameter):
    model = ARCHITECTURES["gpt2"]
    ledger = training(model, run(optimizer_name=optimizer), "fp32")
    gradients = next(row.bytes_per_device for row in ledger.rows if row.name == "gradients" and row.phase == UPDATE)
    few = ledger.kind_bytes("state") + sum(row.bytes_per_device for row in ledger.rows if row.name == "counters")
    assert ledger.persistent_bytes + gradients - few == bytes_per_parameter * parameter_count(model)


def test_mixed_precision_has_the_same_state():
    one, other = (training(BASE, run(), policy) for policy in ("fp32", "bf16"))
    assert one.persistent_bytes == other.persistent_bytes
    assert other.kind_bytes("master weights") == one.kind_bytes("weights")


def test_gpt3_with_adam_takes_35_devices_of_80_gb():
    model = ARCHITECTURES["gpt3-175b"]
    ledger = training(model, run(optimizer_name="adam"), "fp32")
    states = ledger.persistent_bytes + parameter_count(model) * 4
    assert round(states / 1e12, 1) == 2.8
    assert -(-states // (80 * 10**9)) == 35


def test_llama3_70b_weights():  # huggingface/accelerate#3379
    ledger = inference(ARCHITECTURES["llama3-70b"], 1, 1, 1, "bf16", "bf16")
    weights = ledger.rows[0]
    assert ledger.parameters == 70_553_706_496
    assert weights.bytes_per_device == 141_107_412_992
    assert weights.formula == "70,553,706,496 × 2 B = 131.42 GiB"


def test_a_gated_mlp_has_three_matrices():  # EleutherAI/cookbook#36
    model = dataclasses.replace(
        ARCHITECTURES["llama3-70b"], vocab_size=152064, kv_heads=64, mlp_width=24576, qkv_bias=True
    )
    assert inference(model, 1, 1, 1, "bf16", "bf16").parameters == 72_287_920_128
    assert tree_bytes(abstract_state(model, run(optimizer_name="sgd")).params) == 4 * 72_287_920_128


def test_adam_costs_twelve_persistent_bytes_and_accumulation_four():  # maxtext#606, optax#528, optax#320
    llama = training(ARCHITECTURES["llama2-7b"], run(optimizer_name="adam"), "fp32")
    assert llama.parameters == 6_738_415_616
    assert round(llama.persistent_bytes / 1e9, 2) == 80.86
    assert {row.phase for row in llama.rows if row.name == "gradients"} == {rows.BACKWARD, UPDATE}
    gpt2 = ARCHITECTURES["gpt2"]
    whole = training(gpt2, run(train_batch_size=4), "fp32")
    parts = training(gpt2, run(train_batch_size=16, train_accumulate=4), "fp32")
    added = [row for row in parts.rows if row.kind == "gradient accumulator"]
    assert {row.bytes_per_device for row in added} == {497_759_232}
    assert not [row for row in whole.rows if row.kind == "gradient accumulator"]
    assert parts.persistent_bytes == whole.persistent_bytes


def test_data_parallelism_divides_the_batch_and_nothing_else():
    one = training(BASE, run(train_batch_size=8), "fp32")
    four = training(BASE, run(train_batch_size=8, mesh_data=4), "fp32")
    quarter = training(BASE, run(train_batch_size=2), "fp32")
    assert four.count == 4
    assert four.persistent_bytes == one.persistent_bytes
    assert four.rows == quarter.rows


def test_llama3_8b_kv_cache():
    ledger = inference(ARCHITECTURES["llama3-8b"], 1, 8192, 256, "bf16", "bf16")
    (cache,) = [row for row in ledger.rows if row.kind == "KV cache"]
    assert cache.bytes_per_device == 2 * 32 * 8 * 128 * 2 * 8192 == 2**30
    assert cache.formula.endswith("= 1.00 GiB")
