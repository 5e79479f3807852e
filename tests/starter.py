"""Starts commands by forking a process with all libraries imported, since imports dominate a small command's time.

Each child is forked before JAX starts a backend or a thread. It has its own `__main__` and exits like any interpreter.
`python tests/starter.py` reads JSON requests, one per line, and answers each with one line.
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

COMMANDS = ("__main__",)  # they define flags, so they are imported only once, when they run


class Started:
    """Handle of a started command, like `subprocess.Popen`; its output goes to files."""

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
        """Waits and returns (standard output, standard error).

        Raises:
            subprocess.TimeoutExpired: The command has not ended after `timeout` seconds.
        """
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
    """Server process that forks commands, all with one environment."""

    def __init__(self, environment: dict[str, str], cwd: pathlib.Path):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, __file__], env=environment, cwd=cwd, text=True, **pipes)
        atexit.register(self._process.kill)

    def ask(self, asked: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, arguments: list[str]) -> Started:
        """Starts `python <arguments>`, which are `-m module …` or `-c code …`."""
        return Started(self, {"arguments": arguments})


@functools.cache
def _starter(environment: frozenset[tuple[str, str]], cwd: pathlib.Path) -> Starter:
    return Starter(dict(environment), cwd)


def start(arguments: list[str], environment: dict[str, str], cwd: pathlib.Path) -> Started:
    """Starts a command in a server with this environment, ignoring pytest's own variables."""
    variables = frozenset((name, value) for name, value in environment.items() if not name.startswith("PYTEST_"))
    return _starter(variables, cwd).start(arguments)


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
    """Answers requests until the input ends; in a forked child, returns the arguments to run."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output printed by libraries must not mix with the answers
    for line in sys.stdin:
        asked = json.loads(line)
        if "pid" in asked:
            found, status = os.waitpid(asked["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            with warnings.catch_warnings():  # about threads, of which none exist yet
                warnings.simplefilter("ignore")
                answer = os.fork()
            if not answer:
                for number, path in zip((1, 2), asked["files"], strict=True):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                answers.close()
                return asked["arguments"]
        print(json.dumps(answer), file=answers, flush=True)
    return None


def _import_all() -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # for NumPy, read once: the only threads that an import starts
    import jaxllm  # slow, and not needed by clients of this module

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
