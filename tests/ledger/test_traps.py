"""Mistakes that planners are known for, each with its report, and checks that ours would be caught making them.

A figure that a backend omits is unknown and not 0, and a peak is arguments + outputs + temporaries − aliases: small
programs are in test_compiled.py, a training step is here. Two matrices for a gated MLP's three, half of the weights'
bytes, and keys without values are in test_inference.py.
"""

import dataclasses

import jax
import models
import pytest

from jaxllm import programs
from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import Config
from jaxllm.hardware import detect
from jaxllm.ledger import device, trace
from jaxllm.ledger.compiled import inspection
from jaxllm.ledger.formula.exact import layout as layout_lib
from jaxllm.ledger.formula.training_memory import training
from jaxllm.ledger.reconcile import reconcile
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, HOST, PERSISTENT, PHASES, UPDATE, Ledger, Row, Unknown
from jaxllm.model.specs import param_specs, parameter_count
from jaxllm.parallel import mesh

SIZES = {"vocab_size": 512, "layers": 4, "width": 128, "head_dim": 32, "mlp_width": 384, "context_length": 512}
BASE = dataclasses.replace(models.ROTARY, **SIZES)
GPT = dataclasses.replace(models.LEARNED, **SIZES)


def run(**fields) -> Config:
    """Returns a run of 4 sequences of 128 tokens, Adam, float32; `fields` are `section_field=value`."""
    config = Config()
    config.train.batch_size, config.data.sequence_length = 4, 128
    config.optimizer.name, config.precision.policy = "adam", "fp32"
    for name, value in fields.items():
        section, _, field = name.partition("_")
        setattr(getattr(config, section), field, value)
    return config


def by_name(ledger: Ledger) -> dict[tuple[str, str], int]:
    return {(row.name, row.phase): row.bytes_per_device for row in ledger.rows}


def test_a_donated_state_is_one_buffer_and_not_two():  # jax-ml/jax#18954, #31292; AI-Hypercomputer/maxtext#4514
    """Compiles a whole training step with and without donation of its state."""
    config = run()
    step_spec = programs.make_step_spec(config, BASE, "cpu")
    program = programs.train_step(config, step_spec, mesh.make_mesh(config.mesh))
    state = training(BASE, config, "fp32").persistent_bytes
    given = inspection.figures(program.compile())
    with_copies = dataclasses.replace(program, jitted=jax.jit(program.jitted.__wrapped__))
    kept = inspection.figures(with_copies.compile())
    for figures, aliases in ((given, state), (kept, 0)):
        assert figures["aliases"] == aliases
        assert figures["arguments"] == state + 20 * 4 * 128
        wanted = figures["arguments"] + figures["outputs"] + figures["temps"] - figures["aliases"]
        assert figures["peak"] == wanted
    # They differ by less than the state: the outputs written last serve as scratch for gradients until then.
    assert kept["peak"] > given["peak"]


def test_weights_stored_in_16_bit_have_no_copy_in_16_bit():
    pure, mixed = (training(BASE, run(), policy) for policy in ("bf16_pure", "bf16"))
    assert pure.kind_bytes("weights") == 2 * parameter_count(BASE)
    assert mixed.kind_bytes("master weights") == 4 * parameter_count(BASE)
    assert not [name for name, _ in by_name(pure) if "copy" in name]
    assert [name for name, phase in by_name(mixed) if phase == BACKWARD and "copy" in name]


@pytest.mark.parametrize(("vocabulary", "tensor", "added"), [(509, 2, 1), (509, 4, 3), (512, 4, 0)])
def test_padding_of_the_vocabulary_is_a_row(vocabulary, tensor, added):  # jax-ml/jax#26946, #27808
    """Each array with the vocabulary has extra words per device if the vocabulary does not divide."""
    model = dataclasses.replace(BASE, vocab_size=vocabulary, heads=4, kv_heads=4, tied_embeddings=False)
    found = by_name(training(model, run(mesh_tensor=tensor), "fp32"))
    zeros = 2 * added * model.width * 4  # embeddings and head, all devices
    padding = {
        name: size for (name, phase), size in found.items() if name.startswith("padding") and phase == PERSISTENT
    }
    assert set(padding) == ({"padding of weights", "padding of moments"} if added else set())
    assert [tensor * size for size in padding.values()] == pytest.approx([zeros, 2 * zeros][: len(padding)], abs=64)
    if added:
        larger = dataclasses.replace(model, vocab_size=vocabulary + added)
        whole = by_name(training(larger, run(mesh_tensor=tensor), "fp32"))
        assert found["weights", PERSISTENT] + padding["padding of weights"] == whole["weights", PERSISTENT]


