"""Starts commands from one process that has imported their libraries already, which is most of a small command's time.

A child is forked for each, before JAX has started a backend or a thread; it has its own `__main__`, and ends as any
interpreter does. `python tests/starter.py` reads requests as JSON, one a line, and answers each with one line.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pathlib
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from typing import Any

COMMANDS = ("__main__",)  # they define flags, and so are imported once: when they run


class Started:
    """A started command, as `subprocess.Popen` has it; what it prints goes into files."""

    def __init__(self, starter: "Starter", asked: dict[str, Any]):
        self._starter, self.returncode = starter, None
        self._folder = tempfile.TemporaryDirectory()
        self._files = [pathlib.Path(self._folder.name, name) for name in ("out", "err")]
        self.pid = starter.ask(asked | {"files": list(map(str, self._files))})

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._starter.ask({"pid": self.pid})
        return self.returncode

    def communicate(self, timeout: float = 3600) -> tuple[str, str]:
        """(standard output, standard error) once it has ended; an error after `timeout` seconds."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        out, err = (path.read_text() for path in self._files)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Starter:
    """The process that starts others, all with one environment."""

    def __init__(self, environment: dict[str, str], cwd: pathlib.Path):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, __file__], env=environment, cwd=cwd, text=True, **pipes)
        atexit.register(self._process.kill)

    def ask(self, asked: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, arguments: list[str]) -> Started:
        """`python <arguments>`, which are `-m module …` or `-c code …`."""
        return Started(self, {"arguments": arguments})


@functools.cache
def _starter(environment: frozenset[tuple[str, str]], cwd: pathlib.Path) -> Starter:
    return Starter(dict(environment), cwd)


def start(arguments: list[str], environment: dict[str, str], cwd: pathlib.Path) -> Started:
    """As `Starter.start`, by a starter that has this environment; pytest's own notes in it aside."""
    told = frozenset((name, value) for name, value in environment.items() if not name.startswith("PYTEST_"))
    return _starter(told, cwd).start(arguments)


def _run(arguments: list[str]) -> None:
    kind, what, *rest = arguments
    if kind == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


def _serve() -> list[str] | None:
    """Answers until there is no more to answer; in a child: what it is to run."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries may print is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        if "pid" in asked:
            found, status = os.waitpid(asked["pid"], os.WNOHANG)
            told = os.waitstatus_to_exitcode(status) if found else None
        else:
            with warnings.catch_warnings():  # of threads, which there are not yet
                warnings.simplefilter("ignore")
                told = os.fork()
            if not told:
                for number, path in zip((1, 2), asked["files"], strict=True):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                answers.close()
                return asked["arguments"]
        print(json.dumps(told), file=answers, flush=True)
    return None


def _import_all() -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's, and read once: the only threads that an import starts
    import jaxllm  # heavy, and of no use to who only asks this process

    for module in pkgutil.walk_packages(jaxllm.__path__, "jaxllm."):
        if module.name.rpartition(".")[2] not in COMMANDS:
            importlib.import_module(module.name)
    del os.environ["OPENBLAS_NUM_THREADS"]
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a child would have its threads' locks and not its threads"


if __name__ == "__main__":
    _import_all()
    mine = _serve()
    if mine is not None:
        _run(mine)
