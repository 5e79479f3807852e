"""Runs from end to end in one process: output, records, resumption and refusals."""

import itertools
import json
import os
import signal
import types

import jax
import numpy as np
import pytest
import runs

from jaxllm.checkpoints import workdir as workdir_lib
from jaxllm.errors import RunError, UserError
from jaxllm.train import metrics, progress, trainer

TICK = 0.5  # seconds between two readings of the run's clock, exact in the digits that are printed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("corpus"))


def steps_of(workdir):
    return [record for record in metrics.read(workdir / "metrics.jsonl") if record["kind"] == "step"]


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Uninterrupted run of 8 steps, which the others are compared with."""
    workdir, ticks = tmp_path_factory.mktemp("whole"), itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: TICK * next(ticks)))
        status, text = runs.train(runs.tiny_config(corpus), workdir)
    return workdir, status, text, TICK * (next(ticks) - 1)


def test_prints_in_order_and_records(whole):
    workdir, status, text, _ = whole
    assert status == 0
    marks = ["ledger", "compiled in", "step 8/8", "reconcil", "validation loss", "bits per byte", "jaxllm.sample"]
    places = [text.lower().find(mark) for mark in marks]
    assert min(places) >= 0, dict(zip(marks, places, strict=True))
    assert places[0] < places[1] < places[4] < places[6]
    records = steps_of(workdir)
    assert [r["step"] for r in records] == list(range(1, 9))
    assert all(r["tokens"] + r["padding"] == 4 * 32 for r in records)
    assert records[0]["loss"] == pytest.approx(np.log(257), rel=0.1), "an untrained model is as good as chance"
    assert records[-1]["loss"] < records[0]["loss"]
    evaluation = [r for r in metrics.read(workdir / "metrics.jsonl") if r["kind"] == "eval"]
    assert [r["step"] for r in evaluation] == [8]
    ledger = json.loads((workdir / "ledger.json").read_text())
    assert ledger["task"] == "train"


def test_times_add_up_to_the_wall_clock(whole):
    workdir, _, text, wall = whole
    line = next(line for line in text.splitlines() if " steps in " in line)
    parts = [float(part.split()[-2]) for part in line.split(": ")[1].split(", ")]
    total = float(line.split(" steps in ")[1].split()[0])
    assert total == wall
    assert sum(parts) == total - TICK  # the reading of the total follows the last part
    steps = float(next(p for p in line.split(", ") if p.startswith("steps")).split()[1])
    assert sum(r["seconds"] for r in steps_of(workdir)) == steps > 0


def assert_same_end(workdir, whole):
    _, got = runs.trained(workdir)
    _, want = runs.trained(whole[0])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for field in ("step", "loss", "grad_norm", "lr"):
        assert [r[field] for r in steps_of(workdir)] == [r[field] for r in steps_of(whole[0])]


def test_second_time_says_it_is_done(whole):
    before = (whole[0] / "metrics.jsonl").read_text()
    status, text = runs.train(runs.trained(whole[0])[0], whole[0])
    assert status == 0
    assert "is done" in text
    assert (whole[0] / "metrics.jsonl").read_text() == before


def test_sigterm_saves_and_the_same_command_ends_bitwise_equal(corpus, whole, tmp_path, monkeypatch):
    config, write = runs.tiny_config(corpus), metrics.MetricsWriter.write

    def signalled(self, kind, step, **values):
        write(self, kind, step, **values)
        if (kind, step) == ("step", 4):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.MetricsWriter, "write", signalled)
        status, text = runs.train(config, tmp_path)
    assert status == 128 + signal.SIGTERM, text
    saved = int(text.split("SIGTERM: saved after step ")[1].split(";")[0])
    assert 4 <= saved < 8
    status, text = runs.train(config, tmp_path)
    assert status == 0
    assert f"resuming {os.path.relpath(tmp_path)} after step {saved}" in text
    assert_same_end(tmp_path, whole)


def test_not_finite_stops_with_step_documents_and_last_good(corpus, tmp_path):
    config = runs.tiny_config(corpus, optimizer_name="sgd", optimizer_peak_lr=1e30, optimizer_clip_norm=0.0)
    config.checkpoint.every = 1
    with pytest.raises(RunError, match=r"is (nan|inf) at step \d.*\.txt.*the last good checkpoint is") as error:
        runs.train(config, tmp_path)
    step = int(str(error.value).split("at step ")[1].split(";")[0])
    newest = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert newest == step - 1, "a state that is not finite is never saved as good"


@pytest.mark.slow
def test_an_overflow_of_fp16_is_a_skipped_step_and_not_a_failure(corpus, tmp_path):
    # So large a scale overflows repeatedly until it is halved enough; then updates follow.
    config = runs.tiny_config(corpus, precision_policy="fp16", precision_loss_scale=2.0**30, train_steps=24)
    status, text = runs.train(config, tmp_path)
    assert status == 0, text
    records = steps_of(tmp_path)
    skipped = [r["skipped"] for r in records]
    assert 0 < sum(skipped) < 24
    assert skipped[0] == 1
    assert [r["step"] for r in records] == list(range(1, 25)), "a step is a batch, applied or not"
    assert f"{24 - sum(skipped):.0f} updates applied, {sum(skipped):.0f} skipped" in text
    rates = [r["lr"] for r in records]
    applied = skipped.index(0.0)
    assert set(rates[: applied + 1]) == {rates[0]}, "the schedule follows the updates"
    assert rates[applied + 1] != rates[0]


@pytest.mark.parametrize(
    ("numbers", "fails"),
    [
        ({"loss": float("inf"), "skipped": 1.0, "loss_scale": 2.0}, False),
        ({"loss": 3.0, "grad_norm": float("inf"), "skipped": 1.0, "loss_scale": 1.0}, False),
        ({"loss": float("nan"), "skipped": 1.0, "loss_scale": 1.0}, True),
        ({"loss": float("nan"), "skipped": 0.0, "loss_scale": 2.0}, True),
        ({"loss": float("nan")}, True),
    ],
)
def test_which_numbers_end_a_run(numbers, fails):
    bad = [name for name, value in numbers.items() if not np.isfinite(value)]
    assert any(not trainer._is_overflow(numbers, name) for name in bad) == fails


def test_workdir_of_another_configuration_is_refused_and_unchanged(corpus, whole):
    before = sorted((p, p.stat().st_mtime_ns) for p in whole[0].rglob("*") if p.name != ".lock" and p.is_file())
    with pytest.raises(UserError, match=r"config.optimizer.peak_lr was 0.01 and is now 0.02"):
        runs.train(runs.tiny_config(corpus, optimizer_peak_lr=0.02), whole[0])
    assert sorted((p, p.stat().st_mtime_ns) for p in whole[0].rglob("*") if p.name != ".lock" and p.is_file()) == before


def test_two_runs_in_one_workdir(corpus, tmp_path):
    with workdir_lib.exclusive_lock(tmp_path), pytest.raises(UserError, match="another run"):
        runs.train(runs.tiny_config(corpus), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.data.path=/nowhere/*.txt"], "/nowhere"),
        (["--config.data.sequence_length=60", "--config.data.path={few}/*.txt"], "longer than the data"),
        (["--config.data.path={empty}"], "empty"),
        (["--config.data.path={latin}"], "UTF-8"),
        (["--config.model.name=gpt5"], "gpt5"),
        (["--config.model.heads=3"], "kv_heads"),
        (["--config.train.batch_sise=3"], "train.batch_size"),
        (["--config.train.steps=many"], "many"),
        (["--config.mesh.data=64", "--config.train.batch_size=64"], "config.mesh needs 64"),
        (["--nonsense=1"], "--nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, corpus, arguments, words):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait\n" * 20)
    (tmp_path / "few").mkdir()
    for name in "ab":
        (tmp_path / "few" / f"{name}.txt").write_text("a few words\n")
    (tmp_path / "c.py").write_text(
        f"import runs\n\ndef get_config():\n    return runs.tiny_config({corpus!r}, model_kv_heads=2)\n"
    )
    places = {"empty": tmp_path / "empty.txt", "latin": tmp_path / "latin.txt", "few": tmp_path / "few"}
    arguments = [argument.format(**places) for argument in arguments]
    done = runs.command("jaxllm.train", f"--config={tmp_path / 'c.py'}", f"--workdir={tmp_path / 'w'}", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert words in lines[0]
    assert not (tmp_path / "w" / "checkpoints").exists()


def test_disk_full_while_saving(corpus, tmp_path):
    """A file size limit simulates a full disk: writes fail midway, after a complete first checkpoint."""
    code = (
        "import resource, sys, pathlib, runs\n"
        "from jaxllm import commandline\n"
        "from jaxllm.checkpoints import checkpoint\n"
        "save = checkpoint.Checkpointer.save\n"
        "def limited(self, step, *rest):\n"
        "    if step == 6: self.wait(); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "    save(self, step, *rest)\n"
        "checkpoint.Checkpointer.save = limited\n"
        f"config = runs.tiny_config({corpus!r})\n"
        f"commandline.run(lambda: runs.train(config, pathlib.Path({str(tmp_path)!r}))[0], ['x'])\n"
    )
    done = runs.fresh_python(code)
    assert done.returncode == 2, done.stderr
    # The threads of Orbax and TensorStore also print how they ended, in any order; exactly one line is jaxllm's.
    ours = [line for line in done.stderr.splitlines() if "error: cannot save the checkpoint of step 6" in line]
    assert len(ours) == 1, done.stderr
    assert "the last good checkpoint is" in ours[0]
    assert "/jaxllm/" not in done.stderr, "a traceback of our own"
    # A TensorStore thread may still have written after the clean-up; the next run removes that.
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name != ".writing-6"] == ["00000003"]
    _, text = runs.train(runs.tiny_config(corpus), tmp_path)
    assert "resuming" in text
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["00000006", "00000008"]


def test_profile_and_tensorboard(corpus, tmp_path):
    # One step more than the run has left: the trace is written anyway.
    config = runs.tiny_config(corpus, log_profile_start=4, log_profile_steps=4, log_tensorboard=True, train_steps=6)
    _, text = runs.train(config, tmp_path)
    assert "profiling 4 steps from step 4" in text
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert list((tmp_path / "tensorboard").glob("events.*"))
