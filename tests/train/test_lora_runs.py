"""Runs that train low-rank adapters, from start to sampling: resumption, merging, refusals and bills."""

import dataclasses
import io
import json
import shutil

import chats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from rich.console import Console

from jaxllm import architectures
from jaxllm.checkpoints import open_any
from jaxllm.config import ModelConfig
from jaxllm.errors import UserError
from jaxllm.interop import text as texts
from jaxllm.interop.huggingface import model as huggingface
from jaxllm.model import adapter_specs, specs
from jaxllm.train.trainer import Trainer

MODEL = dataclasses.replace(
    architectures.resolve(runs.tiny_config("").model),
    vocab_size=259,  # not divisible by two devices
    layers=2,
    kv_heads=2,
    rope_factor=1.0,
    rope_original_context=0,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Hugging Face folder with random weights, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("base") / "model"
    folder.mkdir()
    params = specs.initialize(specs.param_specs(MODEL), jax.random.key(5), jnp.float32)
    huggingface.export(folder, MODEL, params, np.dtype("float32"), shard_bytes=1 << 30, text=chats.text())
    texts.save(chats.text(begins=True), folder)
    return folder


def config(source, folder, **fields):
    chats.write(folder, [{"prompt": f"say {n}", "answer": "ab" * (1 + n % 5)} for n in range(40)])
    made = runs.tiny_config(str(folder / "c.jsonl"), data_source="chat", data_sequence_length=64)
    made.model, made.init_from = ModelConfig(), str(source)
    made.train.steps, made.checkpoint.every, made.optimizer.peak_lr = 3, 2, 0.05
    made.lora.rank, made.lora.targets = 4, ("q", "v", "down")
    for name, value in fields.items():
        section, _, field = name.partition("_")
        setattr(getattr(made, section), field, value)
    return made


def run(config, workdir):
    """Trains, and returns (printed output, losses of the steps)."""
    out = io.StringIO()
    assert Trainer(config, workdir, Console(file=out, width=200)).run() == 0
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return out.getvalue(), [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    return folder / "run", *run(config(source, folder), folder / "run")


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


def test_a_run_trains_adapters_and_the_ledger_is_exact(plain):
    workdir, printed, losses = plain
    assert losses[-1] < losses[0]
    stored_ledger = json.loads((workdir / "ledger.json").read_text())
    numbers = sum(x.size for x in arrays(open_any.open_adapters(workdir).load()))
    assert stored_ledger["trained_parameters"] == numbers
    assert stored_ledger["parameters"] == numbers + specs.parameter_count(MODEL)
    assert f"({numbers:,} trained)" in " ".join(printed.split())
    for line in ("weights", "optimizer", "persistent", "activations"):
        columns = {column: stored_ledger["columns"][column][line] for column in ("formula", "trace", "device")}
        figures = {value for value in columns.values() if isinstance(value, int)}
        assert len(figures) == 1, (line, columns)
    rows = {row["name"]: row["bytes_per_device"] for row in stored_ledger["rows"] if row["phase"] == "persistent"}
    assert rows["LoRA adapters"] == 4 * numbers
    assert rows["frozen weights"] == 4 * specs.parameter_count(MODEL)
    assert rows["m, first moment"] == 4 * numbers


def test_a_checkpoint_has_what_is_trained_and_the_workdir_the_rest_once(plain, source):
    workdir = plain[0]
    sizes = {
        p.name: sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in workdir.iterdir() if p.is_dir()
    }
    assert {"frozen", "checkpoints"} <= sizes.keys()
    opened, base = open_any.open_any(str(workdir)), open_any.open_any(str(source))
    merged, weights = opened.load(jnp.float32), base.load(jnp.float32)
    stored = open_any.open_adapters(workdir)
    pairs = stored.load()
    for place, name in (("attn", "k"), ("mlp", "up")):  # not adapted
        assert same(merged["layers"][0][place][name], weights["layers"][0][place][name])
    pair = pairs["layers"][0]["mlp"]["down"]
    change = stored.lora.alpha / stored.lora.rank * np.einsum("lfr,lrd->lfd", pair["a"], pair["b"])
    want = np.asarray(weights["layers"][0]["mlp"]["down"]) + change
    np.testing.assert_allclose(merged["layers"][0]["mlp"]["down"], want, atol=1e-6)
    assert np.abs(change).max() > 1e-3
    half = opened.load(jnp.bfloat16)
    assert same(half, jax.tree.map(lambda x: x.astype(jnp.bfloat16), merged))


def test_resuming_is_exact_and_needs_no_source(plain, source, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(plain[0], workdir)
    shutil.rmtree(max((workdir / "checkpoints").glob("[0-9]*")))
    made = config(tmp_path / "gone", plain[0].parent)
    run(made, workdir)
    assert same(open_any.open_adapters(plain[0]).load(), open_any.open_adapters(workdir).load())
    for fields, word in (
        ({"lora_rank": 8}, "config.lora.rank was 4 and is now 8"),
        ({"lora_alpha": 1.0}, "config.lora.alpha was 16.0 and is now 1.0"),
        ({"lora_targets": ("q",)}, "config.lora.targets was"),
    ):
        with pytest.raises(UserError, match=word):
            run(config(source, plain[0].parent, train_steps=4, **fields), workdir)


def test_frozen_weights_that_are_damaged_are_reported(plain, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(plain[0], workdir)
    file = max((workdir / "frozen").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    made = config("gone", plain[0].parent, train_steps=5)
    with pytest.raises(UserError, match=r"cannot read the frozen base weights .*frozen: .* \(CRC-32 differs\)"):
        run(made, workdir)
    with pytest.raises(UserError, match=r"cannot read the frozen base weights"):
        open_any.open_any(str(workdir)).load(jnp.float32)
    shutil.rmtree(workdir / "frozen")
    with pytest.raises(UserError, match="the folder is missing"):
        run(made, workdir)


@pytest.mark.slow
def test_on_a_mesh_the_losses_are_the_same_and_it_goes_on_on_another(plain, source, tmp_path):
    made = config(source, tmp_path, mesh_data=2, mesh_tensor=2, mesh_zero=3, train_steps=2)
    run(made, tmp_path / "run")
    _, losses = run(config(source, tmp_path, mesh_data=2, mesh_zero=1), tmp_path / "run")
    np.testing.assert_allclose(losses[0], plain[2][0], rtol=1e-5)
    assert len(losses) == 3


def test_a_run_with_adapters_is_a_source_too(plain, tmp_path):
    made = config(plain[0], plain[0].parent, mesh_data=2, mesh_tensor=2, mesh_zero=3, train_steps=1)
    _, losses = run(made, tmp_path / "run")
    assert losses[0] < plain[2][0]


def oom_inspection(match, model=MODEL, **fields):
    made = runs.tiny_config("unused")
    made.model, made.init_from = architectures.explicit_config("m", model), "somewhere"
    made.lora.rank = 4
    for name, value in fields.items():
        setattr(made.lora, name, value)
    with pytest.raises(UserError, match=match):
        architectures.resolve_config(made)


def test_refusals(source, tmp_path):
    oom_inspection(r"has the unknown projection 'w'; did you mean '\w+'\?", targets=("q", "w"))
    oom_inspection(
        r"has 'gate', but config.model.mlp 'gelu' has no gate projection",
        dataclasses.replace(MODEL, mlp="gelu"),
        targets=("gate",),
    )
    experts = dataclasses.replace(MODEL, experts=4, experts_per_token=2)
    oom_inspection(r"has 'up', but a mixture of 4 experts", experts, targets=("q", "up"))
    oom_inspection(r"config.lora.rank \(17\) exceeds the smaller dimension of q \(16\)", rank=17)
    oom_inspection(r"config.lora.alpha is 0.0; it must be positive", alpha=0.0)
    oom_inspection(r"config.lora.alpha is nan", alpha=float("nan"))
    oom_inspection(r"each projection once", targets=("q", "q"))
    oom_inspection(r"each projection once", targets=())
    oom_inspection(r"config.lora.rank is -1; it must be at least 0", rank=-1)
    made = config(source, tmp_path)
    made.init_from = ""
    with pytest.raises(UserError, match=r"config.lora.rank is 4, but config.init_from is empty"):
        open_any.prepare(made, tmp_path / "none")


def test_the_command_line_takes_a_list_and_the_ledger_bills_it(tmp_path):
    (tmp_path / "c.py").write_text("from jaxllm.config import Config\n\ndef get_config():\n    return Config()\n")
    arguments = [f"--config={tmp_path / 'c.py'}", "--config.model.name=llama3-8b", "--device=h100", "--json"]
    made = runs.command("jaxllm.ledger", *arguments, "--config.lora.rank=16", "--config.lora.targets=q,v,down")
    assert made.returncode == 0, made.stderr
    stored_ledger = json.loads(made.stdout)
    lora = dataclasses.replace(config("", tmp_path).lora, rank=16)
    model = architectures.ARCHITECTURES["llama3-8b"]
    trained = sum(
        spec.size for spec in jax.tree.leaves(adapter_specs.adapter_specs(model, lora), is_leaf=specs.is_spec)
    )
    # q: 4096·16 + 16·4096; v: 4096·16 + 16·1024; down: 14336·16 + 16·4096; 32 layers.
    assert stored_ledger["trained_parameters"] == trained == 32 * 16 * (2 * 4096 + 4096 + 1024 + 14336 + 4096)
    rows = {row["name"]: row["bytes_per_device"] for row in stored_ledger["rows"] if row["phase"] == "persistent"}
    assert rows["frozen weights"] == 2 * 8_030_261_248
    assert rows["LoRA adapters"] == 4 * trained
    wrong = runs.command("jaxllm.ledger", *arguments, "--config.lora.rank=16", "--config.lora.targets=q,values")
    assert wrong.returncode == 2
    assert "has the unknown projection 'values'" in wrong.stderr


@pytest.mark.slow
def test_a_start_that_was_killed_leaves_nothing_in_the_way(plain, source, tmp_path):
    """Frozen weights left by a run killed before its first checkpoint, complete or partial, are written again."""
    workdir = tmp_path / "run"
    for name in ("frozen", ".writing-frozen"):
        (workdir / name / "state").mkdir(parents=True)
        (workdir / name / "state" / "half").write_text("x")
    _, losses = run(config(source, plain[0].parent), workdir)
    assert losses == plain[2]
    assert not (workdir / ".writing-frozen").exists()
    assert not (workdir / "frozen" / "state" / "half").exists()


def test_adapters_are_written_alone_and_sampled_beside_their_model(plain, source, tmp_path):
    """Adapters are exported alone; the workdir and the base model with the PEFT folder sample the same tokens."""
    out = tmp_path / "adapter"
    done = runs.command("jaxllm.convert", f"--model={plain[0]}", "--to=peft", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    stored_ledger = json.loads((out / "adapter_config.json").read_text())
    assert (stored_ledger["r"], stored_ledger["lora_alpha"], stored_ledger["base_model_name_or_path"]) == (
        4,
        16.0,
        str(source),
    )
    assert stored_ledger["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    asked = ["--prompt=say 3", "--temperature=0", "--max_new_tokens=12", "--json", "--ignore_eos"]
    texts_of = []
    for more in ([f"--model={plain[0]}"], [f"--model={source}", f"--adapter={out}"], [f"--model={source}"]):
        made = runs.command("jaxllm.sample", *more, *asked)
        assert made.returncode == 0, made.stderr
        texts_of.append(json.loads(made.stdout)["results"][0]["tokens"])
    assert texts_of[0] == texts_of[1] != texts_of[2]
    wrong = runs.command("jaxllm.convert", f"--model={source}", "--to=peft", f"--out={tmp_path / 'no'}")
    assert wrong.returncode == 2
    assert len(wrong.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "no").exists()
