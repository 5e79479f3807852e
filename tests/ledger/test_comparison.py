"""Comparison of training and inference: the table holds the sums of the two bills by group."""

import io

import pytest
from rich.console import Console

from jaxllm.config import Config
from jaxllm.hardware import detect
from jaxllm.ledger import request
from jaxllm.ledger.formula.flops import Work
from jaxllm.ledger.formula.roofline import Roofline
from jaxllm.ledger.report import comparison, groups, sentences, terminal
from jaxllm.ledger.request import BillRequest
from jaxllm.ledger.rows import BACKWARD, DECODE, KINDS, PERSISTENT, Ledger, Row, Unknown, format_bytes

WORK = Work({"forward": 10**12}, {"weights": 10**9}, 1)
COMPUTE = Roofline(WORK, {"compute": 0.5, "bandwidth": 0.1})
TRAIN = Ledger(
    "train",
    "tiny",
    100,
    "a device",
    8,
    (
        Row("weights", "weights", PERSISTENT, 1024, "…"),
        Row("m", "optimizer", PERSISTENT, 2048, "…"),
        Row("gradients", "gradients", BACKWARD, 1024, "…"),
        Row("batch", "batch", BACKWARD, 1, "…"),
    ),
    4096,
    COMPUTE,
)
INFER = Ledger(
    "infer",
    "tiny",
    100,
    "a device",
    1,
    (
        Row("weights", "weights", PERSISTENT, 512, "…"),
        Row("KV cache, full", "KV cache", PERSISTENT, 512, "…"),
        Row("masks", "decode workspace", DECODE, 256, "…"),
    ),
    Unknown("not published"),
    Roofline(WORK, {"compute": 0.1, "bandwidth": 0.5}),
)


def table(train=TRAIN, infer=INFER):
    return {line.name: (line.train, line.infer) for line in comparison.lines(train, infer)}


def test_what_each_task_holds_and_does():
    rows_by_name = table()
    assert rows_by_name["direction"] == ("forward and backward", "forward only")
    assert rows_by_name["devices"] == ("8 × a device", "1 × a device")
    assert rows_by_name["weights"] == ("1.00 KiB", "512 B")
    assert rows_by_name["gradients"] == ("1.00 KiB", "–")
    assert rows_by_name["optimizer states"] == ("2.00 KiB", "–")
    assert rows_by_name["KV cache"] == ("–", "512 B")
    assert rows_by_name["workspace"] == ("1 B", "256 B")
    assert rows_by_name["peak"] == ("4.00 KiB", "1.25 KiB")
    assert rows_by_name["fits"] == ("no, 100% of 4.00 KiB", "unknown")
    assert rows_by_name["FLOPs"] == ("1 TFLOP a step", "1 TFLOP a token of each sequence")
    assert rows_by_name["bottleneck"] == ("compute", "bandwidth")


def real(name="llama3.2-1b", **mesh) -> BillRequest:
    config = Config()
    config.model.name, config.data.sequence_length = name, 1024
    for axis, size in mesh.items():
        setattr(config.mesh, axis, size)
    return BillRequest(config, detect.by_name("h100"), None, 4, 2048, 128)


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "gemma2-2b"])
def test_groups_sum_to_the_peak_and_phases_to_theirs(name):
    for ledger in (request.train(real(name, data=8, zero=3)), request.infer(real(name) if name != "gpt2" else real())):
        assert sum(groups.at_peak(ledger).values()) == ledger.peak_bytes
        assert max(phase.total for phase in groups.phases(ledger)) == ledger.peak_bytes
        kinds = {row.kind for row in ledger.rows}
        assert {"weights", "activations"} & {KINDS[row.kind] for row in ledger.rows}
        assert kinds, name


def test_an_unknown_kind_is_an_error():
    with pytest.raises(AssertionError, match="a new kind"):
        Ledger("train", "t", 1, "d", 1, (Row("x", "a new kind", PERSISTENT, 7, ""),), 10, COMPUTE)
    assert set(KINDS.values()) == set(groups.GROUPS)


def test_a_training_run_has_no_cache_and_inference_no_gradients():
    asked = real(data=8, zero=3)
    rows_by_name = table(request.train(asked), request.infer(asked))
    assert rows_by_name["KV cache"][0] == "–"
    assert rows_by_name["gradients"][1] == rows_by_name["optimizer states"][1] == "–"
    assert rows_by_name["bottleneck"][1] == "bandwidth"


def shown(width: int, show, *arguments) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(*arguments, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_tables_fit_the_terminal_and_cut_nothing(width):
    asked = real("gemma2-2b", data=8, zero=3)
    train, infer = request.train(asked), request.infer(asked)
    for text in (
        shown(width, terminal.show_comparison, train, infer),
        shown(width, terminal.show_bill, train, asked.device),
        shown(width, terminal.show_bill, infer, asked.device),
    ):
        assert max(map(len, text.splitlines())) <= min(width, 100)
        assert "…" not in text
    text = " ".join(shown(width, terminal.show_bill, train, asked.device).split())
    for row in train.rows:
        if row.phase in (PERSISTENT, train.peak_phase):
            assert format_bytes(row.bytes_per_device) in text, row
    lines = shown(width, terminal.show_bill, train, asked.device).splitlines()
    for row in train.rows:
        if row.phase in (PERSISTENT, train.peak_phase) and len(row.derivation) < 26:
            assert any(row.name in line and format_bytes(row.bytes_per_device) in line for line in lines), row
    assert "Largest first: " in text


def test_largest_rows_come_first():
    assert [row.name for row in TRAIN.largest_rows(3)] == ["m", "weights", "gradients"]
    assert sentences.largest_first(TRAIN).startswith("Largest first: m 2.00 KiB (50%); weights 1.00 KiB (25%)")


def test_the_verdict_has_both_numbers_the_margin_and_what_is_held_back():
    roomy = Ledger("train", "t", 1, "d", 1, TRAIN.rows, 8192)
    assert sentences.verdict(roomy) == "fits: needs 4.00 KiB of 8.00 KiB (50.0%); 4.00 KiB free"
    assert sentences.verdict(roomy, reserved_bytes=1024).endswith("free; 1.00 KiB more is reserved by the backend")
    assert sentences.verdict(INFER) == "Needs 1.25 KiB; whether that fits is unknown: not published"
