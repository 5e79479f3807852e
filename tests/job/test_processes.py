"""Multi-process jobs on this machine: identical training, one writer, a common end."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import compiler
import jax
import numpy as np
import pytest
import runs

from jaxllm.errors import UserError
from jaxllm.job import distributed
from jaxllm.job.distributed import Job
from jaxllm.job.stop_signals import StopSignals
from jaxllm.train import batch_rows, metrics

STEPS = 60
CONFIG = """
import runs

def get_config():
    return runs.tiny_config(
        {corpus!r}, data_streams=4, train_batch_size=8, mesh_data=8, mesh_zero=1, train_steps={steps},
        checkpoint_every=10, checkpoint_keep=9,
    )
"""


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


class JobOnThisMachine:
    """Runs `processes` commands that divide the 8 devices among them."""

    def __init__(self, folder, processes, *arguments, workdir="run"):
        self.workdir = folder / workdir
        port = free_port()
        environment = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // processes} {compiler.FAST}",
            "PYTHONUNBUFFERED": "1",
        }
        command = ["-m", "jaxllm.train", f"--config={folder / 'c.py'}", f"--workdir={self.workdir}"]
        command += [f"--coordinator=localhost:{port}", f"--processes={processes}", *arguments]
        self.processes = [runs.started([*command, f"--process={i}"], **environment) for i in range(processes)]

    def finish(self, seconds=600):
        """Returns [(status, standard output, standard error)], one per process."""
        try:
            results = [process.communicate(timeout=seconds) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [(process.returncode, *texts) for process, texts in zip(self.processes, results, strict=True)]

    def wait_for(self, step):
        path = self.workdir / "checkpoints" / f"{step:08d}"
        while not path.exists():
            assert all(process.poll() is None for process in self.processes), self.finish()
            time.sleep(0.05)


def steps_of(workdir):
    return [record for record in metrics.read(workdir / "metrics.jsonl") if record["kind"] == "step"]


def write_config(folder, corpus, steps=STEPS):
    (folder / "c.py").write_text(CONFIG.format(corpus=corpus, steps=steps))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("corpus"), files=24)


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    """Runs two processes with four devices each, without interruption."""
    folder = tmp_path_factory.mktemp("two")
    write_config(folder, corpus)
    job = JobOnThisMachine(folder, 2)
    return folder, job.workdir, job.finish()


def test_one_writer(two):
    _, workdir, results = two
    assert [status for status, *_ in results] == [0, 0], results
    assert "step 60/60" in results[0][1]
    assert results[1][1] == results[1][2] == "", "a process beside the first says nothing"
    assert [r["step"] for r in steps_of(workdir)] == list(range(1, STEPS + 1))
    assert len([r for r in metrics.read(workdir / "metrics.jsonl") if r["kind"] == "eval"]) == 1
    places = sorted(path.name for path in (workdir / "checkpoints" / f"{STEPS:08d}" / "data").iterdir())
    assert places == ["0.json", "1.json", "2.json", "3.json"]


@pytest.mark.slow
def test_losses_of_one_process(two, corpus, tmp_path):
    namespace = {}
    exec(CONFIG.format(corpus=corpus, steps=STEPS), namespace)
    status, text = runs.train(namespace["get_config"](), tmp_path)
    assert status == 0, text
    for kind in ("step", "eval"):
        found = [
            [r["loss"] for r in metrics.read(workdir / "metrics.jsonl") if r["kind"] == kind]
            for workdir in (tmp_path, two[1])
        ]
        assert found[1] == pytest.approx(found[0], abs=1e-5)
    other = [r["loss"] for r in steps_of(tmp_path)]
    assert other[5] != pytest.approx(other[6], abs=1e-5), "losses so near would prove nothing"


@pytest.mark.slow
def test_four_processes_go_on_where_two_stood(two, tmp_path):
    folder, workdir, _ = two
    shutil.copy(folder / "c.py", tmp_path)
    shutil.copytree(workdir / "checkpoints" / "00000050", tmp_path / "run" / "checkpoints" / "00000050")
    job = JobOnThisMachine(tmp_path, 4)
    results = job.finish()
    assert [status for status, *_ in results] == [0] * 4, results
    assert "after step 50" in results[0][1]
    want = [r["loss"] for r in steps_of(workdir) if r["step"] > 50]
    assert [r["loss"] for r in steps_of(job.workdir) if r["step"] > 50] == pytest.approx(want, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_process_ends_the_job_and_the_restart_is_exact(two, tmp_path, victim):
    folder, workdir, _ = two
    shutil.copy(folder / "c.py", tmp_path)
    job = JobOnThisMachine(tmp_path, 2)
    job.wait_for(10)
    job.processes[victim].send_signal(signal.SIGKILL)
    status, _, errors = job.finish()[1 - victim]
    assert status == 1, errors
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors
    assert f"lost process {victim} of 2" in lines[0]
    assert re.search(r"the last good checkpoint is \S+/000000\d0; run the same command again", lines[0])
    assert "Traceback" not in errors
    if victim == 0:
        return  # one restart is sufficient
    results = JobOnThisMachine(tmp_path, 2).finish()
    assert [status for status, *_ in results] == [0, 0], results
    assert "resuming" in results[0][1]
    _, got = runs.trained(job.workdir)
    _, want = runs.trained(workdir)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert [r["loss"] for r in steps_of(job.workdir)] == [r["loss"] for r in steps_of(workdir)]


@pytest.mark.slow
def test_an_error_of_one_process_and_a_signal_to_one(corpus, tmp_path):
    write_config(tmp_path, corpus, steps=100000)
    job = JobOnThisMachine(tmp_path, 2)
    job.wait_for(10)
    job.processes[1].send_signal(signal.SIGTERM)
    results = job.finish()
    assert [status for status, *_ in results] == [128 + signal.SIGTERM] * 2, results
    step = int(re.search(r"SIGTERM: saved after step ([\d,]+)", results[0][1])[1].replace(",", ""))
    assert steps_of(job.workdir)[-1]["step"] == step

    text = (tmp_path / "c.py").read_text()
    (tmp_path / "c.py").write_text(
        text.replace("import runs", "import runs, sys", 1).replace(
            repr(corpus), f"'/nowhere/*' if '--process=1' in sys.argv else {corpus!r}"
        )
    )
    results = JobOnThisMachine(tmp_path, 2, workdir="other").finish()
    assert [status for status, *_ in results] == [1, 2], results
    assert "process 1 failed: config.data.path '/nowhere/*' matches no file" in results[0][2]
    assert results[1][2].count("\n") == 1


WITHOUT_SERVICE = """
import threading
from jaxllm.job.distributed import Job
from jaxllm.job.watchdog import Watchdog

