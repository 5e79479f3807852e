"""Least times: each resource by hand, which one binds, and what is unknown."""

import dataclasses
import json
import math

import calls
import models
import pytest

from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import Config
from jaxllm.hardware.detect import Device, by_name
from jaxllm.ledger.formula import communication, flops, roofline
from jaxllm.ledger.formula.communication import Transfer
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.rows import Unknown
from jaxllm.model.specs import parameter_count

H100 = by_name("h100")


def training_run(name="llama3-8b", batch=8, length=8192, policy="bf16", **fields):
    """Returns a run as the ledger's formulas take it; `fields` are `section_field=value`."""
    config = Config()
    config.train.batch_size, config.data.sequence_length = batch, length
    for field, value in fields.items():
        section, attribute = field.split("_", 1)
        setattr(getattr(config, section), attribute, value)
    return run_lib.make(ARCHITECTURES[name], config, policy, "gpu")


def test_decode_is_bound_by_bandwidth():
    """Checks tokens/s ≤ bandwidth / (weight bytes + KV bytes)."""
    model = ARCHITECTURES["llama3-8b"]
    least = roofline.decode_token(model, 1, 8192, "bf16", "bf16", H100, "bfloat16")
    weights = 2 * (parameter_count(model) - model.vocab_size * model.width + model.width)
    assert least.bound == "bandwidth"
    assert 1 / least.seconds == pytest.approx(3350e9 / (weights + 2**30))


def test_a_large_batch_is_bound_by_compute():
    """The intensity of the head and matrices grows with the batch; that of the cache does not."""
    model = ARCHITECTURES["llama3-8b"]
    assert roofline.decode_token(model, 4096, 16, "bf16", "bf16", H100, "bfloat16").bound == "compute"
    assert roofline.prefill(model, 1, 8192, "bf16", "bf16", H100, "bfloat16").bound == "compute"
    assert roofline.prefill(model, 1, 8, "bf16", "bf16", H100, "bfloat16").bound == "bandwidth"


def test_training_on_one_device_is_bound_by_compute():
    run = training_run(length=2048, remat_policy="full")
    least, work = roofline.train_step(run, H100), flops.step(run)
    assert least.bound == "compute"
    assert set(least.seconds_of) == {"compute", "bandwidth"}
    assert least.seconds == work.flops / 989.4e12
    assert least.seconds_of["bandwidth"] == work.bytes / 3350e9


def test_whole_scores_of_long_sequences_are_bound_by_bandwidth():
    """Scores are written and read in float32; their bytes grow with their matmuls' FLOPs, unlike other bytes."""
    long = {"batch": 1, "length": 16384, "remat_policy": "full"}
    whole, by_kernels = (
        roofline.train_step(training_run(**long, attention_implementation=name), H100) for name in ("xla", "pallas")
    )
    assert whole.bound == "bandwidth"
    # Kernels keep no scores in memory, and skip the half of the pairs that a causal mask hides.
    assert by_kernels.bound == "compute"
    assert by_kernels.seconds < 0.5 * whole.seconds


def test_the_peak_is_of_the_dtype_that_multiplies():
    """JAX multiplies float32 as TensorFloat-32 by default."""
    assert roofline.train_step(training_run(policy="fp32"), H100).seconds_of["compute"] == pytest.approx(
        2 * roofline.train_step(training_run(policy="fp16"), H100).seconds_of["compute"]
    )
    assert isinstance(roofline.train_step(training_run(policy="bf16"), by_name("v100-32gb")).seconds, Unknown)


def test_data_parallelism_within_a_host_and_beyond():
    """Gradients of 2 B in a ring: 2 · (n − 1)/n · 2 B per parameter; beyond the host over eight network cards."""
    count = parameter_count(ARCHITECTURES["llama3-8b"])
    for devices, rate in ((8, 450e9), (64, 400e9)):
        least = roofline.train_step(training_run(batch=devices, mesh_data=devices, mesh_zero=0), H100)
        sent = 2 * (devices - 1) / devices * 2 * count
        assert least.seconds_of["interconnect"] == pytest.approx(sent / rate, rel=1e-6)


def test_tensor_parallelism_is_innermost():
    """Tensor rings are within a host; the `data` rings beside them have a card or two each."""
    mesh = {"replica": 1, "data": 16, "tensor": 4}

    def rate(*axes):
        devices = math.prod(mesh[axis] for axis in axes)
        return roofline.ring_rate(Transfer("", "all-reduce", axes, devices, 1, 1), mesh, H100)

    assert rate("tensor") == 450e9
    assert rate("data") == 2 * 50e9
    assert rate("data", "tensor") == 8 * 50e9
    mesh["tensor"], mesh["data"] = 8, 8
    assert (rate("tensor"), rate("data")) == (450e9, 50e9)
    mesh["tensor"], mesh["data"] = 16, 4
    assert (rate("tensor"), rate("data")) == (400e9, 50e9)
    # A ring that cannot fill hosts evenly is as slow as one with a single device per host.
    mesh["tensor"], mesh["data"] = 3, 8
    assert rate("tensor") == 50e9


def test_few_devices_are_one_island_whatever_their_number():
    mesh = {"replica": 1, "data": 3, "tensor": 2}
    for axes, devices in ((("data",), 3), (("tensor",), 2), (("data", "tensor"), 6)):
        assert roofline.ring_rate(Transfer("", "all-gather", axes, devices, 1, 1), mesh, H100) == 450e9


