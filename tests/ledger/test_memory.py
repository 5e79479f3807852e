"""The memory bill: exact state, peaks near XLA's, the anchored figures, and faults that must be caught."""

import dataclasses
import itertools

import jax.numpy as jnp
import models
import pytest

from jaxllm import mesh, programs
from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import CHOICES, Architecture, Config
from jaxllm.decode import state as decode_state
from jaxllm.errors import UserError
from jaxllm.ledger import compiled, rows, setting, trace
from jaxllm.ledger.device import tree_bytes
from jaxllm.ledger.inference import inference
from jaxllm.ledger.memory import training
from jaxllm.ledger.reconcile import reconcile
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, DECODE, HOST, PERSISTENT, PREFILL, UPDATE, Ledger
from jaxllm.model.specs import abstract, param_specs, parameter_count

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


def of_state(ledger: Ledger, model: Architecture, config: Config):
    return reconcile(ledger, trace_figures=trace.figures(config, model, "cpu"))


def assert_exact(model: Architecture, config: Config):
    """State on the device and state in host memory, each to the byte, against the trainer's abstract state."""
    state = trace.abstract_state(config, model, "cpu")
    ledger = training(model, config, config.precision.policy)
    host = trace.bytes_per_device(state, "pinned_host")
    in_host = sum(row.bytes_per_device for row in ledger.rows if row.phase == HOST and row.kind != "activations")
    assert (ledger.persistent_bytes, in_host) == (trace.bytes_per_device(state) - host, host)


MESHES = [{}, {"mesh_data": 4}, {"mesh_data": 3}, {"mesh_replica": 2, "mesh_data": 2, "mesh_tensor": 2}]
ODD = dataclasses.replace(BASE, vocab_size=509, width=132, tied_embeddings=False)  # what does not divide is padded


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [BASE, EXPERTS, GPT, GEMMA, ODD], ids=list("BEGMO"))
def test_persistent_state_is_exact(model, optimizer):
    """Every ZeRO stage, mesh and precision."""
    exact = 0
    for axes, stage, policy in itertools.product(MESHES, range(4), ("fp32", "bf16", "fp16", "bf16_pure")):
        config = run(optimizer_name=optimizer, precision_policy=policy, mesh_zero=stage, train_batch_size=24, **axes)
        arrays = setting.make(model, config, policy, "cpu").parameters
        if policy in ("fp32", "bf16_pure") and any(p.weight.shape != p.moment.shape for p in arrays):
            continue  # weights that are whole and moments that are padded: no step can be traced
        try:
            assert_exact(model, config)
        except UserError as refused:
            assert "would be padded" in str(refused)  # noqa: PT017
        else:
            exact += 1
    assert exact >= 40


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("offload", ["moments", "all"])
@pytest.mark.parametrize("moments", CHOICES["optimizer.moment_dtype"])
def test_state_in_host_memory_is_exact(optimizer, offload, moments):
    for stage in (0, 1, 3):
        config = run(
            optimizer_name=optimizer,
            optimizer_offload=offload,
            optimizer_moment_dtype=moments,
            precision_policy="bf16",
            mesh_zero=stage,
            mesh_data=4,
        )
        assert_exact(BASE, config)
        ledger = training(BASE, config, "bf16")
        assert ledger.host_bytes > 0
        assert ledger.peak_bytes == ledger.persistent_bytes + ledger.phase_bytes(ledger.peak_phase)


