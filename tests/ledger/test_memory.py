"""The memory bill: exact state, peaks close to XLA's, and faults that must be caught."""

import contextlib
import dataclasses
import itertools

import jax
import models
import optax
import peaks
import pytest

from jaxllm import programs
from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import CHOICES, Architecture, Config
from jaxllm.config.optimizers import OPTIMIZERS as OPTIMIZER_RECORDS
from jaxllm.config.optimizers import Optimizer, Slot
from jaxllm.errors import UserError
from jaxllm.ledger import trace
from jaxllm.ledger.compiled import inspection
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.training_memory import training
from jaxllm.ledger.reconcile import reconcile
from jaxllm.ledger.rows import BOUNDARY, HOST, PERSISTENT, Ledger
from jaxllm.parallel import mesh

OPTIMIZERS = CHOICES["optimizer.name"]
# Large enough that arrays outweigh XLA's small buffers, and that Adafactor factors.
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
    """Returns a run of 4 sequences of 128 tokens, AdamW, float32; `fields` are `section_field=value`."""
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
    """Checks state on the device and in host memory, each to the byte, against the trainer's abstract state."""
    state = trace.abstract_state(config, model, "cpu")
    ledger = training(model, config, config.precision.policy)
    host = trace.bytes_per_device(state, "pinned_host")
    in_host = sum(row.bytes_per_device for row in ledger.rows if row.phase == HOST and row.kind != "activations")
    assert (ledger.persistent_bytes, in_host) == (trace.bytes_per_device(state) - host, host)


MESHES = [{}, {"mesh_data": 4}, {"mesh_data": 3}, {"mesh_replica": 2, "mesh_data": 2, "mesh_tensor": 2}]
ODD = dataclasses.replace(BASE, vocab_size=509, width=132, tied_embeddings=False)  # what cannot divide is padded


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [BASE, EXPERTS, GPT, GEMMA, ODD], ids=list("BEGMO"))
def test_persistent_state_is_exact(model, optimizer):
    """Covers every ZeRO stage, mesh and precision."""
    exact = 0
    for axes, stage, policy in itertools.product(MESHES, range(4), ("fp32", "bf16", "fp16", "bf16_pure")):
        config = run(optimizer_name=optimizer, precision_policy=policy, mesh_zero=stage, train_batch_size=24, **axes)
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


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_optimizer_is_one_record(monkeypatch, forgotten):
    """With its record alone, a new optimizer trains, and its bill is exact; without a slot, the bill is wrong."""
    slots = () if forgotten else (Slot("v, mean square", lambda spec: spec.shape),)
    rule = lambda config, specs: optax.scale_by_rms(config.b2, config.eps)  # noqa: E731
    name = f"rmsprop, {len(slots)} slots"  # sizes are cached by name
    monkeypatch.setitem(OPTIMIZER_RECORDS, name, Optimizer(rule, slots))
    config = run(optimizer_name=name, mesh_data=4, mesh_zero=2)
    with pytest.raises(AssertionError) if forgotten else contextlib.nullcontext():
        assert_exact(BASE, config)


def test_a_stage_that_does_not_split_is_caught(fresh_layouts, monkeypatch):
    config = run(mesh_data=4, mesh_zero=3)
    kept = dataclasses.replace(config.mesh, zero=0)
    whole = mesh.placements
    monkeypatch.setattr(run_lib.mesh_lib, "placements", lambda specs, _, kind, mixed: whole(specs, kept, kind, mixed))
    broken = training(BASE, config, "fp32")
    monkeypatch.undo()
    assert {fault.partition(":")[0] for fault in of_state(broken, BASE, config).faults(0.5)} >= {"weights", "optimizer"}


