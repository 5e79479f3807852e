"""Compilation for absent devices: the errors if it is not possible, and the output of the command.

Successful compilation is tested in tests/aot, where the compilers are installed.
"""

import dataclasses
import io
import json
import subprocess
import types

import jax
import pytest
import runs
from rich.console import Console

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.errors import RunError, UserError
from jaxllm.hardware import detect
from jaxllm.ledger import rows
from jaxllm.ledger.compiled import absent, inspection
from jaxllm.ledger.compiled.inspection import Inspection
from jaxllm.ledger.report import terminal
from jaxllm.ledger.rows import Ledger, Row, Unknown
from jaxllm.parallel import mesh

QUICKSTART = ("--config", "configs/quickstart.py", "--config.model.layers=1", "--config.optimizer.name=sgd")


def ledger(*arguments):
    return runs.command("jaxllm.ledger", *QUICKSTART, *arguments)


def config(**axes):
    made = Config()
    for axis, size in axes.items():
        setattr(made.mesh, axis, size)
    return made


@pytest.fixture
def no_compilers(monkeypatch):
    monkeypatch.setattr(absent, "_is_installed", lambda module: False)


@pytest.mark.parametrize(("name", "extra"), [("h100", "cuda12"), ("v5e", "tpu")])
def test_a_missing_compiler_is_an_error_with_the_command_that_installs_it(no_compilers, name, extra):
    with pytest.raises(UserError, match=rf"pip install 'jaxllm\[{extra}\]'"):
        absent.inspect(config(data=8), name, 8)


def test_an_installed_module_is_found():
    assert absent._is_installed("jax.experimental")
    assert not absent._is_installed("no_such_package.at_all")


def test_a_device_without_a_target():
    with pytest.raises(UserError, match="not a device that programs can be compiled for"):
        absent.require_compiler("a host", None)


def test_the_count_is_the_mesh_s():
    with pytest.raises(UserError, match=r"--count is 8, but config\.mesh needs 4"):
        absent.inspect(config(data=4), "h100", 8)


def test_an_invalid_request_is_a_one_line_error():
    request = {"config": {"mesh": {"data": 8}}, "device": "h1000", "count": 8}
    assert "did you mean h100" in absent.handle_request(request)["error"]


def test_an_abstract_mesh_compiles_to_what_a_mesh_of_devices_does(monkeypatch):
    """The path to an absent device, run with this machine's devices, compiles to the same program."""
    here = types.SimpleNamespace(platform="cpu", topology=lambda count: {})
    monkeypatch.setattr(
        absent.topologies, "get_topology_desc", lambda **_: types.SimpleNamespace(devices=jax.devices())
    )
    tiny = runs.tiny_config(
        "", model_kv_heads=2, mesh_data=4, mesh_tensor=2, mesh_zero=3, train_batch_size=8, optimizer_name="adamw"
    )
    model = architectures.resolve(tiny.model)

    def inspected(over, compile_):
        (program,) = inspection.task_programs(tiny, model, "cpu", over, None).values()
        return dataclasses.replace(inspection.inspect(lambda: compile_(program)), seconds=0.0)

    afar = inspected(absent.abstract_mesh(tiny), lambda program: absent.compile_for(program, here, 8))
    near = inspected(mesh.make_mesh(tiny.mesh), lambda program: program.compile())
    assert afar == near
    assert {row["devices"] for row in afar.collectives} >= {2, 4}
    tiny.mesh.zero = 0
    assert afar != inspected(mesh.make_mesh(tiny.mesh), lambda program: program.compile())


def child(stdout, stderr="", status=0):
    return lambda *_, **__: subprocess.CompletedProcess([], status, stdout, stderr)


@pytest.fixture
def compilers(monkeypatch):
    monkeypatch.setattr(absent, "_is_installed", lambda module: True)


def test_responses_of_the_child(compilers, monkeypatch):
    oom = inspection.oom_inspection("RESOURCE_EXHAUSTED: Used 32.0G of 16.0G hbm.", 1.5)
    monkeypatch.setattr(subprocess, "run", child(json.dumps({"programs": {"train_step": oom.to_json()}})))
    assert absent.inspect(config(data=8), "v5e", 8) == {"train_step": oom}
    monkeypatch.setattr(subprocess, "run", child(json.dumps({"error": "no"})))
    with pytest.raises(UserError, match=r"^no$"):
        absent.inspect(config(data=8), "v5e", 8)
    monkeypatch.setattr(subprocess, "run", child("", "a\nSegmentation fault\n\n", -11))
    with pytest.raises(RunError, match=r"8 × TPU v5e failed \(exit -11\): Segmentation fault"):
        absent.inspect(config(data=8), "v5e", 8)


def test_the_abstract_mesh_is_the_mesh_without_devices():
    made = absent.abstract_mesh(config(data=4, tensor=2))
    assert dict(made.shape) == {"replica": 1, "data": 4, "tensor": 2}


def test_the_command_bills_a_named_device():
    result = ledger("--config.mesh.data=8", "--device", "h200", "--json")
    assert result.returncode == 0, result.stderr
    bill = json.loads(result.stdout)
    assert (bill["device"], bill["count"], bill["capacity_bytes"]) == (
        "H200 SXM",
        8,
        detect.by_name("h200").memory_bytes,
    )
    assert bill["compute"]["bound"] == "bandwidth"
    assert bill["columns"]["compiled"] == {"unknown": "not measured: nothing was traced, compiled or run"}
    assert "programs" not in bill


