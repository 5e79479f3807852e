"""The planning command, run as a user runs it."""

import importlib.util
import json
import shlex
import subprocess
import sys

import folders
import pytest
import runs

from jaxllm.plan.render import WIDTH

# One process for all: the output and exit status of a command for each list of arguments.
DRIVER = """
import contextlib, io, json, sys
from absl.testing import flagsaver
from jaxllm import commandline
from jaxllm.plan import __main__ as plan
commandline.define_config()
results = []
for argv in json.load(sys.stdin):
    out, err, status = io.StringIO(), io.StringIO(), None
    sys.argv = ["plan", *argv]  # where the fields of --config are looked for
    with flagsaver.flagsaver(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            commandline.run(plan.main)
        except SystemExit as exit:
            status = exit.code
    results.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""
TRAIN = ["--model=gpt2", "--task=train", "--device=l4", "--count=2", "--batch_size=8", "--confirm=0"]
FILE = ["--config=configs/gpt2_124m.py", "--task=train", "--device=h100", "--confirm=0"]
BARE = str(runs.ROOT / "tests" / "plan" / "bare.py")
WEIGHTS = "WEIGHTS"  # in an argument: a folder with a model
TYPED = [
    *(f"--config={BARE}", "--device=h100", "--confirm=0"),
    *(f"--config.init_from={WEIGHTS}", "--config.data.source=tokens", "--config.data.path=ids.bin"),
    "--config.data.sequence_length=64",
]
COMMANDS = {
    "train": TRAIN,
    "train json": [*TRAIN, "--json"],
    "file": [*FILE, "--json"],
    "typed train": [*TYPED, "--task=train", "--config.mesh.data=2", "--config.train.steps=7"],
    "typed infer": [*TYPED, "--task=infer", "--weights=bf16", "--cache=bf16", "--config.model.rope_theta=5000.0"],
    "infer": ["--model=llama3-8b", "--task=infer", "--device=l4", "--json"],
    "infer text": ["--model=llama3-8b", "--task=infer", "--device=l4", "--confirm=0"],
    "nothing": ["--model=llama3-70b", "--task=train", "--device=l4", "--count=1", "--batch_size=64", "--confirm=0"],
    "both": ["--model=gpt2", "--device=l4", "--batch_size=8"],
    "no run": ["--task=train"],
    "both runs": ["--model=gpt2", "--config=configs/gpt2_124m.py"],
    "model": ["--model=lama3-8b", "--task=train"],
    "task": ["--model=gpt2", "--task=training"],
    "device": ["--model=gpt2", "--task=train", "--device=h10"],
    "optimizer": ["--model=gpt2", "--task=train", "--device=l4", "--optimizer=adamv"],
    "precision": ["--model=gpt2", "--task=train", "--device=l4", "--precision=bf61"],
    "weights": ["--model=gpt2", "--task=infer", "--device=l4", "--weights=int44"],
    "tokens": ["--model=gpt2", "--task=train", "--device=l4", "--batch_tokens=1000"],
    "length": [*FILE, "--sequence_length=512"],
    "flag": ["--model=gpt2", "--modle=gpt2"],
    "divides": ["--model=gpt2", "--task=train", "--device=l4", "--count=7", "--batch_size=8"],
    "compiler": ["--model=gpt2", "--task=train", "--device=l4", "--batch_size=8", "--confirm=1"],
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    model = folders.FAMILIES["llama"]
    return folders.write(tmp_path_factory.mktemp("plan") / "a model", model, folders.random_tree(model))


@pytest.fixture(scope="module")
def results(weights):
    child = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(list(COMMANDS.values())).replace(WEIGHTS, str(weights)),
        capture_output=True,
        text=True,
        cwd=runs.ROOT,
        env=runs.environment(JAX_PLATFORMS="cpu"),
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return dict(zip(COMMANDS, json.loads(child.stdout), strict=True))


def test_training(results):
    status, out, _ = results["train"]
    assert status == 0
    assert "candidates evaluated" in out
    assert "--config.remat.policy=" in out
    assert max(map(len, out.splitlines())) <= WIDTH


def test_json_is_one_object_and_its_overrides_are_the_best(results):
    status, out, _ = results["train json"]
    plan = json.loads(out)
    assert status == 0
    assert {"task", "model", "device", "count", "judged", "fit", "seconds", "candidates", "best"} <= set(plan)
    assert plan["judged"] >= plan["fit"] > 0
    best, ledger = plan["candidates"][0], plan["best"]["ledger"]
    assert [f"--config.{path}={value}" for path, value in best["fields"].items()] == plan["best"]["overrides"][4:]
    assert ledger["peak_bytes_per_device"] == best["peak_bytes_per_device"] <= plan["budget_bytes"]
    assert ledger["compute"]["roofline_seconds"] == pytest.approx(best["step_seconds"])
    rates = [candidate["tokens_per_second"] for candidate in plan["candidates"]]
    assert rates == sorted(rates, reverse=True)


def test_the_overrides_make_that_bill(results):
    """The printed overrides, on a bare configuration file, give the same bill in jaxllm.ledger."""
    best = json.loads(results["train json"][1])["best"]
    bare = runs.ROOT / "tests" / "plan" / "bare.py"
    child = runs.command("jaxllm.ledger", f"--config={bare}", "--device=l4", "--json", *best["overrides"])
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout)["peak_bytes_per_device"] == best["ledger"]["peak_bytes_per_device"]


def test_of_a_file_model_data_and_optimizer_hold(results):
    status, out, _ = results["file"]
    plan = json.loads(out)
    assert status == 0
    assert plan["model"] == "gpt2"
    assert plan["tokens_per_step"] == 512 * 1024
    assert not any("optimizer.name" in override or "batch_size" in override for override in plan["best"]["overrides"])


def printed(out, module):
    """Returns the words of a printed command."""
    return shlex.split(out[out.index(f"python -m {module}") :].replace("\\\n", " ").splitlines()[0])


@pytest.mark.parametrize(("task", "modules"), [("train", ["ledger", "train"]), ("infer", ["ledger"])])
def test_what_the_person_has_typed_is_in_the_commands(results, weights, task, modules):
    status, out, err = results[f"typed {task}"]
    assert status == 0, err
    typed = {word.replace(WEIGHTS, str(weights)) for word in COMMANDS[f"typed {task}"] if word.startswith("--config.")}
    typed.discard("--config.mesh.data=2")  # the plan chooses it
    for module in modules:
        words = printed(out, f"jaxllm.{module}")
        assert typed <= set(words), (typed, words)
        assert len([word for word in words if word.startswith("--config.mesh.data=")]) <= 1
    if task == "infer":
        return
    words = printed(out, "jaxllm.ledger")
    child = runs.command(*words[2:], "--json")
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout)["model"] == str(weights)


def test_inference(results):
    status, out, _ = results["infer"]
    plan = json.loads(out)
    assert status == 0
    assert plan["candidates"][0]["peak_bytes"] <= plan["budget_bytes"]
    assert plan["best"]["ledger"]["peak_bytes_per_device"] == plan["candidates"][0]["peak_bytes"]


def test_the_best_way_to_sample_is_a_command_that_makes_that_bill(results):
    """The printed command gives the same bill on a bare file; the best plan here has integer weights."""
    status, out, _ = results["infer text"]
    assert status == 0
    words = shlex.split(out[out.index("python -m jaxllm.ledger") :].replace("\\\n", " "))
    assert [word for word in words if word.startswith("--weights=int")]
    words[words.index("FILE.py")] = str(runs.ROOT / "tests" / "plan" / "bare.py")
    child = runs.command(*words[2:], "--json")
    assert child.returncode == 0, child.stderr
    best = json.loads(results["infer"][1])["best"]["ledger"]
    printed_bill = json.loads(child.stdout)
    assert printed_bill["peak_bytes_per_device"] == best["peak_bytes_per_device"]
    assert printed_bill["rows"] == best["rows"]


def test_nothing_fits(results):
    status, out, _ = results["nothing"]
    assert status == 0
    for part in ("nothing fits", "over budget by", "largest rows", "would fit with more devices: --count="):
        assert part in out
    assert max(map(len, out.splitlines())) <= WIDTH


def test_without_a_task_both_bills_are_shown(results):
    status, out, _ = results["both"]
    assert status == 0
    for part in ("training", "inference", "master weights", "KV cache", "--task train", "--task infer"):
        assert part in out


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("no run", ["--model", "--config"]),
        ("both runs", ["--model", "--config"]),
        ("model", ["lama3-8b", "llama3-8b"]),
        ("task", ["training", "'train'"]),
        ("device", ["h10", "h100"]),
        ("optimizer", ["adamv", "'adam'"]),
        ("precision", ["bf61", "'bf16'"]),
        ("weights", ["int44", "'int4'"]),
        ("tokens", ["1000", "nearest: 1024"]),
        ("length", ["--sequence_length", "--config.data.sequence_length"]),
        ("flag", ["--modle", "--model"]),
        ("divides", ["8 sequences", "7 devices", "14"]),
    ],
)
def test_bad_input_is_one_line(results, command, parts):
    status, out, err = results[command]
    assert status == 2, (status, out, err)
    assert not out
    assert len(err.splitlines()) == 1
    assert all(part in err for part in parts), err


def test_a_compiler_that_is_not_there_is_named(results):
    """A missing compiler is named; if it is installed, the best plan is compiled."""
    status, out, err = results["compiler"]
    if importlib.util.find_spec("jax_cuda12_plugin"):
        assert (status, "compiled" in out) == (0, True), err
    else:
        assert (status, "jaxllm[cuda12]" in err) == (2, True), out
