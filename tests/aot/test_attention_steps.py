"""A training step with attention in kernels: the kernels are in the program, and no array has an element per pair."""

import collections
import math
import re

import absent_programs
import peaks
import pytest

from jaxllm import architectures
from jaxllm.ledger.formula import training_memory

LENGTH = 1024
KERNELS = ["flash_attention", "flash_attention_dkv", "flash_attention_dq"]


def run(remat, implementation="auto", length=LENGTH, sequences=1):
    """Returns a run of a model of the quickstart's size on one device."""
    config = absent_programs.quickstart(
        data_sequence_length=length, mesh_data=1, train_batch_size=sequences, precision_policy="bf16"
    )
    config.model.context_length, config.attention.implementation = LENGTH, implementation
    config.remat.policy = remat
    return config


def kernels(text):
    """Returns the number of calls of each kernel, by name."""
    calls = [line for line in text.splitlines() if "custom-call(" in line]
    targets = (line.partition("custom_call_target")[2] for line in calls)
    names = (re.search(r"\b(flash_attention(?:_dq|_dkv)?)\b(?!\.py)", text) for text in targets)
    return collections.Counter(name[1] for name in names if name)


def pair_shapes(text):
    """Returns shapes with an element per (query, key) pair: two dimensions of the length, or one with both."""
    shapes = {match[1] for match in re.finditer(r"\b(?:f32|bf16|s32|pred)\[([\d,]+)\]", text)}
    dimensions = [[int(size) for size in shape.split(",")] for shape in shapes]
    return [shape for shape in dimensions if shape.count(LENGTH) > 1 or math.prod(shape) % LENGTH**2 == 0]


@pytest.mark.parametrize(
    ("device", "remat", "forward"),
    [
        ("h100", "none", 1),
        ("h100", "full", 2),
        ("h100", "names:attn_context", 2),
        ("h100", "names:attn_context,attn_lse", 1),
        ("v5e", "none", 1),
    ],
)
def test_kernels_run_and_no_array_has_an_element_per_pair(device, remat, forward):
    """The forward kernel runs again in the backward pass unless the policy saves both of its results."""
    found = absent_programs.train_step(run(remat), device, quick=True)
    assert kernels(found.text) == dict(zip(KERNELS, (forward, 1, 1), strict=True))
    assert not pair_shapes(found.text)


def test_plain_attention_has_such_arrays_and_no_kernel():
    found = absent_programs.train_step(run("full", "xla"), "h100")
    assert not kernels(found.text)
    assert pair_shapes(found.text)


def test_kernels_run_on_shards_of_heads_and_rows():
    """Inside `shard_map` the kernels run on shards: eight devices, two per sequence for its heads."""
    config = absent_programs.quickstart(
        mesh_data=4, mesh_tensor=2, mesh_zero=3, precision_policy="bf16", remat_policy="full"
    )
    found = absent_programs.train_step(config, "h100")
    # XLA unrolls two iterations of a loop where it prefetches the next weights.
    made = kernels(found.text)
    assert set(made) == set(KERNELS)
    assert made["flash_attention"] > made["flash_attention_dq"] == made["flash_attention_dkv"]


def test_memory_grows_with_the_length_alone():
    """Twice the length with half the sequences takes the same memory with kernels, and more with scores."""
    found_peaks = {}
    for implementation in ("auto", "xla"):
        for length, sequences in ((LENGTH // 2, 2), (LENGTH, 1)):
            config = run("full", implementation, length, sequences)
            peak = absent_programs.train_step(config, "h100").figures["peak"]
            ledger = training_memory.training(architectures.resolve_config(config), config, "bf16", "gpu")
            peaks.assert_near(ledger, ledger.peak_phase, peak, (-8, 2) if implementation == "auto" else (-2, 4))
            found_peaks[implementation, length] = peak
    assert found_peaks["auto", LENGTH] == pytest.approx(found_peaks["auto", LENGTH // 2], rel=0.02)
    assert found_peaks["xla", LENGTH] > 1.05 * found_peaks["xla", LENGTH // 2]
