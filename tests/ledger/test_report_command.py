"""The report command: its files, both tasks together, its contract and exit statuses."""

import json
import subprocess

import pytest
import runs

COMMAND = ["jaxllm.ledger", "--config", "configs/llama3_8b.py", "--device", "h100"]


def run(*more: str) -> subprocess.CompletedProcess[str]:
    return runs.command(*COMMAND, *more)


def test_both_tasks_are_one_json_object_of_two_ledgers():
    done = run("--task", "both", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert list(printed) == ["train", "infer"]
    assert (printed["train"]["task"], printed["infer"]["task"]) == ("train", "infer")
    assert (printed["train"]["count"], printed["infer"]["count"]) == (8, 1)
    assert printed["infer"]["peak_bytes_per_device"] < printed["train"]["peak_bytes_per_device"] * 8


@pytest.mark.parametrize("flag", ["--html", "--png"])
def test_an_output_that_cannot_be_written_is_one_line(flag, tmp_path):
    done = run(flag, str(tmp_path / "missing" / "file"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {flag} ")
    assert done.stderr.count("\n") == 1
