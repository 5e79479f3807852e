"""The GPU suite on a CPU: all of it runs, errors are reported, and its figures are correct."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import time

import gpu_suite
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from suite import attention, bandwidth, cells, correctness, exact, memory, performance, records, tune
from suite.records import Context, Record

from jaxllm.architectures import ARCHITECTURES
from jaxllm.kernels import reference
from jaxllm.kernels.flash.common import Tile
from jaxllm.ledger.formula import flops as compute

CELL = {"dtype": "float32", "lengths": (40, 40), "head_dim": 16, "group": 2, "window": 5}
CELL |= {"softcap": 0.0, "segmented": False, "causal": True}
DECODE = {"dtype": "float32", "slots": 40, "head_dim": 16, "group": 2, "tokens": 1, "reach": "all"}
DECODE |= {"softcap": 5.0, "int8": False}


def run(*arguments):
    command = [sys.executable, str(runs.ROOT / "experiments" / "gpu_suite.py"), *arguments]
    return subprocess.run(command, env=runs.environment(), capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_whole_script_on_a_cpu(tmp_path):
    """Every section ends, the JSON is valid, and the table fits 100 columns."""
    out = tmp_path / "suite.json"
    done = run("--tiny", "--seconds", "1500", "--out", str(out))
    made = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    records.check(made)
    assert (made["tiny"], made["correct"], made["platform"]) == (True, True, "cpu")
    found = [Record(**row) for row in made["records"]]
    ended = {record.section for record in found if record.note == "ended"}
    assert ended == set(gpu_suite.SECTIONS)
    assert {record.section for record in found if record.value is not None} == set(gpu_suite.SECTIONS)
    assert not [record for record in found if record.note.startswith(("failed", "skipped"))]
    assert max(map(len, done.stdout.splitlines()[:-1])) <= records.WIDTH


def test_sections_that_are_not_there_are_named():
    done = run("--only", "atention")
    assert done.returncode == 2
    assert "atention" in done.stderr
    assert "attention" in done.stderr


def test_without_a_gpu_the_sizes_of_one_are_refused(tmp_path):
    done = run("--section", "decode", "--seconds", "9", "--records", str(tmp_path / "records"))
    assert done.returncode == 2
    assert "--tiny" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_packages_that_are_not_needed_need_not_be_there():
    """The suite runs without data readers and checkpoint readers, which a borrowed machine may lack."""
    code = """
import importlib, pathlib, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("grain", "ml_collections", "gguf", "zstandard", "pyarrow", "safetensors", "jinja2"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, "experiments")
for path in pathlib.Path("experiments/suite").glob("[a-z]*.py"):
    importlib.import_module(f"suite.{path.stem}")
