"""Reconciliation: the columns side by side, the tables, this machine, and the command."""

import io
import json

import jax
import jax.numpy as jnp
import ledgers
import pytest
import runs
from rich.console import Console

from jaxllm.hardware import detect
from jaxllm.hardware.detect import Device
from jaxllm.ledger import device
from jaxllm.ledger.reconcile import reconcile
from jaxllm.ledger.report import terminal
from jaxllm.ledger.rows import BACKWARD, PERSISTENT, Ledger, Row, Unknown

STATE = {"weights": {"w": jnp.zeros(100)}, "optimizer": {"m": jnp.zeros(100)}}
STATE["state"] = dict(STATE)
ROWS = (
    Row("weights", "weights", PERSISTENT, 400, "100 × 4 B"),
    Row("m", "optimizer", PERSISTENT, 400, "100 × 4 B"),
    Row("gradients", "gradients", BACKWARD, 400, "100 × 4 B"),
)
LEDGER = Ledger("train", "tiny", 100, "a device", 1, ROWS, 10_000)


def test_all_columns_and_gaps():
    result = reconcile(LEDGER, {"peak": 1000}, {"peak": 1250}, STATE)
    weights, optimizer, persistent, activations, peak = result.figures
    assert isinstance(activations.gap("device"), Unknown)
    assert [figure.gap("device") for figure in (weights, optimizer, persistent)] == [0.0, 0.0, 0.0]
    assert peak.gap("compiled") == pytest.approx(0.2)
    assert peak.gap("device") == pytest.approx(-0.04)
    assert isinstance(peak.gap("trace"), Unknown)
    assert result.ok(0.2)
    assert result.faults(0.19) == ["peak: formula 1,200 B, compiled 1,000 B (+20.00%)"]


def test_state_has_no_tolerance():
    off_by_four = {**STATE, "state": {**STATE["state"], "extra": jnp.zeros(1)}}
    assert not reconcile(LEDGER, state_trees=off_by_four).ok(1.0)


def test_nothing_measured_is_unknown_everywhere():
    result = reconcile(LEDGER)
    for figure in result.figures:
        for column in ("trace", "compiled", "device"):
            assert isinstance(figure.columns[column], Unknown)
            assert isinstance(figure.gap(column), Unknown)
    assert result.ok(0.0)


def test_json_is_the_ledgers_with_its_columns():
    value = json.loads(json.dumps(reconcile(LEDGER, {"peak": 1000}, None, STATE).to_json()))
    assert value["rows"] == LEDGER.to_json()["rows"]
    assert value["peak_bytes_per_device"] == ledgers.peak(value) == LEDGER.peak_bytes
    assert value["columns"]["compiled"]["peak"] == 1000
    assert value["columns"]["device"]["persistent"] == 800
    assert value["columns"]["device"]["peak"] == {"unknown": "no device was measured"}
    assert value["gaps"]["peak"]["compiled"] == pytest.approx(0.2)


def test_live_bytes_see_an_array_come_and_go():
    before = device.live_bytes()
    array = jnp.ones(12_345, jnp.float32).block_until_ready()
    assert device.live_bytes() - before == array.nbytes
    del array
    assert device.live_bytes() == before


def test_a_replicated_tree_counts_once_a_device():
    mesh = jax.make_mesh((8,), ("data",))
    replicated = jax.device_put(jnp.ones(64), jax.NamedSharding(mesh, jax.P()))
    sharded = jax.device_put(jnp.ones(64), jax.NamedSharding(mesh, jax.P("data")))
    assert device.tree_bytes({"replicated": replicated, "sharded": sharded}) == 64 * 4 + 64 * 4 // 8


def test_a_cpu_keeps_no_statistics():
    assert device.peak_bytes() == Unknown("the CPU backend has no memory_stats")


class Statistics:
    platform, device_kind = "gpu", "a GPU"

    def memory_stats(self):
        return {"peak_bytes_in_use": 7}


def test_statistics_of_a_device():
    assert device.peak_bytes(Statistics()) == 7
    assert device.capacity_bytes(Statistics()) == Unknown("the memory_stats of a GPU have no bytes_limit")


class Busy:
    """A device of 100 bytes with 40 in use; this process has no arrays on it."""

    platform, device_kind = "gpu", "a GPU"

    def memory_stats(self):
        return {"bytes_in_use": 40, "bytes_limit": 100}


def test_memory_used_by_others_is_not_available():
    assert device.used_by_others(Busy()) == 40
    assert device.available_bytes(Busy()) == 60
    assert isinstance(device.available_bytes(Statistics()), Unknown)


