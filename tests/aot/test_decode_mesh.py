"""Tensor-parallel inference compiled for absent devices: state, peak, collectives and bytes moved.

Run by `make test-aot`. Models have a few layers of a published model's size.
"""

import dataclasses

import pytest

from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import Config
from jaxllm.config.inference_mesh import InferenceMesh
from jaxllm.hardware import detect
from jaxllm.ledger import bill
from jaxllm.ledger.compiled import absent, hlo, inspection
from jaxllm.ledger.compiled.inspection import SamplingSpec
from jaxllm.ledger.compiled.traffic import traffic
from jaxllm.ledger.rows import DECODE, PREFILL

LAYERS, BATCH, CONTEXT, CHUNK = 3, 2, 4096, 128
LLAMA = dataclasses.replace(ARCHITECTURES["llama3-70b"], layers=LAYERS)
QWEN = dataclasses.replace(ARCHITECTURES["qwen3-30b-a3b"], layers=LAYERS)


def programs_of(model, device, sizes, cache):
    config = Config()
    config.mesh = sizes.config
    sampling = SamplingSpec(BATCH, CONTEXT, CHUNK, 8, cache, sizes)
    return inspection.task_programs(config, model, device.platform, absent.abstract_mesh(config), sampling)


@pytest.mark.parametrize(
    ("model", "name", "sizes", "cache"),
    [
        (LLAMA, "h100", InferenceMesh(tensor=2), "bf16"),
        (LLAMA, "h100", InferenceMesh(tensor=8), "int8"),
        (QWEN, "h100", InferenceMesh(data=2, tensor=8), "bf16"),  # twice as many devices as key/value heads
        (LLAMA, "v5e", InferenceMesh(tensor=8), "bf16"),
    ],
)
def test_bill_collectives_and_bytes(model, name, sizes, cache):
    device = detect.by_name(name)
    target = absent.require_compiler(name, device.compile_target)
    ledger = bill.sampling("", model, device, BATCH, CONTEXT, CHUNK, cache=cache, mesh=sizes)
    made = programs_of(model, device, sizes, cache)
    for phase, program in made.items() if name == "h100" else [(DECODE, made[DECODE])]:  # a TPU's prefill takes longest
        compiled = None
        if name == "h100":
            compiled = absent.compile_for(program, target, sizes.count)
            found = inspection.inspect(lambda compiled=compiled: compiled)
        else:
            found = absent.inspect_program(program, target, sizes.count)
        arguments = found.figures["peak"] - found.figures["temps"]
        inputs = BATCH // sizes.data * CHUNK * 5 if phase == PREFILL else 4  # tokens and their mask; the limit
        assert 0 <= arguments - inputs - ledger.persistent_bytes < 0.001 * arguments
        assert ledger.persistent_bytes + ledger.phase_bytes(phase) == pytest.approx(found.figures["peak"], rel=0.02)
        runs = {(row["op"], row["dtype"]): row["count"] for row in found.collectives}
        assert runs["all-reduce", "bf16"] == 2 * LAYERS + 1
        assert sum(runs.values()) == 2 * LAYERS + 2, "and the logits once"
        # Sampling, which every device does for the whole vocabulary, outweighs three layers of a sharded expert model.
        if phase == DECODE and compiled is not None and not model.experts:
            moved = traffic(hlo.parse(compiled.as_text()), per_iteration=True)
            assert moved.total < 1.05 * ledger.compute.work.bytes, moved.largest