def test_accumulation_adds_one_buffer():  # google-deepmind/optax#320, #528; AI-Hypercomputer/maxtext#606
    gpt2 = ARCHITECTURES["gpt2"]
    whole, parts = (
        by_name(training(gpt2, run(train_batch_size=4 * micro, train_accumulate=micro), "fp32")) for micro in (1, 4)
    )
    added = {key: size for key, size in parts.items() if key[0] == "accumulated gradients"}
    assert set(added.values()) == {497_759_232}
    assert 497_759_232 == 4 * parameter_count(gpt2) == 4 * 124_439_808
    assert not [key for key in whole if key[0] == "accumulated gradients"]
    # Of the exact rows, only the tokens that wait for their micro-batch change in size.
    kept = [key for key in whole if key[1] in (PERSISTENT, BOUNDARY) and key in parts]
    assert {name for name, phase in kept if parts[name, phase] != whole[name, phase]} == {"batch"}
    assert len(kept) > 8


def test_adam_costs_twelve_persistent_bytes():  # the same reports: 12 or 20?
    llama = training(ARCHITECTURES["llama2-7b"], run(), "fp32")
    assert llama.parameters == 6_738_415_616
    assert round(llama.persistent_bytes / 1e9, 2) == 80.86
    gradients = [row for row in llama.rows if row.name == "gradients" and row.phase == UPDATE]
    assert [row.bytes_per_device for row in gradients] == [4 * llama.parameters]
    assert not [row for row in llama.rows if row.kind == "gradients" and row.phase == PERSISTENT]


def test_memory_that_others_hold_is_not_ours():  # huggingface/transformers#16987, accelerate#2910, vllm#783
    """A run of 70 GB fits an empty device of 80 GB, but not with 15 GB in use."""
    h100 = detect.by_name("h100")
    needs = Row("weights", "weights", PERSISTENT, 70 * 10**9, "70 GB")

    def verdict(held: int) -> bool | None:
        return Ledger("train", "x", 1, "H100", 1, (needs,), device.available_to_task(h100, held)).fits

    assert h100.memory_bytes >= 70 * 10**9
    assert verdict(0) is True
    assert verdict(15 * 10**9) is False
    assert device.available_to_task(h100, 0) - device.available_to_task(h100, 15 * 10**9) == 15 * 10**9
    assert device.available_to_task(h100, 10**12) == 0
    nobody_knows = dataclasses.replace(h100, memory_bytes=None)
    assert isinstance(device.available_to_task(nobody_knows, 0), Unknown)


def test_memory_that_others_hold_on_a_gpu_is_what_is_used_beside_our_arrays():
    class Gpu:
        platform, device_kind = "gpu", "a GPU"

        def memory_stats(self):
            return {"bytes_in_use": 15 * 10**9, "bytes_limit": 80 * 10**9}

    assert device.used_by_others(Gpu()) == 15 * 10**9
    assert device.available_bytes(Gpu()) == 65 * 10**9


def test_a_head_left_out_is_caught(fresh_layouts, monkeypatch):
    config = run()
    headless = {name: part for name, part in param_specs(GPT).items() if name != "head"}
    monkeypatch.setattr(layout_lib, "_declared", lambda model, lora: headless)
    untied = dataclasses.replace(GPT, tied_embeddings=True)
    broken = training(untied, config, "fp32")
    result = reconcile(broken, trace_figures=trace.figures(config, GPT, "cpu"))
    assert any(fault.startswith("weights:") for fault in result.faults(0.5))


def test_states_are_never_the_whole_bill():  # deepspeedai/DeepSpeed#5102: 0.49 GB reported, 14.7 GB seen
    """The headline is the peak, which includes activations, logits and the batch."""
    ledger = training(ARCHITECTURES["gpt2"], run(train_batch_size=8, data_sequence_length=1024), "bf16", "gpu")
    kinds = {row.kind for row in ledger.rows if row.phase == ledger.peak_phase}
    assert {"activations", "batch", "gradients"} <= kinds
    assert ledger.to_json()["peak_bytes_per_device"] == ledger.peak_bytes > 2 * ledger.persistent_bytes


def test_offloaded_state_is_not_the_devices():  # DeepSpeed#4527
    config = run(optimizer_offload="all", precision_policy="bf16")
    ledger = training(BASE, config, "bf16")
    assert ledger.host_bytes == 12 * parameter_count(BASE)
    phases = [ledger.phase_bytes(phase) for phase in PHASES if phase not in (PERSISTENT, HOST)]
    assert ledger.peak_bytes == ledger.persistent_bytes + max(phases)
    assert ledger.persistent_bytes < 100  # counters
