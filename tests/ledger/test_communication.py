"""Collectives of a step: the closed form against those in the programs that XLA compiles for eight devices."""

import dataclasses

import models
import pytest

from jaxllm import programs
from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import Architecture, Config
from jaxllm.ledger.compiled import collectives, hlo
from jaxllm.ledger.formula import communication
from jaxllm.model.specs import parameter_count
from jaxllm.parallel import mesh

SIZES = {"vocab_size": 512, "layers": 4, "width": 128, "head_dim": 32, "mlp_width": 384, "context_length": 512}
TIED = dataclasses.replace(models.ROTARY, **SIZES)
UNTIED = dataclasses.replace(TIED, tied_embeddings=False)
LEARNED = dataclasses.replace(models.LEARNED, **SIZES)
POST = dataclasses.replace(models.POST, **SIZES)
EXPERTS = dataclasses.replace(TIED, experts=4, experts_per_token=2, mlp_width=128)
# Norms, losses and counts of tokens are scalars; a step has fewer than this.
FEW = 100


def run(**fields) -> Config:
    config = Config()
    config.train.batch_size, config.data.sequence_length = 16, 64
    config.optimizer.name, config.precision.policy, config.remat.policy = "adamw", "fp32", "full"
    for name, value in fields.items():
        section, _, field = name.partition("_")
        setattr(getattr(config, section), field, value)
    return config


def volumes(found) -> dict[tuple[str, int], int]:
    total: dict[tuple[str, int], int] = {}
    for one in found:
        total[one.op, one.devices] = total.get((one.op, one.devices), 0) + one.volume
    return total


def compiled(model: Architecture, config: Config) -> dict[tuple[str, int], int]:
    step_spec = programs.make_step_spec(config, model, "cpu")
    program = programs.train_step(config, step_spec, mesh.make_mesh(config.mesh))
    return volumes(collectives.collectives(hlo.parse(program.compile().as_text())))


CASES = {
    **{f"stage {stage}": (UNTIED, run(mesh_data=8, mesh_zero=stage)) for stage in range(4)},
    "masters": (UNTIED, run(mesh_data=8, mesh_zero=1, precision_policy="bf16")),
    "tied": (TIED, run(mesh_data=8, mesh_zero=3)),
    "micro-batches, 2": (TIED, run(mesh_data=8, mesh_zero=2, train_accumulate=2)),
    "micro-batches, 3": (TIED, run(mesh_data=8, mesh_zero=3, train_accumulate=2)),
    "copies of shares": (UNTIED, run(mesh_replica=2, mesh_data=4, mesh_zero=3)),
    "tensor": (TIED, run(mesh_data=4, mesh_tensor=2, mesh_zero=0)),
    "tensor, dots": (UNTIED, run(mesh_data=4, mesh_tensor=2, mesh_zero=3, remat_policy="dots")),
    "tensor, groups": (UNTIED, run(mesh_data=4, mesh_tensor=2, mesh_zero=3, remat_policy="sqrt")),
    "learned": (LEARNED, run(mesh_data=4, mesh_tensor=2, mesh_zero=3)),
    "norms of projections": (POST, run(mesh_data=4, mesh_tensor=2, mesh_zero=3, remat_policy="sqrt")),
    "experts": (EXPERTS, run(mesh_data=4, mesh_tensor=2, mesh_zero=2, precision_policy="bf16")),
}


@pytest.mark.parametrize("case", CASES)
def test_volume_is_what_xla_moves(case):
    model, config = CASES[case]
    formula = volumes(communication.train_step(model, config, config.precision.policy))
    found = compiled(model, config)
    for key in {*formula, *found}:
        assert formula.get(key, 0) == pytest.approx(found.get(key, 0), rel=1e-3, abs=FEW), key


def test_a_wrong_stage_is_caught():
    model, config = CASES["stage 3"]
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, zero=2))
    formula = volumes(communication.train_step(model, config, "fp32"))
    assert formula["all-gather", 8] < 0.6 * compiled(*CASES["stage 3"])["all-gather", 8]


@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_moves_two_or_three_times_the_parameters(stage, times):  # Rajbhandari et al. 2020, section 7
    model = ARCHITECTURES["llama3-8b"]
    config = run(mesh_data=8, mesh_zero=stage, precision_policy="bf16")
    moved = sum(transfer.volume for transfer in communication.train_step(model, config, "bf16"))
    once = (model.vocab_size * 2 + 1) * model.width if stage == 3 else 0  # all-gathered once, not in each pass
    assert moved == times * parameter_count(model) - once


def test_one_device_sends_nothing():
    assert communication.train_step(TIED, run(), "fp32") == ()


def test_a_ring_sends_all_but_its_own_share():
    (reduced,) = communication.train_step(TIED, run(mesh_data=4), "fp32")
    assert reduced.op == "all-reduce"
    assert reduced.ring_bytes == 2 * parameter_count(TIED) * 4 * 3 / 4
