"""Rows, sums and the JSON of a ledger."""

import copy
import json

import ledgers
import pytest

from jaxllm.ledger.formula.exact.shard_sizes import Shard, count, format_count
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, PERSISTENT, Ledger, Row, Unknown, array_row, format_bytes, format_si


def example(capacity=1000) -> Ledger:
    rows = (
        Row("weights", "weights", PERSISTENT, 400, "100 × 4 B"),
        Row("m", "optimizer", PERSISTENT, 300, "…"),
        Row("logits", "logits and loss", BOUNDARY, 50, "…"),
        Row("gradients", "gradients", BACKWARD, 100, "…"),
        Row("attn_qkv", "activations", BACKWARD, 100, "…"),
    )
    return Ledger("train", "tiny", 100, "a device", 1, rows, capacity)


def test_peak_is_persistent_plus_the_largest_phase():
    ledger = example()
    assert ledger.persistent_bytes == 700
    assert ledger.peak_phase == BACKWARD
    assert ledger.peak_bytes == 900


@pytest.mark.parametrize(("capacity", "fits"), [(900, True), (899, False), (Unknown("not published"), None)])
def test_fits(capacity, fits):
    assert example(capacity).fits is fits


@pytest.mark.parametrize("capacity", [1000, Unknown("not published")])
def test_json_has_every_figure(capacity):
    ledger = example(capacity)
    value = json.loads(json.dumps(ledger.to_json()))
    assert [row["formula"] for row in value["rows"]] == [row.formula for row in ledger.rows]
    assert value["peak_bytes_per_device"] == ledgers.peak(value) == ledger.peak_bytes
    assert value["capacity_bytes"] == ({"unknown": "not published"} if isinstance(capacity, Unknown) else capacity)


def test_json_keys_are_the_contract():
    value = example().to_json()
    assert list(value) == [
        *("task", "model", "parameters", "device", "count", "rows", "peak_bytes_per_device", "capacity_bytes", "fits"),
        *("columns", "gaps", "compute", "attention"),
    ]
    assert list(value["rows"][0]) == ["name", "kind", "phase", "bytes_per_device", "formula"]
    assert list(value["columns"]) == ["formula", "trace", "compiled", "device"]
    assert value["columns"]["compiled"]["unknown"]


def test_a_phase_that_does_not_exist_is_refused():
    with pytest.raises(AssertionError, match="lunch"):
        Ledger("train", "tiny", 1, "a device", 1, (Row("x", "weights", "lunch", 1, ""),))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (32_121_044_992, "29.92 GiB"), (5 * 2**50, "5.00 PiB")],
)
def test_bytes_have_their_unit(count, text):
    assert format_bytes(count) == text


def test_a_formula_has_its_numbers():
    made = Row("weights", "weights", PERSISTENT, 8_030_261_248 * 4, f"{8_030_261_248:,} × 4 B")
    assert made.formula == "8,030,261,248 × 4 B = 29.92 GiB"


@pytest.mark.parametrize(
    ("shards", "size", "text"),
    [
        ([Shard(8_030_261_248, 0, 8)], 4, "8,030,261,248 / 8 × 4 B = 3.74 GiB"),
        ([Shard(1000, 0, 4), Shard(24, 0, 1), Shard(24, 0, 4)], 2, "(1,024 / 4 + 24) × 2 B = 560 B"),
        ([Shard(1000, 24, 8)], 1, "(1,000 + 24 of padding) / 8 × 1 B = 128 B"),
        ([Shard(1001, 0, 8)], 4, "⌊1,001 / 8⌋ × 4 B = 500 B"),
        ([Shard(10, 0, 1)], 4, "10 × 4 B = 40 B"),
        ([], 4, "0 × 4 B = 0 B"),
    ],
)
def test_a_formula_has_its_division(shards, size, text):
    made = array_row("weights", "weights", PERSISTENT, count(shards), size)
    assert made.formula == text
    assert made.bytes_per_device == sum(shard.elements_per_device for shard in count(shards).shards) * size
    assert copy.deepcopy(made) == made


def test_what_is_computed_from_a_count_is_a_number():
    assert format_count(count([Shard(16, 0, 8)]) // 2) == "1"
    assert format_count(2 * count([Shard(16_000, 0, 8)])) == "4,000"


def test_other_units():
    assert format_si(989.4e12, "FLOP/s") == "989 TFLOP/s"
    assert format_si(0.0048, "s") == "4.8 ms"
    assert format_si(0.0139, "s") == "13.9 ms"
    assert format_si(12.3e-6, "s") == "12.3 µs"
    assert format_si(5e-10, "s") == "0.0005 µs"
    assert format_si(0, "s") == "0 s"
    assert format_si(1, "s") == "1 s"
    assert format_si(-0.0048, "s") == "-4.8 ms"
    assert format_si(0.9999, "s") == "1 s"  # rounded to three digits
    assert format_si(999.9, "FLOP") == "1 kFLOP"
    assert format_si(Unknown("why"), "s") == "unknown"