def test_a_rack_and_a_slice_are_islands():
    mesh = {"replica": 1, "data": 64, "tensor": 1}
    transfer = Transfer("", "all-gather", ("data",), 64, 1, 1)
    assert roofline.ring_rate(transfer, mesh, by_name("gb200")) == 900e9
    assert roofline.ring_rate(transfer, mesh, by_name("v5e")) == 200e9
    assert roofline.ring_rate(transfer, mesh, by_name("rtx4090")) is None


def test_transfers_are_those_of_communication():
    run = training_run(batch=16, mesh_data=4, mesh_tensor=4, mesh_zero=3, remat_policy="full")
    expected = sum(t.ring_bytes / roofline.ring_rate(t, run.mesh, H100) for t in communication.transfers(run))
    assert roofline.train_step(run, H100).seconds_of["interconnect"] == pytest.approx(expected)
    assert expected > 0


def test_moments_in_host_memory_pass_its_link_both_ways_at_once():
    run = training_run(length=512, optimizer_name="adam", optimizer_offload="moments")
    least = roofline.train_step(run, H100)
    moments = 8 * parameter_count(ARCHITECTURES["llama3-8b"])
    assert least.seconds_of["host link"] == moments / 63e9
    assert least.bound == "host link"
    everything = roofline.train_step(training_run(length=512, optimizer_name="adam", optimizer_offload="all"), H100)
    assert everything.seconds_of["host link"] == 1.5 * least.seconds_of["host link"]


def test_offloaded_activations_pass_it_in_each_micro_batch():
    tokens, model = 8 * 8192, ARCHITECTURES["llama3-8b"]
    least = roofline.train_step(training_run(remat_policy="offload:attn_out,resid_mid"), H100)
    assert least.seconds_of["host link"] == model.layers * tokens * model.width * 2 / 63e9
    halves = roofline.train_step(training_run(remat_policy="offload:attn_out,resid_mid", train_accumulate=2), H100)
    assert halves.seconds_of["host link"] == least.seconds_of["host link"]


def test_a_cpu_has_no_link_to_its_own_memory():
    host = Device("host", 2**34, 1e10, {"float32": 1e11}, "made up")
    least = roofline.train_step(training_run(policy="fp32", optimizer_offload="moments"), host)
    assert set(least.seconds_of) == {"compute", "bandwidth"}
    assert not least.unknown


@pytest.mark.parametrize(
    ("missing", "reported"),
    [
        ({"peak_flops": {}}, "peak bfloat16 FLOP/s"),
        ({"bandwidth": None}, "memory bandwidth"),
        ({"interconnect": None}, "between devices"),
        ({"network": None}, "between hosts"),
        ({"host_link": None}, "and its host"),
    ],
)
def test_what_is_not_known_is_named_and_never_zero(missing, reported):
    run = training_run(batch=16, mesh_data=16, optimizer_offload="moments")
    assert not roofline.train_step(run, H100).unknown
    least = roofline.train_step(run, dataclasses.replace(H100, **missing))
    assert isinstance(least.seconds, Unknown)
    assert isinstance(least.bound, Unknown)
    assert reported in least.unknown
    assert 0 not in least.seconds_of.values()
    assert json.loads(json.dumps(least.to_json()))["roofline_seconds"] == {"unknown": least.unknown}


def test_a_rate_that_is_not_needed_need_not_be_known():
    device = dataclasses.replace(H100, interconnect=None, network=None, host_link=None)
    assert roofline.train_step(training_run(), device).seconds == roofline.train_step(training_run(), H100).seconds


def test_json_has_the_parts_and_their_sums():
    reported = json.loads(json.dumps(roofline.train_step(training_run(mesh_data=8, mesh_zero=3), H100).to_json()))
    assert reported["flops"] == sum(reported["flops_of"].values())
    assert reported["bytes"] == sum(reported["bytes_of"].values())
    assert reported["intensity"] == reported["flops"] / reported["bytes"]
    assert (
        reported["roofline_seconds"]
        == max(reported["seconds_of"].values())
        == reported["seconds_of"][reported["bound"]]
    )
    assert "executed" in reported["flops_convention"]


@pytest.mark.parametrize("name", ["h100", "v5e", "rtx4090"])
def test_the_fraction_of_the_peak_is_at_most_one(name):
    """Model FLOPs over the least time never exceed the peak, for any run."""
    device = by_name(name)
    for remat in ("none", "full"):
        for devices in (1, 8):
            run = training_run("gemma3-27b", batch=8, length=16384, remat_policy=remat, mesh_data=devices)
            per_token = flops.model_flops_per_token(run.model, run.length)
            rate = per_token * run.step_tokens / roofline.train_step(run, device).seconds
            assert 0 < rate / device.peak("bfloat16") <= 1


def test_small_models_too():
    for model in models.ALL.values():
        config = Config()
        config.train.batch_size, config.data.sequence_length = 2, 16
        made = run_lib.make(model, config, "fp32", "gpu")
        assert roofline.train_step(made, H100).bound == "bandwidth"


def test_a_planner_can_ask_ten_thousand_times():
    run = training_run("llama3-70b", batch=64, mesh_data=8, mesh_tensor=8, mesh_zero=3, remat_policy="full")

    roofline.train_step(run, H100)
    # 504 calls on Python 3.11: under a millisecond on any machine (experiments/planner_speed.py measures it).
    assert calls.count(lambda: roofline.train_step(run, H100)) < 2_000