# Peaks on this machine's CPU: arguments + outputs − aliases + temporaries. Model, run, and the bounds of the formula's
# error (see `peaks`). A CPU that has AVX2 alone has the same peaks.
DEEP = dataclasses.replace(BASE, layers=6)
NEWER = jax.__version_info__ >= (0, 12)
CELLS = {
    "plain": (BASE, run(), (-2, 2)),
    "experts": (EXPERTS, run(), (-4, 2)),
    "gpt": (GPT, run(train_batch_size=8, train_accumulate=2), (-2, 3)),
    "gemma": (GEMMA, run(), (-5, 2)),
    "vocabulary": (dataclasses.replace(BASE, vocab_size=32000, layers=2), run(train_loss_chunk=128), (-2, 2)),
    "remat": (
        dataclasses.replace(DEEP, pattern=("sliding", "full"), window=32),
        run(remat_policy="full", data_sequence_length=256),
        (-3, 2) if NEWER else (-2, 6),
    ),
    "full": (DEEP, run(remat_policy="full", data_sequence_length=256), (-2, 2)),
    "dots": (DEEP, run(remat_policy="dots", data_sequence_length=256), (-1, 8)),
    "sqrt": (dataclasses.replace(BASE, layers=9), run(remat_policy="sqrt", data_sequence_length=256), (-2, 2)),
    "chunked": (DEEP, run(remat_policy="full", data_sequence_length=512, train_attention_chunk=64), (-2, 6)),
    "bf16": (BASE, run(precision_policy="bf16"), (-8, 2) if NEWER else (-2, 2)),
    "muon": (WIDE, run(optimizer_name="muon", train_batch_size=1, data_sequence_length=32), (-2, 2)),
    "zero 1": (BASE, run(mesh_data=4, mesh_zero=1, train_batch_size=16), (-2, 2)),
    "zero 2": (WIDE, run(mesh_data=4, mesh_zero=2, train_batch_size=8), (-4, 2)),
    "zero 3": (WIDE, run(mesh_data=4, mesh_zero=3, train_batch_size=8), (-2, 6)),
    "tensor": (WIDE, run(mesh_data=2, mesh_tensor=2, mesh_zero=3, train_batch_size=8), (-2, 2)),
}


@pytest.mark.parametrize("cell", CELLS)
def test_training_peak_is_near_xlas(cell):
    model, config, allowed = CELLS[cell]
    step_spec = programs.make_step_spec(config, model, "cpu")
    program = programs.train_step(config, step_spec, mesh.make_mesh(config.mesh))
    figures = inspection.figures(program.compile())
    ledger = training(model, config, config.precision.policy)
    peaks.assert_near(ledger, ledger.peak_phase, figures["peak"], allowed)
    batch = next(row.bytes_per_device for row in ledger.rows if row.kind == "batch")
    assert figures["arguments"] == ledger.persistent_bytes + batch


def test_data_parallelism_divides_the_batch_and_nothing_else():
    one = training(BASE, run(train_batch_size=8), "fp32")
    four = training(BASE, run(train_batch_size=8, mesh_data=4), "fp32")
    quarter = training(BASE, run(train_batch_size=2), "fp32")
    assert four.count == 4
    assert four.persistent_bytes == one.persistent_bytes
    alike = [[row for row in ledger.rows if row.phase in (PERSISTENT, BOUNDARY)] for ledger in (four, quarter)]
    assert alike[0] == alike[1]


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (BASE, {"optimizer_offload": "all"}),
        (BASE, {"optimizer_offload": "all", "precision_policy": "bf16_pure"}),
        (BASE, {"optimizer_offload": "moments", "optimizer_name": "muon"}),
        (BASE, {"optimizer_offload": "all", "optimizer_name": "adafactor", "precision_policy": "bf16"}),
        (ODD, {"optimizer_name": "adafactor", "mesh_tensor": 2}),
        (ODD, {"optimizer_name": "muon", "mesh_data": 8, "mesh_zero": 1, "train_batch_size": 8}),
    ],
)
def test_what_the_trainer_refuses_has_no_bill(model, fields):
    """The ledger and the trainer raise the same message."""
    config = run(**fields)
    with pytest.raises(UserError) as by_the_trainer:
        trace.abstract_state(config, model, "cpu")
    with pytest.raises(UserError) as by_the_ledger:
        training(model, config, config.precision.policy)
    assert str(by_the_ledger.value) == str(by_the_trainer.value)
    config.optimizer.name, config.optimizer.offload = "adamw", "none"
    assert training(model, config, config.precision.policy).persistent_bytes


@pytest.mark.parametrize("name", ["adafactor", "muon", "lion"])
def test_the_state_is_the_programs_arguments_and_all_of_it_is_taken_over(name):
    """All of the state is donated, even arrays that no update reads: Adafactor's moments of factored parameters."""
    config = run(optimizer_name=name)
    program = programs.train_step(config, programs.make_step_spec(config, BASE, "cpu"), mesh.make_mesh(config.mesh))
    figures, ledger = inspection.figures(program.compile()), training(BASE, config, "fp32")
    batch = next(row.bytes_per_device for row in ledger.rows if row.kind == "batch")
    assert figures["arguments"] == ledger.persistent_bytes + batch
    assert figures["aliases"] == ledger.persistent_bytes
