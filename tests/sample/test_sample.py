"""The sampling command, from a trained workdir to its text and JSON output."""

import json

import compiler
import jax
import pytest
import runs

from jaxllm import commandline


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
    bill = with_cache.stderr
    for part in ("ledger: llama3.2-1b (modified), ", "2 × 64 tokens", "weights ", "KV cache, full ", "fits: needs "):
        assert part in bill, part
    assert "attention: of prompts xla, chunk by chunk; of new tokens xla (no Pallas kernels for cpu)" in bill
    measured = next(line for line in bill.splitlines() if line.startswith("ledger: measured: "))
    assert measured.count("B (as billed)") == 2, "weights and cache are what the formulas say, to the byte"
    assert "prefill peak" in measured
    assert "decode peak" in measured
    assert bill.index("fits: needs") < bill.index("ledger: measured")
    without = runs.command("jaxllm.sample", *arguments, "--no_cache")
    assert json.loads(without.stdout)["results"] == answer["results"]
    assert "KV cache" not in without.stderr, "what is not there is not billed"
    assert "tokens so far" in without.stderr
    assert "decode peak" in without.stderr


def test_a_cache_in_int8_is_half_as_large_and_billed_so(workdir):
    arguments = [f"--model={workdir}", "--prompt=alpha ", "--max_new_tokens=8", "--json", "--cache_dtype=int8"]
    done = runs.command("jaxllm.sample", *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["tokens"]
    measured = next(line for line in done.stderr.splitlines() if line.startswith("ledger: measured: "))
    assert measured.count("B (as billed)") == 2
    assert "KV cache scales, full " in done.stderr
    refused = runs.command("jaxllm.sample", *arguments, "--no_cache")
    assert refused.returncode == 2
    assert "--no_cache cannot be combined with --cache_dtype=int8" in refused.stderr


def test_several_devices_give_the_tokens_of_one(workdir):
    arguments = ["-m", "jaxllm.sample", f"--model={workdir}", "--prompt=alpha ", "--prompt=be", "--prompt=c", "--json"]
    arguments += ["--max_new_tokens=8", "--ignore_eos"]
    eight = {"XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {compiler.FAST}"}
    processes = [runs.started(arguments), runs.started([*arguments, "--mesh=data=2,tensor=2"], **eight)]
    (alone, _), (sharded, bill) = (process.communicate() for process in processes)
    assert [process.returncode for process in processes] == [0, 0], bill
    assert json.loads(sharded)["results"] == json.loads(alone)["results"]
    assert bill.count("B (as billed)") == 2
    assert "on each of 4 × " in bill


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
        (["--model={workdir}/nowhere", "--prompt=x"], "not found"),
        (["--model={workdir}", "--prompt=x", "--temperature=-1"], "temperature"),
        (["--model={workdir}", "--prompt=x", "--mesh=tensor=64"], "--mesh tensor=64 needs 64 devices"),
        (["--model={workdir}", "--prompt=x", "--mesh=4"], "--mesh is '4'"),
        (["--model={workdir}", "--prompt=x", "--quantize=int3"], "--quantize is 'int3'"),
        (["--model={workdir}", "--prompt=x", "--group=64"], "--group goes with --quantize"),
        (["--model={workdir}", "--prompt=x", "--quantize=awq-int4"], "needs a text for --calibration"),
        (["--model={workdir}", "--prompt=x", "--quantize=int4", "--group=128"], "do not divide; give --group"),
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


REFUSED = """
import dataclasses, sys
from jaxllm import commandline
from jaxllm.checkpoints import arrays
from jaxllm.hardware import detect
from jaxllm.sample import __main__ as sample

small = dataclasses.replace(detect.this_machine(), memory_bytes={memory})
detect.this_machine = lambda: small

def restore_params(folder, abstract):
    raise AssertionError("nothing is read or allocated before the refusal")

arrays.restore_params = restore_params
commandline.run(sample.main, ["x", "--model={workdir}", *["--prompt=alpha"] * 64])
"""


def test_prompts_that_do_not_fit_are_refused_before_anything_is_allocated(workdir):
    """The error reports how many prompts fit, and that many run; the machine has room for a few of 64."""
    done = runs.python(REFUSED.format(workdir=workdir, memory=400_000))
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: does not fit: 64 sequences of 64 tokens need ")
    assert " of 390.62 KiB, " in line
    assert "the largest that fits: " in line
    most = int(line.split("the largest that fits: ")[1].split()[0])
    assert 1 <= most < 64


def test_memory_that_runs_out_while_sampling_is_explained(workdir):
    code = f"""
import jax
from jaxllm import commandline
from jaxllm.engine import generator
from jaxllm.sample import __main__ as sample

def fails(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.")

generator.Generator._start = fails
commandline.run(sample.main, ["x", "--model={workdir}", "--prompt=alpha"])
"""
    done = runs.python(code)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    message = done.stderr[done.stderr.index("error: out of memory while sampling: RESOURCE_EXHAUSTED") :]
    for part in ("predicted peak: ", "largest rows: ", "used by others"):
        assert part in message


def folder_of(workdir, tmp_path_factory):
    """Exports the run's model to a Hugging Face folder."""
    out = tmp_path_factory.mktemp("converted") / "folder"
    done = runs.command("jaxllm.convert", f"--model={workdir}", "--to=safetensors", f"--out={out}")
    assert done.returncode == 0, done.stderr
    return out


def test_a_folder_gives_what_the_workdir_gives(workdir, tmp_path_factory):
    """A run and its export give equal text; the bill is printed first, and the weights use the billed bytes."""
    folder = folder_of(workdir, tmp_path_factory)
    arguments = ["--prompt=alpha ", "--max_new_tokens=8", "--temperature=0", "--json", "--ignore_eos"]
    run, exported = (runs.command("jaxllm.sample", f"--model={model}", *arguments) for model in (workdir, folder))
    assert exported.returncode == 0, exported.stderr
    assert json.loads(exported.stdout)["results"] == json.loads(run.stdout)["results"]
    assert "ledger: folder, " in exported.stderr
    measured = next(line for line in exported.stderr.splitlines() if line.startswith("ledger: measured: "))
    assert measured.count("B (as billed)") == 2


def test_the_files_end_ids_end_a_text(workdir, tmp_path_factory):
    """Every end id of generation_config.json ends a text (the test declares the first generated token an end id)."""
    folder = folder_of(workdir, tmp_path_factory)
    arguments = [f"--model={folder}", "--prompt=alpha ", "--max_new_tokens=8", "--temperature=0", "--json"]
    before = json.loads(runs.command("jaxllm.sample", *arguments).stdout)["results"][0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, before["tokens"][0]]}))
    after = json.loads(runs.command("jaxllm.sample", *arguments).stdout)["results"][0]
    assert (len(before["tokens"]) > 1, after["reason"], len(after["tokens"])) == (True, "end", 1)


