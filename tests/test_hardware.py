"""The table of devices, and what compilers are told of them."""

import re

import pytest

from jaxllm import hardware
from jaxllm.errors import UserError
from jaxllm.hardware import DEVICES, named, published
from jaxllm.targets import GpuTarget, TpuTarget

GPUS = [name for name, (_, device) in DEVICES.items() if device.platform == "gpu"]
KINDS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA B200": "b200",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
}


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_an_attached_device_is_the_one_that_its_name_names(kind, name):
    assert published(kind) is named(name)


def test_every_device_is_told_by_its_own_description():
    """A target's description is the driver's name of that very device."""
    assert set(KINDS.values()) == set(DEVICES)
    for name in GPUS:
        assert published(named(name).compile_target.description) is named(name)


def test_what_nobody_knows():
    assert published("NVIDIA L40S") is None
    assert published("cpu") is None


def test_names():
    assert named("H100") is named("h100")
    assert named("auto") is hardware.this_machine()
    with pytest.raises(UserError, match=r"--device h1000: no such device; did you mean h100\?"):
        named("h1000")
    with pytest.raises(UserError, match=r"did you mean a100-80gb\?"):
        named("a100-80")


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_s_figures_agree_with_each_other(name):
    """The float32 peak is lanes × multiprocessors × clock × 2, but for clocks that differ a little by document."""
    device = named(name)
    target = device.compile_target
    peak = 2 * target.multiprocessors * target.capability.lanes * target.clock_ghz * 1e9
    assert device.peak_flops["float32"] == pytest.approx(peak, rel=0.03)
    assert (target.memory_bytes, target.bandwidth) == (device.memory_bytes, device.bandwidth)


@pytest.mark.parametrize("name", GPUS)
def test_config_text(name):
    target = named(name).compile_target
    text = target.config_text()
    fields = dict(re.findall(r"(\w+): (\S+)", text))
    assert int(fields["core_count"]) == target.multiprocessors
    assert int(fields["device_memory_size"]) == target.memory_bytes
    assert int(fields["memory_bandwidth"]) == target.bandwidth
    assert int(fields["shared_memory_per_block_optin"]) == int(fields["shared_memory_per_core"]) - 1024
    assert f"major: {target.capability.major} minor: {target.capability.minor}" in text
    assert text.count("{") == text.count("}")
    assert target.description in text


def test_gpus_come_eight_to_a_host():
    target = named("h100").compile_target
    assert isinstance(target, GpuTarget)
    shapes = {count: target.topology(count)["topology"] for count in (1, 3, 8, 16, 64)}
    assert shapes == {1: "1x1x1", 3: "1x1x3", 8: "1x1x8", 16: "1x2x8", 64: "1x8x8"}
    with pytest.raises(UserError, match=r"12 GPUs are not whole hosts of 8; the nearest counts are 8 and 16"):
        target.topology(12)


@pytest.mark.parametrize(
    ("name", "count", "topology"),
    [
        ("v5e", 1, "v5e:1x1"),
        ("v5e", 2, "v5e:2x1"),
        ("v5e", 4, "v5e:2x2"),
        ("v5e", 8, "v5e:2x4"),
        ("v5e", 16, "v5e:4x4"),
        ("v5e", 256, "v5e:16x16"),
        ("v6e", 32, "v6e:4x8"),
        ("v4", 4, "v4:2x2x1"),
        ("v4", 8, "v4:2x2x2"),
        ("v5p", 16, "v5p:2x2x4"),
        ("v5p", 32, "v5p:2x4x4"),
        ("v5p", 64, "v5p:4x4x4"),
    ],
)
def test_tpu_slices(name, count, topology):
    target = named(name).compile_target
    assert isinstance(target, TpuTarget)
    assert target.topology(count)["topology_name"] == topology


def test_small_slices_are_less_than_a_host():
    assert named("v5e").compile_target.topology(2)["chips_per_host_bounds"] == [2, 1, 1]
    assert named("v5p").compile_target.topology(1)["chips_per_host_bounds"] == [1, 1, 1]
    assert "chips_per_host_bounds" not in named("v5e").compile_target.topology(8)


@pytest.mark.parametrize(("count", "near"), [(3, "2 and 4"), (12, "8 and 16"), (512, "256")])
def test_no_such_slice(count, near):
    with pytest.raises(UserError, match=rf"slice of {count} chips .* nearest: {near}"):
        named("v5e").compile_target.topology(count)
