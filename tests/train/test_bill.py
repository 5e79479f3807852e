"""Memory bills in a run: printed, compared with the compiled program, and reported on OOM (compile and run time)."""

import dataclasses
import json
import types

import jax
import pytest
import runs

from jaxllm import programs
from jaxllm.errors import RunError, UserError
from jaxllm.hardware import detect
from jaxllm.ledger.runtime import training as training_bill

TPU_REFUSAL = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 21.50G of 15.75G hbm. Exceeded hbm capacity by 5.75G."
)
CPU_SHORTAGE = "RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("corpus"))


def saved(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def forget_a_moment(monkeypatch):
    """Planted fault: removes the optimizer's first moment from the ledger."""
    made = training_bill.bill.training

    def broken(*arguments):
        ledger = made(*arguments)
        return dataclasses.replace(ledger, rows=tuple(row for row in ledger.rows if row.name != "m, first moment"))

    monkeypatch.setattr(training_bill.bill, "training", broken)


def test_strict_stops_where_state_is_off_and_loses_nothing(corpus, tmp_path, monkeypatch):
    config = runs.tiny_config(corpus, ledger_check="strict", ledger_tolerance=100.0)
    with monkeypatch.context() as patch:
        forget_a_moment(patch)
        with pytest.raises(RunError, match=r"strict and the ledger is wrong: optimizer: .*last good .*00000002"):
            runs.train(config, tmp_path)
    assert saved(tmp_path) == ["00000002"]
    assert json.loads((tmp_path / "ledger.json").read_text())["gaps"]["optimizer"]["device"] < 0
    status, text = runs.train(config, tmp_path)
    assert status == 0, "the same command goes on where nothing is wrong"
    assert "after step 2" in text


def test_strict_stops_where_the_peak_is_beyond_the_tolerance_and_not_within_it(corpus, tmp_path):
    config = runs.tiny_config(corpus, ledger_check="strict", ledger_tolerance=0.0, train_steps=3)
    with pytest.raises(RunError, match="ledger is wrong: peak: formula"):
        runs.train(config, tmp_path / "none")
    config.ledger.tolerance = 100.0
    assert runs.train(config, tmp_path / "wide")[0] == 0
    assert saved(tmp_path / "wide") == ["00000003"]


def test_warn_prints_and_goes_on_and_off_does_neither(corpus, tmp_path):
    config = runs.tiny_config(corpus, ledger_tolerance=0.0, train_steps=3)
    status, text = runs.train(config, tmp_path / "warn")
    assert status == 0
    assert "ledger: peak: formula" in text
    assert text.count("attention: xla (auto: no Pallas kernels for cpu)") == 1
    config.ledger.check = "off"
    status, text = runs.train(config, tmp_path / "off")
    assert status == 0
    assert "reconciliation" not in text
    assert not (tmp_path / "off" / "ledger.json").exists()


@pytest.mark.parametrize("tolerance", [-0.1, float("nan")])
def test_a_tolerance_is_not_negative(corpus, tmp_path, tolerance):
    with pytest.raises(UserError, match=r"config\.ledger\.tolerance"):
        runs.train(runs.tiny_config(corpus, ledger_tolerance=tolerance), tmp_path)


def test_what_does_not_fit_by_the_formulas_is_reported_with_a_change_and_tried(corpus, tmp_path, monkeypatch):
    config = runs.tiny_config(corpus, train_batch_size=64, train_steps=1)
    needs = training_bill.bill.training(config, runs.Trainer(config, tmp_path, None)._model, detect.this_machine())
    small = dataclasses.replace(detect.this_machine(), memory_bytes=int(0.9 * needs.peak_bytes))
    monkeypatch.setattr(detect, "this_machine", lambda: small)
    status, text = runs.train(config, tmp_path / "warn")
    printed = " ".join(text.split())
    assert status == 0
    assert "WARNING: this run does not fit: needs" in printed
    assert "one change that would fit: --config.train." in printed
    config.ledger.check = "strict"
    with pytest.raises(RunError, match=r"strict and the run does not fit: needs .* one change that would fit"):
        runs.train(config, tmp_path / "strict")
    assert not (tmp_path / "strict" / "checkpoints" / "00000001").exists()


def failing(monkeypatch, at_call: int, message: str):
    """Makes the training step's compiler (call 0) or its executable (call 1, …) run out of memory."""
    made = programs.train_step

    def train_step(*arguments):
        def compile_():
            if at_call == 0:
                raise jax.errors.JaxRuntimeError(message)
            compiled, calls = made(*arguments).compile(), iter(range(1, 100))

            def step(*inputs):
                if next(calls) == at_call:
                    raise jax.errors.JaxRuntimeError(message)
                return compiled(*inputs)

            return _Executable(step, compiled)

        return types.SimpleNamespace(compile=compile_)

    monkeypatch.setattr(programs, "train_step", train_step)


class _Executable:
    def __init__(self, step, compiled):
        self.step, self.memory_analysis, self.cost_analysis = step, compiled.memory_analysis, compiled.cost_analysis

    def __call__(self, *inputs):
        return self.step(*inputs)


def test_a_compiler_that_refuses(corpus, tmp_path, monkeypatch):
    failing(monkeypatch, 0, TPU_REFUSAL)
    with pytest.raises(RunError) as caught:
        runs.train(runs.tiny_config(corpus), tmp_path)
    text = str(caught.value)
    assert text.startswith("out of memory while the training step was compiled: RESOURCE_EXHAUSTED: XLA:TPU")
    for part in ("predicted peak: ", "reported by the compiler: 21.50 GiB", "largest rows: ", "used by others", "GiB"):
        assert part in text
    assert text.endswith("no checkpoint has been saved yet")


def test_a_step_that_fails_keeps_the_checkpoint(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, 5, CPU_SHORTAGE)
        with pytest.raises(RunError, match=r"out of memory in step 5: (.|\n)*last good checkpoint is .*00000003"):
            runs.train(runs.tiny_config(corpus), tmp_path)
    assert saved(tmp_path) == ["00000003"]
    assert runs.train(runs.tiny_config(corpus), tmp_path)[0] == 0
    assert runs.trained(tmp_path)[0].train.steps == 8


def test_another_failure_is_no_shortage(corpus, tmp_path, monkeypatch):
    failing(monkeypatch, 1, "INTERNAL: a bug")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        runs.train(runs.tiny_config(corpus), tmp_path)


DOUBLING = """
import pathlib, resource, sys
import psutil, runs
from jaxllm import commandline, programs
from jaxllm.errors import RunError

compile_ = programs.Program.compile

def limited(self):
    made = compile_(self)
    if self.name == "eval_step":  # all is compiled: the arrays of the steps get so much and no more
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 300 * 2**20, -1))
    return made

programs.Program.compile = limited
# All logits of a step at one time: 200 kB a token.
make = lambda batch, **more: runs.tiny_config(
    {corpus!r}, train_batch_size=batch, model_vocab_size=50_000, train_steps=1, eval_batches=1, **more
)

def attempt(config, name):
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    try:
        return runs.train(config, pathlib.Path({folder!r}) / name)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

batch = 4
try:
    while batch < 512:
        assert attempt(make(batch), str(batch)) == 0
        print("ran", batch)
        batch *= 2
except RunError as error:
    text = str(error)
print("failed at", batch)
change = next(line for line in text.splitlines() if "one change that would fit" in line)
more = {{}}
for word in change.split():
    if word.startswith("--config."):
        path, value = word.removeprefix("--config.").split("=")
        more[path.replace(".", "_", 1)] = int(value) if value.isdigit() else value
print("with", more, attempt(make(batch, **more), "changed"))
print(text)
commandline.run(lambda: (_ for _ in ()).throw(RunError(text)), ["x"])
"""


@pytest.mark.slow
def test_the_batch_is_doubled_until_memory_runs_out_and_the_advice_then_runs(corpus, tmp_path):
    """Runs out of memory for real under an address-space limit (metatensor/metatrain#748, jax#13428)."""
    done = runs.python(DOUBLING.format(corpus=corpus, folder=str(tmp_path)))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ran 4" in done.stdout
    assert "Traceback" not in done.stderr
    printed = done.stderr[done.stderr.index("error: out of memory") :]
    assert "in step 1" in printed.splitlines()[0]
    assert "logits" in next(line for line in printed.splitlines() if "largest rows" in line)
    changed = next(line for line in done.stdout.splitlines() if line.startswith("with "))
    assert changed.endswith(" 0"), "what it advises fits and runs"
