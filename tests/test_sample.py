"""The sampling command, from a trained workdir to what a person or a program reads."""

import json

import pytest
import runs


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    config = runs.tiny_config(runs.write_corpus(folder / "corpus"), train_steps=2)
    runs.train(config, folder / "run")
    return folder / "run"


def test_json_is_one_object_and_no_cache_gives_the_same_tokens(workdir):
    arguments = [
        f"--model={workdir}",
        "--prompt=alpha ",
        "--prompt=be",
        "--max_new_tokens=12",
        "--json",
        "--ignore_eos",
    ]
    with_cache = runs.command("jaxllm.sample", *arguments)
    assert with_cache.returncode == 0, with_cache.stderr
    answer = json.loads(with_cache.stdout)
    assert [result["prompt"] for result in answer["results"]] == ["alpha ", "be"]
    assert [len(result["tokens"]) for result in answer["results"]] == [12, 12]
    assert {result["reason"] for result in answer["results"]} == {"length"}
    assert answer["times"]["first_token"] > 0
    assert "fits: needs" in with_cache.stderr, "the bill comes before the tokens"
    without = runs.command("jaxllm.sample", *arguments, "--no_cache")
    assert json.loads(without.stdout)["results"] == answer["results"]


def test_live_text_and_times_apart(workdir):
    done = runs.command(
        "jaxllm.sample", f"--model={workdir}", "--prompt=alpha", "--max_new_tokens=5", "--temperature=0"
    )
    assert done.returncode == 0, done.stderr
    assert "first token" in done.stderr
    assert "tokens/s" in done.stderr
    assert "first token" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt=x"], "--model"),
        (["--model={workdir}"], "--prompt"),
        (["--model={workdir}", "--prompt="], "--prompt is empty"),
        (["--model={workdir}", "--prompt=" + "long " * 30], "context_length"),
        (["--model={workdir}/nowhere", "--prompt=x"], "not the workdir"),
        (["--model={workdir}", "--prompt=x", "--temperature=-1"], "temperature"),
        (["--model={workdir}", "--prompt=x", "--top_q=1"], "--top_p"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(workdir, arguments, words):
    done = runs.command("jaxllm.sample", *(argument.format(workdir=workdir) for argument in arguments))
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert words in lines[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