def test_available_host_memory_includes_our_own_arrays(monkeypatch):
    """Free memory is patched to a constant: other processes change it while a test runs."""
    monkeypatch.setattr(device, "_free_host_bytes", lambda: 2**30)
    before = device.available_bytes()
    array = jnp.ones(2**20, jnp.float32).block_until_ready()
    assert device.available_bytes() - before == array.nbytes
    assert before >= 2**30
    monkeypatch.undo()
    assert device.used_by_others() > 0


def test_memory_available_to_a_task():
    gpu = Device("a GPU", 100, None, {}, "a test", "gpu")
    assert device.available_to_task(gpu, 15) == 85
    assert device.available_to_task(gpu, 150) == 0
    assert device.available_to_task(gpu, Unknown("not measured")) == 100
    host = Device("a host", 100, None, {}, "a test", "cpu")
    assert device.available_to_task(host, 15, count=4) == 25, "a CPU's memory_bytes is free memory, which devices share"
    assert isinstance(device.available_to_task(Device("?", None, None, {}, "a test", "gpu"), 15), Unknown)


def shown(show, *arguments, width=100) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(*arguments, console)
    return console.file.getvalue()


HOST = Device("a host", 10_000, None, {}, "a test")


def test_the_bill_fits_100_columns_and_says_so():
    text = shown(terminal.show_bill, LEDGER, HOST, width=160)
    assert max(map(len, text.splitlines())) <= 100
    for part in ("100 × 4 B", "sum: persistent", "800 B", "peak", "fits: needs 1.17 KiB of 9.77 KiB (12.0%)"):
        assert part in text


@pytest.mark.parametrize("width", [80, 100])
def test_no_row_of_a_bill_wraps(width):
    long = "2 × 32 layers × 1 × 8,192 tokens × 8 heads × 128 × 2 B"
    rows = (*ROWS, Row("weights of one repeat, dequantized", "KV cache", PERSISTENT, 2**30, long))
    text = shown(terminal.show_bill, Ledger("train", "tiny", 100, "a device", 1, rows, 10_000), HOST, width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    (row,) = (line for line in lines if line.startswith("weights of one repeat, dequantized"))
    assert row.split()[-4:-1] == ["[1]", "1.00", "GiB"]
    assert f"[1] {long}" in lines
    assert not [line for line in lines if line.startswith(" ") and line.strip()], "a line that continues a row"


def test_a_bill_that_does_not_fit_says_by_how_much():
    small = Ledger("train", "tiny", 100, "a device", 1, ROWS, 1000)
    assert "does not fit: needs 1.17 KiB, has 1,000 B; 200 B over" in shown(terminal.show_bill, small, HOST)


def test_unknown_has_a_footnote():
    text = shown(terminal.show_reconciliation, reconcile(LEDGER, {"peak": 1000}, {"peak": device.peak_bytes()}, STATE))
    assert "+20.0%" in text
    assert "unknown [" in text
    assert "] the CPU backend has no memory_stats" in text


def test_this_machine_is_measured():
    host = detect.this_machine()
    assert host.memory_bytes > 2**20
    assert 1e8 < host.peak_flops["float32"] < 1e15
    assert 1e8 < host.bandwidth < 1e14
    assert host is detect.this_machine()


CONFIG = """
from jaxllm.config import Config


def get_config() -> Config:
    config = Config()
    config.model.name = "gpt2"
    config.data.sequence_length = 1024
    return config
"""


def command(tmp_path, *arguments):
    path = tmp_path / "run.py"
    path.write_text(CONFIG)
    return runs.command("jaxllm.ledger", "--config", str(path), *arguments)


def test_the_command_prints_json_and_nothing_else(tmp_path):
    done = command(tmp_path, "--json", "--config.train.batch_size=100000")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert (value["parameters"], value["fits"]) == (124_439_808, False)
    seconds = value["compute"]["seconds_of"]
    assert value["compute"]["bound"] == max(seconds, key=seconds.__getitem__)
    assert value["peak_bytes_per_device"] == ledgers.peak(value) > value["capacity_bytes"]


def test_the_command_bills_inference_and_refuses_too_long_a_context(tmp_path):
    done = command(tmp_path, "--task=infer", "--batch=2", "--context=1024")
    assert done.returncode == 0, done.stderr
    assert "KV cache, full" in done.stdout
    narrow = command(tmp_path, "--task=infer", "--batch=2", "--context=1024", "--weights=int4", "--cache=int8")
    assert "× 4 bits" in narrow.stdout
    assert "KV cache scales, full" in narrow.stdout
    refused = command(tmp_path, "--task=infer", "--context=4096")
    assert refused.returncode == 2
    assert "--context is 4096" in refused.stderr
