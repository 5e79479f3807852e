"""Remedies: the cheapest single change that fits, as overrides that a run accepts, or none; messages on OOM."""

import dataclasses

import jax
import pytest

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.config.overrides import check_types
from jaxllm.errors import RunError
from jaxllm.hardware import detect
from jaxllm.ledger.advice import out_of_memory
from jaxllm.ledger.advice.remedies import largest_fitting, training_remedy
from jaxllm.ledger.formula import training_memory
from jaxllm.ledger.rows import BACKWARD, PERSISTENT, Ledger, Row, Unknown
from jaxllm.ledger.runtime.sampling import SamplingBill
from jaxllm.step.precision import policy_for

H100, GB = detect.by_name("h100"), 10**9
TPU_REFUSAL = (
    "INTERNAL: x: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 21.50G of 15.75G hbm. Exceeded hbm capacity by 5.75G.\n\nTotal hbm usage >= 22.0G:"
)


def llama(**fields) -> Config:
    config = Config()
    config.model.name, config.data.sequence_length, config.train.batch_size = "llama3.2-1b", 2048, 8
    config.attention.implementation = "xla"
    for name, value in fields.items():
        section, field = name.split("_", 1)
        setattr(getattr(config, section), field, value)
    return config


def with_overrides(config: Config, flags: str) -> Config:
    """Sets flags as `--config.a.b=value` does."""
    for override in flags.split():
        path, value = override.removeprefix("--config.").split("=")
        section, field = path.split(".")
        old = getattr(getattr(config, section), field)
        setattr(getattr(config, section), field, type(old)(value))
    check_types(config)
    return config


def peak(config: Config, device=H100) -> int:
    policy = policy_for(config.precision.policy, device.platform).name
    return training_memory.training(architectures.resolve_config(config), config, policy, device.platform).peak_bytes


@pytest.mark.parametrize("share", [0.98, 0.8, 0.6, 0.4, 0.25])
def test_what_is_advised_fits_and_its_peak_is_the_formula_s(share):
    config = llama()
    available = int(share * peak(config))
    found = training_remedy(config, architectures.resolve_config(config), H100, available)
    assert found.peak_bytes <= available
    assert 1 <= len(found.flags.split()) <= 2
    assert peak(with_overrides(llama(), found.flags)) == found.peak_bytes
    assert config == llama(), "the run's own configuration is left alone"


def test_the_cheaper_change_comes_first():
    """A small excess costs a loop over chunks; a large one costs recomputation, at the same global batch."""
    config, model = llama(), architectures.resolve_config(llama())
    little = training_remedy(config, model, H100, peak(config) - 1)
    much = training_remedy(config, model, H100, int(0.25 * peak(config)))
    assert "chunk" in little.flags.split()[0]
    assert len(little.flags.split()) == 1
    assert "accumulate" in much.flags or "remat" in much.flags
    assert "batch_size" not in much.flags


def test_kernels_have_no_scores_to_cut():
    """A run with kernels needs less, and no remedy is a chunk of attention: it has no scores."""
    config, model = llama(attention_implementation="auto"), architectures.resolve_config(llama())
    assert peak(config) < 0.8 * peak(llama())
    for share in (0.98, 0.8, 0.6, 0.4):
        found = training_remedy(config, model, H100, int(share * peak(config)))
        assert found.peak_bytes <= share * peak(config)
        assert "attention_chunk" not in found.flags
    assert "attention_chunk" in training_remedy(llama(), model, H100, int(0.55 * peak(llama()))).flags


def test_zero_is_advised_only_where_there_is_something_to_shard_over():
    def tiny(**fields):
        return llama(data_sequence_length=128, train_batch_size=8, remat_policy="full", **fields)

    model = architectures.resolve_config(tiny())
    sharded = training_remedy(tiny(mesh_data=8), model, H100, int(0.5 * peak(tiny(mesh_data=8))))
    assert "--config.mesh.zero=" in sharded.flags
    alone = training_remedy(tiny(), model, H100, int(0.5 * peak(tiny())))
    assert "mesh" not in alone.flags


def test_none_where_nothing_helps():
    assert training_remedy(llama(), architectures.resolve_config(llama()), H100, 2**20) is None


def test_offloading_is_no_help_on_a_cpu():
    host = dataclasses.replace(detect.by_name("h100"), platform="cpu")
    config = llama(data_sequence_length=128, train_batch_size=1, remat_policy="full", optimizer_moment_dtype="bfloat16")
    assert training_remedy(config, architectures.resolve_config(config), host, int(0.6 * peak(config, host))) is None
    on_gpu = training_remedy(config, architectures.resolve_config(config), H100, int(0.6 * peak(config)))
    assert "offload" in on_gpu.flags