"""
    done = runs.fresh_python(code)
    assert done.returncode == 0, done.stderr


def context(tmp_path, seconds=600.0, section="correctness"):
    return Context(section, True, time.monotonic() + seconds, tmp_path / "records.jsonl")


def plain(q, k, v, *segments, causal, window, scale, softcap, late=0):
    """Runs the reference in place of the kernel; `late` shifts its mask."""
    assert causal
    assert not segments
    places = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    mask = reference.attention_mask(places + late, places, None, None, window)
    return reference.attention(q, k, v, mask, scale=scale, softcap=softcap)


def judged(tmp_path, attend, cell=CELL):
    """Returns whether the section accepts a kernel, judged by one cell."""
    here = context(tmp_path)
    programs = {"cell": (cell, *correctness.flash_program(cell, attend))}
    correctness.judge(
        here, "flash", programs, lambda c, _, got: correctness.flash_errors(c, got), correctness.FLASH_LIMITS
    )
    here.add("section", note="ended")
    return gpu_suite.is_correct(records.read(here.path))


def broken(*_, **__):
    raise ValueError("cannot be traced")


FAULTS = {
    "none": plain,
    "mask off by one": functools.partial(plain, late=1),
    "scale off by a tenth of a per cent": lambda *a, scale, **o: plain(*a, scale=1.001 * scale, **o),
    "NaN": lambda *a, **o: plain(*a, **o) * jnp.where(jnp.arange(16) == 3, jnp.nan, 1.0)[None, None, None],
    "does not trace": broken,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_caught(fault, tmp_path):
    assert judged(tmp_path, FAULTS[fault]) == (fault == "none")


def test_a_wrong_gradient_alone_is_caught():
    _, arguments = correctness.flash_program(CELL, plain)
    got = list(correctness.flash_program(CELL, plain)[0](*arguments))
    assert max(correctness.flash_errors(CELL, got).values()) < 1e-5
    for place, name in enumerate(correctness.NAMES):
        spoiled = [x.at[0, 0, 0, 0].add(1e-2) if i == place else x for i, x in enumerate(got)]
        found = correctness.flash_errors(CELL, spoiled)
        assert [x for x, value in found.items() if value > 1e-4] == [name]


def test_repeats_that_differ_are_caught():
    count = itertools.count()
    same = np.zeros(3, np.float32)

    def flicker():
        return same + (1e-7 if next(count) == 5 else 0.0)

    def judge(run):
        return correctness._cell(run, CELL, (), lambda *_: {"output": 0.0}, 1.0)

    assert judge(lambda: same) == ("", 0.0)
    assert judge(flicker)[0] == "repeats differ"


@pytest.mark.parametrize("fault", [False, True])
def test_a_wrong_decode_kernel_is_caught(fault, tmp_path, monkeypatch):
    real = correctness.decode_attention

    def attend(q, k, v, lengths, **options):
        options |= {"platform": "cpu", "interpret": False}
        return real(q, k, v, jnp.maximum(lengths - fault, 0), **options)

    monkeypatch.setattr(correctness, "decode_attention", attend)
    here = context(tmp_path)
    programs = {"cell": (DECODE, *correctness.decode_program(DECODE))}
    correctness.judge(here, "decode", programs, correctness.decode_errors, correctness.DECODE_LIMITS)
    here.add("section", note="ended")
    assert gpu_suite.is_correct(records.read(here.path)) != fault


def test_cells_for_which_no_time_is_left_are_not_right(tmp_path):
    here = context(tmp_path, seconds=1.0)
    programs = {"cell": (CELL, *correctness.flash_program(CELL, plain))}
    correctness.judge(here, "flash", programs, lambda *_: {"output": 0.0}, correctness.FLASH_LIMITS)
    correctness.judge(here, "mosaic", programs, lambda *_: {}, correctness.FLASH_LIMITS, optional=True)
    needed, optional = records.read(here.path)
    assert (needed.ok, optional.ok) == (False, True)
    assert "1 not run" in needed.note


def test_a_section_that_did_not_end_is_not_correct():
    right = Record("correctness", "cells", 3, "of 3", ok=True)
    ended = Record("correctness", "section", note="ended")
    assert gpu_suite.is_correct([right, ended])
    assert not gpu_suite.is_correct([right])
    assert not gpu_suite.is_correct([ended])
    assert not gpu_suite.is_correct([right, dataclasses.replace(right, ok=False), ended])


def test_a_section_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "_GRACE", 0.1)
    path = tmp_path / "records.jsonl"
    gpu_suite.child("attention", path, 0.1, True)
    assert "its time limit" in records.read(path)[-1].note


@pytest.mark.parametrize("kind", ["flash", "decode"])
def test_every_pair_of_the_grid_is_met(kind):
    factors = {"flash": cells.FLASH, "decode": cells.DECODE}[kind]
    grid = cells.grid(kind, False)
    assert len(grid) < 30

    def lacking(grid):
        return [
            (a, b)
            for a, b in itertools.combinations(factors, 2)
            if {(cell[a], cell[b]) for cell in grid} != set(itertools.product(factors[a], factors[b]))
        ]

    assert not lacking(grid)
    assert lacking(grid[:-1])


@pytest.mark.parametrize(("group", "softcap", "window"), [(1, 0.0, 0), (3, 5.0, 7)])
def test_the_yardstick_is_the_definition(group, softcap, window):
    """The float64 output and gradients equal those of the reference, differentiated by JAX."""
    cell = CELL | {"group": group, "softcap": softcap, "window": window}
    run, arguments = correctness.flash_program(cell, plain)
    assert max(correctness.flash_errors(cell, run(*arguments)).values()) < 1e-5


def test_queries_that_see_nothing_are_zero_in_the_yardstick():
    q, k = np.ones((1, 5, 2, 4)), np.ones((1, 1, 3, 4))
    mask = exact.attention_mask(5, 3, True, 0)[None]
    assert mask[0].sum(1).tolist() == [0, 0, 1, 2, 3]
    out, dq, dk, dv = exact.attention(q, k, k, q, mask, 0.5, 0.0)
    assert not out[:, :2].any()
    assert not dq[:, :2].any()
    assert dk.shape == k.shape
    assert dv.sum() == pytest.approx(3 * 2 * 4)  # weights of a query that sees something sum to 1


def test_attention_flops_are_two_products_of_seen_pairs():
    B, N, T, H = 2, 3, 1000, 16
    pairs = exact.attention_mask(T, T, True, 0).sum()
    assert performance.attention_flops(B, N, T, H, False) == pytest.approx(B * N * pairs * 2 * (H + H), rel=2e-3)
    forward, backward = 2, 5  # matmuls per pair: q·k and w·v; q·k again, and those of dv, dw, dq, dk
    ratio = performance.attention_flops(B, N, T, H, True) / performance.attention_flops(B, N, T, H, False)
    assert ratio == (forward + backward) / forward
    assert performance.attention_flops(1, 16, 32768, 128, False) == 4398046511104


@pytest.mark.parametrize("int8", [False, True])
def test_cache_bytes_are_those_of_the_arrays(int8):
    _, k, v, _, scales = jax.eval_shape(functools.partial(bandwidth.arrays, 3, 40, 4, 2, 16, int8))
    size = sum(x.size * x.dtype.itemsize for x in (k, v, *scales.values()))
    assert performance.cache_bytes(3, 2, 40, 16, k.dtype.itemsize) == size
    assert len(scales) == 2 * int8


def test_decode_bytes_are_weights_and_cache():
    model = ARCHITECTURES["llama3.2-1b"]
    cache = 2 * 16 * 8 * 64 * 2 * 500  # keys and values, layers, heads, elements, bytes, tokens
    one = performance.decode_bytes(model, 1, 500)
    assert one == pytest.approx(2 * 1_235_814_400 + cache, rel=1e-3)
    assert performance.decode_bytes(model, 33, 500) - one == pytest.approx(32 * cache, rel=1e-2)


def test_utilisation():
    model = ARCHITECTURES["gpt2"]
    flops = compute.model_flops_per_token(model, 1024)
    assert performance.utilisation(model, 1024, 1e6, 2e6 * flops) == pytest.approx(0.5)
    assert flops == pytest.approx(6 * 124e6 + 6 * 12 * 1024 * 768, rel=0.02)


def test_a_rate_is_work_over_seconds():
    timed = performance.Timing(2.0, 1.0, 4.0, 5, 1)
    assert timed.rate(8.0) == {"value": 4.0, "low": 2.0, "high": 8.0, "repeats": 5}


def test_short_calls_are_timed_together(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(performance.time, "perf_counter", lambda: now[0])

    def takes(seconds):
        def run():
            now[0] += seconds

        return performance.measure(run, repeats=2, least_seconds=0.03)

    assert takes(0.002).calls == 15
    assert takes(0.002).median == pytest.approx(0.002)
    assert takes(0.04).calls == 1
    assert takes(1e-9).calls == performance.MOST_CALLS


def test_our_fastest_version_is_compared():
    seconds = {
        name: performance.Timing(s, s, s, 5, 1) for name, s in (("ours a", 2.0), ("ours b", 1.0), ("cudnn", 0.5))
    }
    made = attention.record((1, 1000, 1, 500, False), seconds, {"jax mosaic": "none here"})
    assert made["value"] == pytest.approx(1e-3)
    assert made["beside"] == {"ours a": pytest.approx(5e-4), "cudnn": pytest.approx(2e-3)}
    assert made["note"] == "2.00× ours a, 0.50× cudnn, no jax mosaic"
    assert attention.record((1, 1000, 1, 500, False), {}, {"ours a": "why"})["note"].startswith("failed")


@pytest.mark.parametrize("kernel", tune.CHOICES)
def test_the_present_tiles_are_among_the_choices(kernel):
    now = Tile(16, 16, 1, 1)
    every = tune.choices(kernel, now)
    assert every[0] == now
    assert len(every) == len(set(every)) == 1 + len(tune.CHOICES[kernel])
    assert all(x & (x - 1) == 0 for tile in every for x in (tile.queries, tile.keys, tile.warps))


def test_the_ledger_s_gap():
    found = {"bytes": {"formula": 3 << 30, "xla": 2 << 30, "before": 1 << 30, "device": 4 << 30}, "hidden": False}
    made = Record("ledger", **memory.record(0, found))
    assert made.value == 4.0
    assert "xla 2.00 GiB (+50.0%)" in made.note
    assert "device 4.00 GiB (-25.0%)" in made.note
    assert memory.summary([made])["value"] == pytest.approx(25.0)
    assert "value" not in memory.summary([Record("ledger", "skipped", note="why")])
    assert memory.figures(1, 1, before=5, after=5)["hidden"]
    assert not memory.figures(1, 1, before=5, after=6)["hidden"]
    assert len({memory.name_of(index) for index in range(memory.COUNT)}) == memory.COUNT == 10


def test_a_failure_and_a_want_of_time_are_records(tmp_path):
    here = context(tmp_path, seconds=5.0)
    assert here.attempt("works", 1, lambda: here.add("works", value=1.0, unit="s"))
    assert not here.attempt("breaks", 1, broken)
    assert not here.attempt("is long", 100, broken, required=True)
    with here.path.open("a") as out:
        out.write('{"section": "corr')  # as a killed process leaves it
    found = records.read(here.path)
    assert [record.name for record in found] == ["works", "breaks", "is long"]
    assert found[1].note == "failed: ValueError: cannot be traced"
    assert found[2].note.startswith("skipped")
    assert [record.ok for record in found] == [None, None, False]


@pytest.mark.parametrize(
    "change",
    [
        {"device": None},
        {"correct": "yes"},
        {"records": [{}]},
        {"records": [vars(Record("a", "no unit", 1.0))]},
        {"records": [vars(Record("a", "no figure, and no reason"))]},
    ],
)
def test_a_document_that_is_not_as_it_should_be_is_refused(change):
    good = gpu_suite.document([Record("correctness", "x", 1.0, "s", ok=True)], 1.0, True, ["correctness"])
    records.check(good)
    with pytest.raises(ValueError, match=r".+"):
        records.check(good | change)


def test_the_table_keeps_its_width():
    long = Record("a", "word " * 30, 123456.7, "TFLOP/s", 1e5, 1.5e5, 5, note="x" * 300, ok=False)
    lines = records.table_lines([long, Record("b", "none", note="why")])
    assert max(map(len, lines)) <= records.WIDTH
    assert "123,457 TFLOP/s" in "".join(lines)
    assert "WRONG" in "".join(lines)
    assert sum(line.count("x") for line in lines) == 300


def test_the_parent_does_not_start_the_device():
    """Starting the device would reserve the memory that the sections need."""
    code = "import sys; sys.path.insert(0, 'experiments'); import gpu_suite; assert 'jax' not in sys.modules"
    assert runs.fresh_python(code).returncode == 0
    assert os.path.exists(gpu_suite.RESULTS)
