"""The bill of low-rank adapters: exact state, activations and FLOPs, peaks close to XLA's, and planted faults."""

import dataclasses

import models
import peaks
import pytest
import steps
from test_memory import BASE, GEMMA, WIDE, run

from jaxllm import programs
from jaxllm.config.remat import TAGS
from jaxllm.ledger import trace
from jaxllm.ledger.compiled import hlo, inspection, matmuls
from jaxllm.ledger.formula import communication
from jaxllm.ledger.formula import flops as compute
from jaxllm.ledger.formula.exact import block_graph, value_graph
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.training_memory import training
from jaxllm.ledger.reconcile import reconcile
from jaxllm.parallel import mesh

EVERY = ("q", "k", "v", "out", "gate", "up", "down")
# Targets per model: all that it has, one of attention, one of the MLP.
TARGETS = {
    "rotary": (EVERY, ("q",), ("up",)),
    "learned": (("k", "out", "down"), ("v",)),
    "sliding": (EVERY, ("down",)),
    "experts": (("q", "v", "out"), ("out",)),
    "post": (EVERY, ("q",), ("down",)),
    "longrope": (("q", "gate"),),
}
RUNS = [
    {"remat_policy": "full"},
    {"remat_policy": "sqrt"},
    {"remat_policy": "dots", "train_accumulate": 2, "precision_policy": "fp16"},
    {"remat_policy": "offload:attn_context,lora", "mesh_data": 2, "mesh_zero": 2, "precision_policy": "bf16"},
    {"mesh_data": 2, "mesh_zero": 3, "mesh_tensor": 2, "optimizer_name": "muon"},
    {"precision_policy": "bf16", "optimizer_offload": "all", "mesh_data": 2, "mesh_zero": 1},
    {"precision_policy": "bf16_pure", "optimizer_name": "adafactor", "mesh_replica": 2, "mesh_data": 2, "mesh_zero": 3},
]


def faults(model, config):
    """Returns the lines of the formula that differ from the trace by a byte or more."""
    policy = config.precision.policy
    found = reconcile(training(model, config, policy), trace_figures=trace.figures(config, model, "cpu"))
    return found.faults(0.0)


def config(targets, **fields):
    return steps.config(lora_rank=3, lora_targets=targets, **fields)


@pytest.mark.parametrize("name", TARGETS)
def test_state_and_activations_are_exact(name):
    for targets in TARGETS[name]:
        assert faults(models.ALL[name], config(targets)) == [], targets


@pytest.mark.parametrize("fields", RUNS, ids=str)
def test_they_are_under_every_policy_and_on_meshes(fields):
    odd = dataclasses.replace(models.ROTARY, vocab_size=61)  # its vocabulary is padded on meshes
    if fields.get("optimizer_name") in ("muon", "adafactor"):
        odd = models.ROTARY
    assert faults(odd, config(EVERY, **fields)) == []
    made = config(("q", "down"), **fields)
    assert faults(dataclasses.replace(models.POST, layers=3), made) == []


def test_a_bill_that_is_wrong_is_caught(monkeypatch):
    """Planted faults: the inputs of frozen matmuls are billed, or the activations between A and B are not."""
    monkeypatch.setattr(block_graph, "_FOR_WEIGHTS", ("attn_inputs", "attn_context", "mlp_inputs"))
    block_graph._block.cache_clear()
    (fault,) = faults(models.ROTARY, config(("q",)))
    assert fault.startswith("activations: formula")
    monkeypatch.undo()
    monkeypatch.setattr(value_graph, "TAGS", tuple(tag for tag in TAGS if tag != "lora"))
    block_graph._block.cache_clear()
    assert faults(models.ROTARY, config(("q",))) != []
    monkeypatch.undo()
    block_graph._block.cache_clear()
    assert faults(models.ROTARY, config(("q",))) == []


# Model, targets, fields, and the bounds of the peak's error (see `peaks`).
CELLS = {
    "wide": (WIDE, EVERY, {}, (-2, 2)),
    "full": (BASE, ("q", "v"), {"remat_policy": "full"}, (-2, 4)),
    "sliding, 16 bit": (GEMMA, ("q", "v"), {"precision_policy": "bf16"}, (-4, 2)),
    "shares": (WIDE, EVERY, {"mesh_data": 4, "mesh_zero": 3, "train_batch_size": 16}, (-2, 2)),
}


@pytest.mark.parametrize("name", CELLS)
def test_arguments_and_flops_are_the_program_s_and_the_peak_is_near(name):
    model, targets, fields, allowed = CELLS[name]
    made = run(lora_rank=8, lora_targets=targets, **fields)
    policy = made.precision.policy
    program = programs.train_step(
        made, programs.make_step_spec(made, model, "cpu"), mesh.make_mesh(made.mesh)
    ).compile()
    found, bill = inspection.figures(program), training(model, made, policy)
    batch = next(row.bytes_per_device for row in bill.rows if row.name == "batch")
    assert found["arguments"] == bill.persistent_bytes + batch
    multiplied = matmuls.count_matmuls(hlo.parse(program.as_text()))
    assert multiplied.flops == compute.train_step(model, made, policy, "cpu").flops
    peaks.assert_near(bill, bill.peak_phase, found["peak"], allowed)
    plain = dataclasses.replace(made, lora=dataclasses.replace(made.lora, rank=0))
    assert multiplied.flops < 0.8 * compute.train_step(model, plain, policy, "cpu").flops
    assert bill.peak_bytes < training(model, plain, policy).peak_bytes


def test_only_adapters_are_exchanged():
    """Stage 3 all-gathers frozen weights twice, and reduce-scatters gradients of adapters alone."""
    made = run(lora_rank=8, mesh_data=4, mesh_zero=3, train_batch_size=16)
    layout = run_lib.make(BASE, made, "fp32", "cpu").layout
    sent = {transfer.name: transfer for transfer in communication.train_step(BASE, made, "fp32")}
    numbers = sum(p.spec.size for p in layout.trained)
    assert sent["gradients"].elements == numbers
    assert sent["weights: layers, in each pass"].elements == 2 * sum(p.spec.size for p in layout.select(("layers",)))
    assert {p.name for p in layout.trained} == {f"layers.0.attn.{target}.{half}" for target in "qv" for half in "ab"}
    flops = compute.model_flops_per_token(BASE, 128, run_lib.lora_of(made))
    assert flops < compute.train_step(BASE, made, "fp32", "cpu").flops * 4 / (16 * 128)