ROWS = (
    Row("weights", "weights", PERSISTENT, 400, ""),
    Row("gradients", "gradients", BACKWARD, 3000, ""),
    Row("logits", "logits and loss", BACKWARD, 50, ""),
)
LEDGER = Ledger("train", "tiny", 100, "a device", 1, ROWS, 1000)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes."), True),
        (jax.errors.JaxRuntimeError(TPU_REFUSAL), True),
        (jax.errors.JaxRuntimeError("INTERNAL: YNNPACK operation failed: error"), True),
        (MemoryError(), True),
        (jax.errors.JaxRuntimeError("INTERNAL: a bug"), False),
        (ValueError("Out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, is_one):
    assert out_of_memory.is_oom(error) == is_one
    with pytest.raises(RunError if is_one else type(error)), out_of_memory.explained(lambda found: f"explains {found}"):
        raise error


def test_the_message_has_the_bill_and_not_only_the_last_straw():  # metatensor/metatrain#748, jax#13428
    text = out_of_memory.message("in step 3", jax.errors.JaxRuntimeError(TPU_REFUSAL), LEDGER, 15 * GB, "the change")
    lines = text.splitlines()
    assert lines[0].startswith("out of memory in step 3: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error.")
    assert "predicted peak: 3.37 KiB on one device (mid-backward); 1,000 B is available" in text
    assert "peak reported by the compiler: 21.50 GiB" in text
    assert "largest rows: gradients 2.93 KiB, weights 400 B, logits 50 B" in text
    assert "used by others on the device: 13.97 GiB" in text
    assert lines[-1].strip() == "the change"
    unknown = out_of_memory.message("", MemoryError(), LEDGER, Unknown("nobody says"))
    assert "used by others on the device: unknown (nobody says)" in unknown


def bill(held: int, batch: int = 4, context: int = 8192) -> SamplingBill:
    return SamplingBill(
        "llama3-8b", architectures.ARCHITECTURES["llama3-8b"], batch, context, 128, detect.by_name("rtx4090"), held
    )


def test_memory_held_by_others_counts():  # transformers#16987, accelerate#2910, vllm#783
    """16 GB of weights fit 24 GB with room for a few sequences, but not if other processes use 15 GB."""
    alone, shared = bill(0), bill(15 * GB)
    admission = alone.admission()
    assert admission.fits
    assert admission.margin == admission.available_bytes - admission.required_bytes >= 0
    assert admission.available_bytes == detect.by_name("rtx4090").memory_bytes
    alone.require_fit()
    assert bill(0, admission.largest_batch).admission().fits
    assert not bill(0, admission.largest_batch + 1).admission().fits
    refusal = shared.admission()
    assert (refusal.fits, refusal.available_bytes, refusal.largest_batch) == (
        False,
        admission.available_bytes - 15 * GB,
        0,
    )
    with pytest.raises(Exception, match=r"does not fit.*GiB of 8\.37 GiB.*not one token fits beside the weights"):
        shared.require_fit()
    assert "others hold 13.97 GiB" in shared.summary_lines()[-1]


def test_for_a_context_that_does_not_fit_the_largest_is_reported():  # gemma#715, vllm#40302
    refusal = bill(0, batch=1, context=131_072).admission()
    assert not refusal.fits
    assert 8192 < refusal.largest_context < 131_072
    assert bill(0, 1, refusal.largest_context).admission().fits
    assert not bill(0, 1, refusal.largest_context + 1).admission().fits
    with pytest.raises(Exception, match=f"{refusal.largest_context:,} tokens in each of 1"):
        bill(0, batch=1, context=131_072).require_fit()


@pytest.mark.parametrize("threshold", [0, 1, 2, 3, 17, 1000])
def test_largest(threshold):
    assert largest_fitting(lambda n: n <= threshold) == threshold
    assert largest_fitting(lambda n: n <= threshold, at_most=16) == min(threshold, 16)


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_a_remedy_for_lengths_that_divide_badly_is_a_valid_configuration(share):
    config = llama(data_sequence_length=96, train_batch_size=6, train_attention_chunk=32)
    available = int(share * peak(config))
    found = training_remedy(config, architectures.resolve_config(config), H100, available)
    changed = with_overrides(config, found.flags)
    architectures.resolve_config(changed)  # raises UserError if fields contradict each other
    assert peak(changed) == found.peak_bytes <= available