def test_a_folder_without_a_tokenizer_is_reported(workdir, tmp_path_factory):
    folder = folder_of(workdir, tmp_path_factory)
    (folder / "tokenizer.json").unlink()
    done = runs.command("jaxllm.sample", f"--model={folder}", "--prompt=x")
    assert done.returncode == 2
    assert "has no tokenizer.json" in done.stderr


def test_compiled_programs_are_kept_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    try:
        commandline.keep_compiled_programs()
        (folder,) = (tmp_path / "jaxllm" / "compiled").iterdir()
        assert jax.config.jax_compilation_cache_dir == str(folder)
        jax.config.update("jax_compilation_cache_dir", before)
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")  # the user's choice: nothing is kept
        commandline.keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir == before
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_quantized_weights_are_billed_to_the_byte(workdir, tmp_path):
    text = tmp_path / "calibration.txt"
    text.write_text("alpha beta gamma delta " * 400)
    arguments = [f"--model={workdir}", "--prompt=alpha ", "--max_new_tokens=4", "--json", "--ignore_eos"]
    for quantize in (["--quantize=int8"], ["--quantize=gptq-int4", "--group=channel", f"--calibration={text}"]):
        done = runs.command("jaxllm.sample", *arguments, *quantize)
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["results"][0]["tokens"]) == 4
        assert "scales " in done.stderr
        measured = next(line for line in done.stderr.splitlines() if line.startswith("ledger: measured: "))
        assert measured.count("B (as billed)") == 2
