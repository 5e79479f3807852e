"""The closed forms against programs compiled for absent GPUs: FLOPs exact, peaks within 4 per cent."""

import absent_programs
import peaks
import pytest

from jaxllm import architectures
from jaxllm.ledger.formula import flops, training_memory

# Runs, and the bounds of the peak's error (see `peaks`). Stage 0 does not fit: XLA would rematerialize more than the
# policy states.
CASES = {
    "stage 1": (absent_programs.llama3_8b(mesh_zero=1, train_attention_chunk=512), (-2, 3)),
    "stage 2": (absent_programs.llama3_8b(mesh_zero=2, train_attention_chunk=512), (-2, 3)),
    "stage 3": (absent_programs.llama3_8b(mesh_zero=3, train_attention_chunk=512), (-4, 2)),
    "tensor": (absent_programs.llama3_8b(mesh_data=2, mesh_tensor=4, mesh_zero=3, train_attention_chunk=512), (-2, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_peak_and_work_of_a_training_step(case):
    config, allowed = CASES[case]
    config.precision.policy = "bf16"
    found = absent_programs.train_step(config, "h200")
    model = architectures.resolve_config(config)
    ledger = training_memory.training(model, config, "bf16", "gpu")
    peaks.assert_near(ledger, ledger.peak_phase, found.figures["peak"], allowed)
    assert flops.train_step(model, config, "bf16", "gpu").flops == found.matmul_counts.flops