@pytest.mark.parametrize(
    ("name", "policy", "optimizer", "axes", "stage"),
    [
        ("gpt2", "fp32", "adamw", (1, 1), 0),
        ("llama3-8b", "bf16", "adamw", (8, 1), 3),
        ("llama3-8b", "bf16", "adafactor", (64, 1), 1),
        ("llama3-8b", "bf16_pure", "muon", (8, 8), 3),
        ("mixtral-8x7b", "bf16", "adamw", (64, 8), 2),
        ("gemma3-27b", "bf16", "lion", (1024, 1), 3),
        ("gpt3-175b", "bf16", "adamw", (1024, 1), 3),
        ("gpt3-175b", "bf16", "adamw", (64, 8), 1),
        ("gpt3-175b", "fp16", "adam", (64, 8), 3),
    ],
)
def test_persistent_state_of_published_models_is_exact(name, policy, optimizer, axes, stage):
    data, tensor = axes
    config = run(
        precision_policy=policy,
        optimizer_name=optimizer,
        mesh_data=data,
        mesh_tensor=tensor,
        mesh_zero=stage,
        train_batch_size=data,
    )
    assert_exact(ARCHITECTURES[name], config)
    assert training(ARCHITECTURES[name], config, policy).count == data * tensor


def without(ledger: Ledger, name: str) -> Ledger:
    kept = tuple(row for row in ledger.rows if row.name != name)
    assert len(kept) < len(ledger.rows), f"there is no row {name}"
    return dataclasses.replace(ledger, rows=kept)


def test_a_forgotten_moment_is_caught():
    config = run()
    ledger = training(BASE, config, "fp32")
    assert of_state(ledger, BASE, config).ok(0.0)
    broken = without(ledger, "v, second moment")
    assert any(fault.startswith("optimizer:") for fault in of_state(broken, BASE, config).faults(0.5))


def test_a_head_left_out_is_caught(monkeypatch):
    config = run()
    headless = {name: part for name, part in param_specs(GPT).items() if name != "head"}
    monkeypatch.setattr(setting, "param_specs", lambda model: headless)
    untied = dataclasses.replace(GPT, tied_embeddings=True)
    broken = training(untied, config, "fp32")
    assert any(fault.startswith("weights:") for fault in of_state(broken, GPT, config).faults(0.5))


def test_a_stage_that_does_not_split_is_caught(monkeypatch):
    config = run(mesh_data=4, mesh_zero=3)
    kept = dataclasses.replace(config.mesh, zero=0)
    whole = mesh.placements
    monkeypatch.setattr(setting.mesh_lib, "placements", lambda specs, _, kind, mixed: whole(specs, kept, kind, mixed))
    broken = training(BASE, config, "fp32")
    monkeypatch.undo()
    assert {fault.partition(":")[0] for fault in of_state(broken, BASE, config).faults(0.5)} >= {"weights", "optimizer"}


