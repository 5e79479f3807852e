"""The tables of devices, what compilers receive of them, and the detection of this machine."""

import re

import pytest

from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.hardware import spec as devices
from jaxllm.hardware.compile_targets import VOLTA, GpuTarget, TpuTarget
from jaxllm.hardware.detect import DEVICES, attached, by_name, published
from jaxllm.hardware.spec import GB, GIB, Device

GPUS = [name for name, (_, device) in DEVICES.items() if device.platform == "gpu"]
TPUS = [name for name, (_, device) in DEVICES.items() if device.platform == "tpu"]
KINDS = {
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "Tesla V100-SXM3-32GB": "v100-32gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA H200 141GB HBM3e": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "TPU v7x": "v7x",
}
# Different devices whose names are close to one in the table.
STRANGERS = (
    "NVIDIA GH200 480GB",
    "NVIDIA GH200 120GB",
    "NVIDIA H200 NVL",
    "NVIDIA GB300",
    "NVIDIA B300",
    "NVIDIA L40",
    "NVIDIA L20",
    "NVIDIA A10G",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D",
    "Tesla V100-PCIE-16GB",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    "TPU v3",
    "TPU v4 lite",
    "cpu",
)


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_an_attached_device_is_the_one_that_its_name_names(kind, name):
    assert published(kind) is by_name(name)


@pytest.mark.parametrize("kind", KINDS)
def test_one_pattern_matches_a_device(kind):
    assert sum(re.search(pattern, kind) is not None for pattern, _ in DEVICES.values()) == 1


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_device_that_is_not_in_the_table_is_not_guessed(kind):
    assert published(kind) is None


def test_every_device_is_reported_by_its_own_description():
    """A target's description is the driver's name of the same device."""
    assert set(KINDS.values()) == set(DEVICES)
    for name in GPUS:
        assert published(by_name(name).compile_target.description) is by_name(name)


def test_names():
    assert by_name("H100") is by_name("h100")
    assert by_name("auto") is detect.this_machine()
    with pytest.raises(UserError, match=r"--device h1000: unknown; did you mean h100\?"):
        by_name("h1000")
    with pytest.raises(UserError, match=r"did you mean a100-80gb\?"):
        by_name("a100-80")


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_s_figures_agree_with_each_other(name):
    """The float32 peak is lanes × multiprocessors × clock × 2, up to clocks that differ slightly between documents."""
    device = by_name(name)
    target = device.compile_target
    peak = 2 * target.multiprocessors * target.capability.lanes * target.clock_ghz * 1e9
    assert device.peak_flops["float32"] == pytest.approx(peak, rel=0.03)
    assert (target.memory_bytes, target.bandwidth) == (device.total_bytes, device.bandwidth)


@pytest.mark.parametrize("name", DEVICES)
def test_figures_are_those_of_an_accelerator(name):
    """Ranges that detect a wrong unit, a direction counted twice, or sparsity included."""
    device = by_name(name)
    peaks = device.peak_flops
    assert 10 * GIB < device.memory_bytes < device.total_bytes < 200 * GIB
    assert 300 * GB <= device.bandwidth <= 8000 * GB
    half = peaks.get("bfloat16", peaks.get("float16", 0))
    assert 40 < half / device.bandwidth < 600
    for narrow in ("int8", "float8"):
        if narrow in peaks:
            assert min(abs(peaks[narrow] / half / times - 1) for times in (1, 2, 4)) < 0.03
    assert 15 * GB < device.interconnect <= device.bandwidth
    assert device.host_link is None or 15 * GB < device.host_link <= 450 * GB
    assert device.network is None or 3 * GB < device.network <= 50 * GB
    assert device.link_domain in (8, 72, 256, 4096, 8192)
    assert re.search(r"20\d\d", device.source)


def test_what_data_sheets_promise_is_not_far_from_what_drivers_tell():
    """A data sheet's GB lie between decimal and binary GB, and error correction takes a sixteenth on some devices."""
    promised = {
        "v100-16gb": 16,
        "v100-32gb": 32,
        "a100-40gb": 40,
        "a100-80gb": 80,
        "h100": 80,
        "h100-pcie": 80,
        "h100-nvl": 94,
        "h200": 141,
        "b200": 180,
        "gb200": 186,
        "l4": 24,
        "l40s": 48,
        "rtx3090": 24,
        "rtx4090": 24,
        "rtx5090": 32,
    }
    assert set(promised) == set(GPUS)
    for name, size in promised.items():
        assert 0.91 * size * GIB < by_name(name).total_bytes < size * GIB * 1.001, name


def test_the_driver_keeps_less_for_programs_than_the_card_has():
    """The driver's total on L4 (24 GB by data sheet) and L40S (48 GB) is less than as many decimal GB."""
    assert by_name("l4").total_bytes < 24 * GB
    assert by_name("l40s").total_bytes < 48 * GB


def test_what_the_backend_holds_back():
    for name in GPUS:
        device = by_name(name)
        assert device.memory_bytes == pytest.approx(devices.FRACTION * device.total_bytes, abs=1)
    assert {name: by_name(name).reserved_bytes / GIB for name in TPUS} == pytest.approx(
        {"v4": 1.26, "v5e": 0.26, "v5p": 0.26, "v6e": 0.76, "v7x": 1.26}, abs=1e-6
    )


def test_the_share_of_a_gpu_is_the_environment_s_where_it_says_so(monkeypatch):
    for name in devices.FRACTION_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    devices.set_memory_fraction()
    assert devices.os.environ["XLA_CLIENT_MEM_FRACTION"] == str(devices.FRACTION)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    # JAX rejects both together.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    devices.set_memory_fraction()
    assert "XLA_CLIENT_MEM_FRACTION" not in devices.os.environ
    assert devices.memory_fraction() == 0.5
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "half")
    assert devices.memory_fraction() == devices.FRACTION