def test_the_command_compiles_for_this_machine():
    result = ledger("--compile", "--json")
    assert result.returncode == 0, result.stderr
    bill = json.loads(result.stdout)
    figures = bill["columns"]["compiled"]
    assert figures["peak"] == sum(figures[name] for name in ("arguments", "outputs", "temps")) - figures["aliases"]
    program = bill["programs"]["train_step"]
    assert program["figures"]["peak"] == figures["peak"]
    assert isinstance(bill["gaps"]["peak"]["compiled"], float)
    assert program["products"]["flops"] > 0
    assert program["collectives"] == []


def test_the_command_compiles_prefill_and_decoding():
    result = ledger("--task", "infer", "--context", "64", "--compile", "--json")
    assert result.returncode == 0, result.stderr
    bill = json.loads(result.stdout)
    assert set(bill["programs"]) == {"prefill", "decode"}
    peaks = [program["figures"]["peak"] for program in bill["programs"].values()]
    assert bill["columns"]["compiled"]["peak"] == max(peaks)


def test_the_commands_text_fits_100_columns():
    result = ledger("--compile")
    assert result.returncode == 0, result.stderr
    assert "Compiled: fits" in result.stdout
    assert "Matmuls" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


LEDGER = Ledger("train", "m", 5, "d", 8, (Row("weights", "weights", rows.PERSISTENT, 110, "1"),), 1000)
FIGURES = dict.fromkeys(inspection.NAMES, 0) | {"arguments": 60, "temps": 40, "peak": 100, "flops": Unknown("no flops")}
GATHER = {
    "op": "all-gather",
    "dtype": "bf16",
    "devices": 8,
    "count": 386,
    "operand_bytes": 10**9,
    "result_bytes": 8 * 10**9,
    "ring_bytes": 7 * 10**9,
    "volume": 4 * 10**9,
    "unknown_loops": [],
    "conditional": False,
}
PRODUCTS = {"flops": 10**12, "count": 3, "uncounted": {"ragged-dot": 2}, "unknown_loops": []}


def shown(inspection, ledger=LEDGER):
    out = io.StringIO()
    terminal.show_inspection("train_step", inspection, ledger, Console(file=out, width=100))
    assert max(map(len, out.getvalue().splitlines())) <= 100
    return " ".join(out.getvalue().split())


def test_a_compiled_program_as_text():
    rows_ = [GATHER, GATHER | {"conditional": True}, GATHER | {"unknown_loops": ["while.3"]}]
    text = shown(Inspection(FIGURES, rows_, PRODUCTS, 1.5))
    assert "peak 100 B 110 B (+10.0%)" in text
    assert "Compiled: fits: needs 100 B of 1,000 B" in text
    assert "all-gather bf16 8 386 953.67 MiB 7.45 GiB 6.52 GiB" in text
    assert "≤386" in text
    assert "[1] while.3 is counted as one iteration" in text
    assert "Matmuls: 1 TFLOP in 3 runs; not counted: ragged-dot × 2" in text
    assert "host memory" not in text
    assert "arguments in host memory 7 B" in shown(Inspection(FIGURES | {"host_arguments": 7}, [], PRODUCTS, 1.5))


def test_unknown_figures_of_a_compiled_program_have_footnotes():
    unknown = Unknown("no text")
    text = shown(Inspection(FIGURES | {"peak": Unknown("no temps")}, unknown, unknown, 1.5))
    assert "Compiled: whether it fits is unknown [1]" in text
    assert "Collectives: unknown [2] Matmuls: unknown [2] [1] no temps [2] no text" in text


def test_an_out_of_memory_error_as_text():
    text = shown(inspection.oom_inspection("RESOURCE_EXHAUSTED: Used 32.0G of 16.0G hbm.", 1.5))
    assert text == "train_step, compiled: does not fit. Compiler: RESOURCE_EXHAUSTED: Used 32.0G of 16.0G hbm."


def test_too_large_does_not_fit():
    text = shown(Inspection(FIGURES | {"peak": 1001}, [], PRODUCTS, 1.5))
    assert "Compiled: does not fit: needs 1,001 B of 1,000 B No collectives." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h1000"), "did you mean h100?"),
        (("--device", "h100", "--count", "8"), "--config.mesh.data=8"),
        (("--task", "infer", "--count", "2"), "--count is 2, but --mesh tensor=1 has 1 device(s)"),
        (("--config.mesh.data=8", "--compile"), "config.mesh needs 8 devices"),
        (("--config.optimizer.name=muon", "--config.optimizer.offload=moments"), "set offload to 'none', or use adamw"),
        (("--task", "infer", "--weights", "bf16", "--compile"), "--weights is bf16, which no program supports"),
        (("--task", "infer", "--weights", "int4", "--config.model.width=96", "--compile"), "96 inputs per output"),
        (("--task", "both", "--cache", "fp16", "--compile"), "--cache is fp16, which no program supports"),
        (("--task", "infer", "--weights", "int5"), "int4-32"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    result = ledger(*arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
