"""Remedies: the cheapest single change that fits, as overrides that a run accepts, or none; messages on OOM."""

import dataclasses

import jax
import pytest

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.config.overrides import check_types
from jaxllm.errors import RunError
from jaxllm.hardware import detect
from jaxllm.ledger.advice import admission, out_of_memory
from jaxllm.ledger.advice.remedy import remedy
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


def with_overrides(config: Config, overrides: tuple[str, ...]) -> Config:
    """Sets overrides as `--config.a.b=value` does."""
    for override in overrides:
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
    found = remedy(config, architectures.resolve_config(config), H100, available)
    assert found.peak_bytes <= available
    assert 1 <= len(found.overrides) <= 2
    assert peak(with_overrides(llama(), found.overrides)) == found.peak_bytes
    assert config == llama(), "the run's own configuration is left alone"


def test_the_cheaper_change_comes_first():
    """A small excess costs a loop over chunks; a large one costs recomputation, at the same global batch."""
    config, model = llama(), architectures.resolve_config(llama())
    little = remedy(config, model, H100, peak(config) - 1)
    much = remedy(config, model, H100, int(0.25 * peak(config)))
    assert "chunk" in little.overrides[0]
    assert len(little.overrides) == 1
    assert any("accumulate" in one or "remat" in one for one in much.overrides)
    assert not any("batch_size" in one for one in much.overrides)


def test_kernels_have_no_scores_to_cut():
    """A run with kernels needs less, and no remedy is a chunk of attention: it has no scores."""
    config, model = llama(attention_implementation="auto"), architectures.resolve_config(llama())
    assert peak(config) < 0.8 * peak(llama())
    for share in (0.98, 0.8, 0.6, 0.4):
        found = remedy(config, model, H100, int(share * peak(config)))
        assert found.peak_bytes <= share * peak(config)
        assert not any("attention_chunk" in one for one in found.overrides)
    assert any("attention_chunk" in one for one in remedy(llama(), model, H100, int(0.55 * peak(llama()))).overrides)


def test_zero_is_advised_only_where_there_is_something_to_shard_over():
    def tiny(**fields):
        return llama(data_sequence_length=128, train_batch_size=8, remat_policy="full", **fields)

    model = architectures.resolve_config(tiny())
    sharded = remedy(tiny(mesh_data=8), model, H100, int(0.5 * peak(tiny(mesh_data=8))))
    assert any(one.startswith("--config.mesh.zero=") for one in sharded.overrides)
    alone = remedy(tiny(), model, H100, int(0.5 * peak(tiny())))
    assert not any("mesh" in one for one in alone.overrides)


def test_none_where_nothing_helps():
    assert remedy(llama(), architectures.resolve_config(llama()), H100, 2**20) is None


def test_offloading_is_no_help_on_a_cpu():
    host = dataclasses.replace(detect.by_name("h100"), platform="cpu")
    config = llama(data_sequence_length=128, train_batch_size=1, remat_policy="full", optimizer_moment_dtype="bfloat16")
    found = remedy(config, architectures.resolve_config(config), host, int(0.6 * peak(config, host)))
    assert found is None or not any("offload" in one for one in found.overrides)
    on_gpu = remedy(config, architectures.resolve_config(config), H100, int(0.6 * peak(config)))
    assert any("offload" in one for one in on_gpu.overrides)


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
def test_what_counts_as_a_shortage(error, is_one):
    assert out_of_memory.is_oom(error) == is_one
    with pytest.raises(RunError if is_one else type(error)), out_of_memory.explained(lambda found: f"told of {found}"):
        raise error


def test_the_message_has_the_bill_and_not_only_the_last_straw():  # metatensor/metatrain#748, jax#13428
    text = out_of_memory.message("in step 3", jax.errors.JaxRuntimeError(TPU_REFUSAL), LEDGER, 15 * GB, "the change")
    lines = text.splitlines()
    assert lines[0].startswith("out of memory in step 3: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error.")
    assert "predicted peak: 3.37 KiB on one device (mid-backward); the device has 1,000 B for it" in text
    assert "the compiler's own figure: 21.50 GiB" in text
    assert "largest rows: gradients 2.93 KiB, weights 400 B, logits 50 B" in text
    assert "held by others on the device: 13.97 GiB" in text
    assert lines[-1].strip() == "the change"
    unknown = out_of_memory.message("", MemoryError(), LEDGER, Unknown("nobody says"))
    assert "held by others on the device: unknown (nobody says)" in unknown


def bill(held: int, batch: int = 4, context: int = 8192) -> SamplingBill:
    return SamplingBill(
        "llama3-8b", architectures.ARCHITECTURES["llama3-8b"], batch, context, 128, detect.by_name("rtx4090"), held
    )


def test_memory_held_by_others_counts():  # transformers#16987, accelerate#2910, vllm#783
    """16 GB of weights fit 24 GB with room for a few sequences, but not if other processes use 15 GB."""
    alone, shared = bill(0), bill(15 * GB)
    room = alone.room()
    assert room.fits
    assert room.margin == room.has - room.needs >= 0
    assert room.has == detect.by_name("rtx4090").memory_bytes
    alone.admit()
    assert bill(0, room.largest_batch).room().fits
    assert not bill(0, room.largest_batch + 1).room().fits
    oom_message = shared.room()
    assert (oom_message.fits, oom_message.has, oom_message.largest_batch) == (False, room.has - 15 * GB, 0)
    with pytest.raises(Exception, match=r"does not fit.*GiB of 8\.37 GiB.*not one token fits beside the weights"):
        shared.admit()
    assert "others hold 13.97 GiB" in shared.lines()[-1]


def test_a_context_that_does_not_fit_is_told_the_one_that_does():  # gemma#715, vllm#40302
    oom_message = bill(0, batch=1, context=131_072).room()
    assert not oom_message.fits
    assert 8192 < oom_message.largest_context < 131_072
    assert bill(0, 1, oom_message.largest_context).room().fits
    assert not bill(0, 1, oom_message.largest_context + 1).room().fits
    with pytest.raises(Exception, match=f"{oom_message.largest_context:,} tokens in each of 1"):
        bill(0, batch=1, context=131_072).admit()


@pytest.mark.parametrize("threshold", [0, 1, 2, 3, 17, 1000])
def test_largest(threshold):
    assert admission.largest(lambda n: n <= threshold) == threshold
    assert admission.largest(lambda n: n <= threshold, most=16) == min(threshold, 16)


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_a_remedy_for_lengths_that_divide_badly_is_a_valid_configuration(share):
    config = llama(data_sequence_length=96, train_batch_size=6, train_attention_chunk=32)
    available = int(share * peak(config))
    found = remedy(config, architectures.resolve_config(config), H100, available)
    changed = with_overrides(config, found.overrides)
    architectures.resolve_config(changed)  # raises UserError if fields contradict each other
    assert peak(changed) == found.peak_bytes <= available
