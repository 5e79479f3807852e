"""Commands started by the fork server end as those that a user starts."""

import signal
import subprocess
import sys

import pytest
import runs


@pytest.mark.parametrize(
    "arguments",
    [
        ["jaxllm.sample", "--promt=x"],
        pytest.param(["jaxllm.train", "--help"], marks=pytest.mark.slow),
        pytest.param(["jaxllm.ledger", "--config=nowhere.py"], marks=pytest.mark.slow),
        pytest.param(["jaxllm.plan", "--help"], marks=pytest.mark.slow),
        pytest.param(["jaxllm.convert"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_command_prints_what_it_prints_by_itself(arguments):
    words = [sys.executable, "-m", *arguments]
    alone = subprocess.run(words, env=runs.environment(), capture_output=True, text=True, cwd=runs.ROOT)
    started = runs.command(*arguments)
    assert (started.returncode, started.stdout, started.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert started.stdout or started.stderr


def test_nothing_of_one_is_left_for_the_next():
    first = runs.python(
        "import os, jaxllm.config\njaxllm.config.LEFT = os.environ['LEFT'] = 'x'\nprint(__name__, 1 / 0)"
    )
    assert first.returncode == 1
    assert first.stderr.endswith("ZeroDivisionError: division by zero\n")
    second = runs.python("import os, jaxllm.config\nprint(hasattr(jaxllm.config, 'LEFT'), 'LEFT' in os.environ)")
    assert (second.returncode, second.stdout) == (0, "False False\n")


def test_several_at_once_and_a_signal():
    one, other = (runs.started(["-c", f"import time; time.sleep({seconds}); print(1)"]) for seconds in (3600, 0))
    assert other.communicate(600) == ("1\n", "")
    assert one.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.communicate(0.1)
    one.send_signal(signal.SIGKILL)
    one.communicate(600)
    assert one.returncode == -signal.SIGKILL
    one.send_signal(signal.SIGKILL)  # signalling a process that has ended has no effect


def test_the_environment_is_the_callers():
    one = runs.started(
        ["-c", "import os, jax; print(os.environ['OWN'], jax.config.jax_enable_x64)"], JAX_ENABLE_X64="1", OWN="a"
    )
    assert one.communicate(600) == ("a True\n", "")