class Gone:
    def __getattr__(self, name):
        raise RuntimeError("UNAVAILABLE: Connection reset by peer")

watchdog = Watchdog(Job({index}, 2, Gone()))
for _ in range({aborts}):
    threading.Thread(target=watchdog._report_abort).start()
watchdog.report_failure({error}, "a line")
print("went on")
"""


@pytest.mark.parametrize("aborts", [0, 3])
def test_a_failed_collective_where_process_0_is_gone(aborts):
    """One message, whichever thread detects it first: the collective's, the watching one, or the aborting library's."""
    script = WITHOUT_SERVICE.format(index=1, aborts=aborts, error="RuntimeError('Gloo AllGather failed')")
    ran = subprocess.run([sys.executable, "-c", script], env=runs.environment(), capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stdout == "", "the command would print the collective's traceback"
    assert re.fullmatch(r"error: lost process 0 of 2.*\n", ran.stderr), ran.stderr


@pytest.mark.parametrize(
    ("index", "error"), [(0, "RuntimeError('Gloo AllGather failed')"), (1, "FileNotFoundError('corpus')")]
)
def test_other_errors_without_the_service_are_not_blamed_on_process_0(index, error):
    script = WITHOUT_SERVICE.format(index=index, aborts=0, error=error)
    ran = subprocess.run([sys.executable, "-c", script], env=runs.environment(), capture_output=True, text=True)
    assert ran.stdout == "went on\n"
    assert ran.stderr == "(could not notify the other processes: RuntimeError)\n"


class Service:
    """In-memory key-value store of a coordination service."""

    def __init__(self):
        self.keys, self.lock = {}, threading.Lock()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.lock:
            self.keys[key] = value

    def key_value_dir_get(self, folder):
        with self.lock:
            return [(key, value) for key, value in self.keys.items() if key.startswith(folder)]


def stop_steps(count, signalled):
    """Returns the last step of each of `count` processes, at different speeds, after a signal to one of them."""
    service, ends, reached = Service(), {}, {}

    def run(index):
        stop = StopSignals(Job(index, count, service))
        done = threading.Event()

        def look():
            while not done.wait(0.002):
                stop.poll()

        watching = threading.Thread(target=look)
        watching.start()
        for step in range(1, 20_000):
            stop.begin(step)
            time.sleep(0.001 * (index + 1))
            if index == signalled and step == 20:
                stop._receive_for_test(signal.SIGTERM)
                reached.update(progress)
            progress[index] = step
            if stop.after(step):
                ends[index] = step
                break
        time.sleep(0.1)  # process 0 ends last
        done.set()
        watching.join()

    progress = {}
    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "waits for ever"
    return ends, reached


@pytest.mark.parametrize("signalled", [0, 2, 3])
def test_a_signal_to_one_process_stops_all_after_the_same_step(monkeypatch, signalled):
    # Only main threads can have signal handlers; these processes are threads.
    monkeypatch.setattr(StopSignals, "_receive_for_test", lambda self, n: setattr(self, "_received", n), raising=False)
    ends, reached = stop_steps(4, signalled)
    assert set(ends) == {0, 1, 2, 3}
    assert len(set(ends.values())) == 1, ends
    assert len(set(reached.values())) > 1, "at other steps when the signal came: each by itself would stop elsewhere"


def test_streams_of_processes():
    halves = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
    assert batch_rows.streams_of_processes(halves, 8, 2) == {0: [0], 1: [1]}
    assert batch_rows.streams_of_processes(halves, 8, 8) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    with pytest.raises(UserError, match=r"config.data.streams \(1\).*2 shards.*2 processes.*--config.data.streams=2"):
        batch_rows.streams_of_processes(halves, 8, 1)
    # Two processes that differ only along `tensor` read the same rows, and one of them saves the position.
    both = {0: frozenset(range(8)), 1: frozenset(range(8))}
    found = batch_rows.streams_of_processes(both, 8, 1)
    assert found == {0: [0], 1: [0]}
    assert [batch_rows.owned_streams(found, process) for process in (0, 1)] == [[0], []]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("here:1", None, 0, False), "missing --processes"),
        ((None, 2, None, False), "missing --coordinator, --process"),
        (("here", 2, 0, False), "HOST:PORT"),
        (("here:1", 2, 2, False), "between 0 and 1"),
        (("here:1", 0, 0, False), "at least 1"),
    ],
)
def test_bad_descriptions_of_a_job(arguments, words):
    with pytest.raises(UserError, match=words):
        distributed.join(*arguments)


def test_no_cluster_to_detect(monkeypatch):
    def none(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", none)
    with pytest.raises(UserError, match=r"found no cluster.*--coordinator HOST:PORT"):
        distributed.join(None, None, None, True)