def test_float32_products_run_as_jax_s_default_precision_has_them():
    assert by_name("h100").peak("float32") == 494.7e12
    assert by_name("v100-16gb").peak("float32") == 15.7e12
    assert by_name("v5e").peak("float32") == by_name("v5e").peak("bfloat16") == 197e12
    assert by_name("v100-16gb").peak("bfloat16") is None
    assert Device("x", None, None, {"float32": 1.0}, "").peak("float32") == 1.0


def test_cpus_that_jax_pretends_to_have_share_memory():
    host = detect.this_machine()
    assert host.platform == "cpu"
    assert host.memory_of_each(8) == host.memory_bytes // 8
    assert by_name("h100").memory_of_each(8) == by_name("h100").memory_bytes
    assert Device("x", None, None, {}, "").memory_of_each(8) is None


def test_an_attached_gpu_has_what_its_backend_lets_it_have(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    table = by_name("h100")
    limit = int(0.75 * table.total_bytes)
    alone = attached("gpu", "NVIDIA H100 80GB HBM3", {"bytes_limit": limit, "pool_bytes": limit})
    assert (alone.memory_bytes, alone.total_bytes) == (limit, table.total_bytes)
    assert alone.bandwidth == table.bandwidth
    assert attached("gpu", "NVIDIA H100 80GB HBM3", {}) is table


def test_what_other_processes_hold_is_not_there(monkeypatch):
    """A preallocated pool smaller than the limit shows other processes' use; a pool that grows shows nothing."""
    statistics = {"bytes_limit": 80 * GIB, "pool_bytes": 30 * GIB}
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    crowded = attached("gpu", "NVIDIA H100 80GB HBM3", statistics)
    assert crowded.memory_bytes == 30 * GIB
    assert "other processes" in crowded.source
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert attached("gpu", "NVIDIA H100 80GB HBM3", statistics).memory_bytes == 80 * GIB


def test_an_unknown_accelerator_has_the_memory_that_its_backend_reports():
    device = attached("gpu", "NVIDIA Unheard 900", {"bytes_limit": 10 * GIB})
    assert (device.memory_bytes, device.reserved_bytes, device.bandwidth, device.peak_flops) == (10 * GIB, 0, None, {})
    assert "not in jaxllm's device tables" in device.source
    assert attached("gpu", "NVIDIA Unheard 900", {}).memory_bytes is None


def test_a_control_group_s_memory(tmp_path):
    assert detect._cgroup_memory(tmp_path) == (None, 0)
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 2000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert detect._cgroup_memory(tmp_path) == (None, 3000)
    (tmp_path / "memory.max").write_text("8000\n")
    assert detect._cgroup_memory(tmp_path) == (8000, 3000)


@pytest.mark.parametrize("name", GPUS)
def test_config_text(name):
    target = by_name(name).compile_target
    text = target.config_text()
    fields = dict(re.findall(r"(\w+): (\S+)", text))
    assert int(fields["core_count"]) == target.multiprocessors
    assert int(fields["device_memory_size"]) == target.memory_bytes
    assert int(fields["memory_bandwidth"]) == target.bandwidth
    system = 0 if target.capability is VOLTA else 1024
    assert int(fields["shared_memory_per_block_optin"]) == int(fields["shared_memory_per_core"]) - system
    assert f"major: {target.capability.major} minor: {target.capability.minor}" in text
    assert text.count("{") == text.count("}")
    assert target.description in text


def test_gpus_come_eight_to_a_host():
    target = by_name("h100").compile_target
    assert isinstance(target, GpuTarget)
    shapes = {count: target.topology(count)["topology"] for count in (1, 3, 8, 16, 64)}
    assert shapes == {1: "1x1x1", 3: "1x1x3", 8: "1x1x8", 16: "1x2x8", 64: "1x8x8"}
    with pytest.raises(UserError, match=r"12 GPUs do not fill hosts of 8; use 8 or 16"):
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
        ("v7x", 1, "tpu7x:1x1x1"),
        ("v7x", 2, "tpu7x:1x1x1"),
        ("v7x", 8, "tpu7x:2x2x1"),
        ("v7x", 128, "tpu7x:4x4x4"),
    ],
)
def test_tpu_slices(name, count, topology):
    target = by_name(name).compile_target
    assert isinstance(target, TpuTarget)
    assert target.topology(count)["topology_name"] == topology


def test_small_slices_are_less_than_a_host():
    assert by_name("v5e").compile_target.topology(2)["chips_per_host_bounds"] == [2, 1, 1]
    assert by_name("v5p").compile_target.topology(1)["chips_per_host_bounds"] == [1, 1, 1]
    assert by_name("v7x").compile_target.topology(4)["chips_per_host_bounds"] == [2, 1, 1]
    assert "chips_per_host_bounds" not in by_name("v5e").compile_target.topology(8)


@pytest.mark.parametrize(("count", "near"), [(3, "2 and 4"), (12, "8 and 16"), (512, "256")])
def test_no_such_slice(count, near):
    with pytest.raises(UserError, match=rf"slice of {count} chips .* nearest: {near}"):
        by_name("v5e").compile_target.topology(count)


def test_the_slices_of_a_chip_of_two_devices_are_reported_in_devices():
    with pytest.raises(UserError, match=r"slice of 6 devices .* nearest: 4 and 8"):
        by_name("v7x").compile_target.topology(6)