# Peaks on this machine's CPU, of arguments + outputs − aliases + temporaries.
DEEP = dataclasses.replace(BASE, layers=6)
CELLS = {
    "plain": (BASE, run()),
    "experts": (EXPERTS, run()),
    "gpt": (GPT, run(train_batch_size=8, train_accumulate=2)),
    "gemma": (GEMMA, run()),
    "vocabulary": (dataclasses.replace(BASE, vocab_size=32000, layers=2), run(train_loss_chunk=128)),
    "remat": (
        dataclasses.replace(DEEP, pattern=("sliding", "full"), window=32),
        run(remat_policy="full", data_sequence_length=256),
    ),
    "full": (DEEP, run(remat_policy="full", data_sequence_length=256)),
    "dots": (DEEP, run(remat_policy="dots", data_sequence_length=256)),
    "sqrt": (dataclasses.replace(BASE, layers=9), run(remat_policy="sqrt", data_sequence_length=256)),
    "chunked": (DEEP, run(remat_policy="full", data_sequence_length=512, train_attention_chunk=64)),
    "bf16": (BASE, run(precision_policy="bf16")),
    "muon": (WIDE, run(optimizer_name="muon", train_batch_size=1, data_sequence_length=32)),
    "zero 1": (BASE, run(mesh_data=4, mesh_zero=1, train_batch_size=16)),
    "zero 2": (WIDE, run(mesh_data=4, mesh_zero=2, train_batch_size=8)),
    "zero 3": (WIDE, run(mesh_data=4, mesh_zero=3, train_batch_size=8)),
    "tensor": (WIDE, run(mesh_data=2, mesh_tensor=2, mesh_zero=3, train_batch_size=8)),
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
    assert training(BASE, run(), "fp16").persistent_bytes == one.persistent_bytes + 8  # the loss scale
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
    held = trace.figures(run(optimizer_name="sgd", precision_policy="fp32"), model, "cpu")["weights"]
    assert held == 4 * 72_287_920_128


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


def states(model: Architecture, config: Config) -> int:
    """What ZeRO counts, on one device: weights that compute, gradients, and all that persists but a few counters."""
    ledger = training(model, config, "bf16", "gpu")
    few = sum(row.bytes_per_device for row in ledger.rows if row.name in ("counters", "step and key"))
    (copies,) = [r for r in ledger.rows if r.phase == BOUNDARY and r.name.startswith("compute copy of weights")]
    # A CPU has all gradients at one time.
    on_cpu = training(model, config, "bf16", "cpu").rows
    (gradients,) = [row for row in on_cpu if row.phase == BACKWARD and row.name == "gradients"]
    assert ledger.peak_bytes > ledger.persistent_bytes + copies.bytes_per_device
    return ledger.persistent_bytes - few + copies.bytes_per_device + gradients.bytes_per_device


def zero_run(**fields) -> Config:
    return run(optimizer_name="adam", precision_policy="bf16", data_sequence_length=8, **fields)


def test_zero_2_of_a_billion_parameters():  # deepspeedai/DeepSpeed#5102, #5099, #4527
    """2 + 2/4 + 12/4 bytes a parameter with 16-bit gradients; sums in float32 are a row of their own."""
    model = dataclasses.replace(BASE, layers=1, width=1000, vocab_size=1_000_000 - 1923)
    config = zero_run(mesh_data=4, mesh_zero=2, train_batch_size=4)
    parameters = parameter_count(model)
    assert parameters == pytest.approx(1e9, rel=2e-3)
    assert states(model, config) == pytest.approx(5.5 * parameters, rel=1e-3)
    config.train.accumulate, config.train.batch_size = 2, 8
    parts = training(model, config, "bf16", "gpu")
    (summed,) = {row.bytes_per_device for row in parts.rows if row.kind == "gradient accumulator"}
    assert summed == pytest.approx(parameters, rel=1e-3)  # 4 B on 4 devices: 6.5 in all
    named = {row.name for row in parts.rows}
    assert {"master weights", "m, first moment", "v, second moment", "gradients", "compute copy of weights"} <= named


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_table(stage, gigabytes):  # Rajbhandari et al. 2020, figure 1: 7.5e9 parameters on 64 devices
    model, config = ARCHITECTURES["llama2-7b"], zero_run(mesh_data=64, mesh_zero=stage, train_batch_size=64)
    assert round(states(model, config) * 7.5e9 / parameter_count(model) / 1e9, 1) == gigabytes


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_stages_shard_what_they_say(devices):  # deepspeedai/DeepSpeed#4093
    """Stage 1 splits the moments, 2 the gradients too, 3 the weights too; doubling the devices halves what is split."""
    made = {
        stage: training(BASE, run(mesh_data=devices, mesh_zero=stage, train_batch_size=8), "fp32") for stage in range(4)
    }
    whole = parameter_count(BASE) * 4

    def held(stage: int, name: str, phase: str) -> int:
        (row,) = [row for row in made[stage].rows if (row.name, row.phase) == (name, phase)]
        return row.bytes_per_device

    for stage in range(4):
        for name, phase, first in (
            ("m, first moment", PERSISTENT, 1),
            ("gradients", BACKWARD, 2),
            ("weights", PERSISTENT, 3),
        ):
            assert held(stage, name, phase) == whole // (devices if stage >= first else 1), (stage, name)


def test_llama3_8b_kv_cache():
    ledger = inference(ARCHITECTURES["llama3-8b"], 1, 8192, 256, "bf16", "bf16")
    (cache,) = [row for row in ledger.rows if row.kind == "KV cache"]
    assert cache.bytes_per_device == 2 * 32 * 8 * 128 * 2 * 8192 == 2**30
    assert cache.formula.endswith("= 1.00 GiB")
