"""The closed forms against programs compiled for absent GPUs: FLOPs exact, peaks within a few per cent."""

import absent_programs
import pytest

from jaxllm import architectures
from jaxllm.ledger.formula import flops, training_memory

# Stage 0 does not fit: XLA would rematerialize more than the policy states.
CASES = {
    "stage 1": absent_programs.llama3_8b(mesh_zero=1, train_attention_chunk=512),
    "stage 2": absent_programs.llama3_8b(mesh_zero=2, train_attention_chunk=512),
    "stage 3": absent_programs.llama3_8b(mesh_zero=3, train_attention_chunk=512),
    "tensor": absent_programs.llama3_8b(mesh_data=2, mesh_tensor=4, mesh_zero=3, train_attention_chunk=512),
}


@pytest.mark.parametrize("case", CASES)
def test_peak_and_work_of_a_training_step(case):
    config = CASES[case]
    config.precision.policy = "bf16"
    found = absent_programs.train_step(config, "h200")
    model = architectures.resolve_config(config)
    ledger = training_memory.training(model, config, "bf16", "gpu")
    assert ledger.peak_bytes == pytest.approx(found.figures["peak"], rel=0.05)
    assert flops.train_step(model, config, "bf16", "gpu").flops == found.matmul_counts.flops
