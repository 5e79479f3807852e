"""Runs that start from pretrained weights: steps equal those from an in-memory tree on any mesh; bad input fails."""

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
import tokenizers
from rich.console import Console

from jaxllm import architectures, programs
from jaxllm.checkpoints import open_any
from jaxllm.config import Config, MeshConfig, ModelConfig, overrides
from jaxllm.errors import UserError
from jaxllm.interop import opening
from jaxllm.interop import text as texts
from jaxllm.interop.huggingface import model as huggingface
from jaxllm.model import specs
from jaxllm.parallel import mesh
from jaxllm.train.trainer import Trainer

RECORDS = [{"prompt": f"say {n}", "answer": "ab" * (1 + n % 5)} for n in range(40)]


def architecture():
    return architectures.resolve(runs.tiny_config("").model)


MODEL = dataclasses.replace(
    # 259 is not divisible by two devices.
    architecture(),
    vocab_size=259,
    layers=2,
    kv_heads=2,
    rope_factor=1.0,
    rope_original_context=0,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Hugging Face folder with random weights, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("source") / "model"
    folder.mkdir()
    params = specs.initialize(specs.param_specs(MODEL), jax.random.key(5), jnp.float32)
    huggingface.export(folder, MODEL, params, np.dtype("float32"), shard_bytes=1 << 30, text=chats.text())
    texts.save(chats.text(begins=True), folder)
    return folder


def config(source, folder, **fields):
    """Returns the configuration of a run that fine-tunes pretrained weights on conversations."""
    chats.write(folder, RECORDS)
    made = runs.tiny_config(str(folder / "c.jsonl"), data_source="chat", data_sequence_length=64, **fields)
    made.model = ModelConfig()
    made.init_from = str(source)
    made.optimizer.warmup_steps, made.train.steps, made.checkpoint.every = 0, 3, 2
    return made


def run(config, workdir):
    """Trains, and returns (printed output, losses of the steps)."""
    out = io.StringIO()
    assert Trainer(config, workdir, Console(file=out, width=200)).run() == 0
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return out.getvalue(), [line["loss"] for line in lines if line["kind"] == "step"]


def same(a, b):
    return all(
        np.array_equal(x, np.asarray(y)[tuple(map(slice, x.shape))])
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    """Trains three steps on one device, and returns (workdir, printed output, losses)."""
    folder = tmp_path_factory.mktemp("plain")
    return folder / "run", *run(config(source, folder), folder / "run")


def test_the_first_step_is_that_of_the_same_weights(source, tmp_path):
    made = open_any.prepare(config(source, tmp_path), tmp_path / "none").config
    model = architectures.resolve_config(made)
    assert model == dataclasses.replace(MODEL, init_std=model.init_std)
    over = mesh.make_mesh(made.mesh)
    step_spec = programs.make_step_spec(made, model, "cpu")
    state = programs.state_from(made, step_spec, over, opening.open_model(str(source)).load)
    params = specs.initialize(specs.param_specs(MODEL), jax.random.key(5), jnp.float32)
    assert same(params, state.params)
    fresh = programs.init_state(made, step_spec, over).jitted()
    assert not same(params, fresh.params)
    assert jax.tree.structure(fresh) == jax.tree.structure(state)
    wanted = dataclasses.replace(fresh, params=params)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 259, (4, 65)).astype(np.int32)
    batch = {name: np.zeros((4, 64), np.int32) for name in ("segment_ids", "positions")}
    batch |= {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((4, 64), np.float32)}
    batch["positions"] += np.arange(64, dtype=np.int32)[None]
    batch["segment_ids"] += 1
    step = programs.train_step(made, step_spec, over).compile()
    batch = jax.device_put(batch, mesh.batch_sharding(over))
    here = jax.tree.map(lambda x: x.sharding, wanted)
    want, reported = step(jax.device_put(wanted, here), batch)
    got, metrics = step(state, batch)
    assert float(metrics["loss"]) == float(reported["loss"])
    assert same(want.params, got.params)
    assert not same(params, got.params)  # full fine-tuning: every weight changes


def test_a_run_learns_answers_and_leaves_all_it_needs(plain, source, tmp_path):
    workdir, printed, losses = plain
    assert "starting from the weights of" in printed
    assert "answer tokens)" in printed
    assert "bits per byte" not in printed
    assert losses[-1] < losses[0]
    stored = json.loads((workdir / "config.json").read_text())
    assert stored["model"]["width"] == MODEL.width
    assert stored["data"]["tokenizer"] == "model"
    text = texts.load(str(workdir / "tokenizer"))
    own = chats.text(begins=True)
    assert text.chat_template == own.chat_template
    assert text.end_ids == own.end_ids
    assert text.tokenizer.encode("<|im_start|>é", special=True).tolist() == [chats.START, *"é".encode()]
    assert text.tokenizer.bos_id == chats.BEGIN
    opened = open_any.open_any(str(workdir))
    assert opened.model.layers == 2
    assert opened.text.chat_template == own.chat_template
    _, params = runs.trained(workdir)
    assert same(params, opened.load(jnp.float32))


@pytest.mark.slow
def test_a_run_goes_on_where_the_source_is_gone(plain, source, tmp_path):
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    made = config(copy, tmp_path)
    made.train.steps = 2
    run(made, tmp_path / "run")
    shutil.rmtree(copy)
    again = config(copy, tmp_path)
    printed, losses = run(again, tmp_path / "run")
    assert "not reading config.init_from" in printed
    assert len(losses) == 3
    # The schedule depends on the number of steps, so only losses independent of it are compared with the other run.
    assert losses[0] == plain[2][0]
    (tmp_path / "run" / "tokenizer").rename(tmp_path / "elsewhere")
    again.train.steps = 4
    with pytest.raises(UserError, match=r"has no tokenizer.json, which the run in .* needs"):
        run(again, tmp_path / "run")
    with pytest.raises(UserError, match="not found"):
        run(config(copy, tmp_path), tmp_path / "new")


@pytest.mark.slow
def test_marks_beyond_the_vocabulary_do_not_stop_a_run_that_goes_on(source, tmp_path):
    """Tokens beyond the vocabulary, such as Gemma's image token, are accepted unless the training data uses them."""
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    made = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    made.add_special_tokens(["<image>"])
    made.save(str(copy / "tokenizer.json"))
    assert made.get_vocab_size() == MODEL.vocab_size + 1
    first = config(copy, tmp_path)
    first.train.steps = 2
    run(first, tmp_path / "run")
    _, losses = run(config(copy, tmp_path), tmp_path / "run")
    assert len(losses) == 3
    opened = open_any.open_any(str(tmp_path / "run"))
    assert opened.text.tokenizer.vocab_size == MODEL.vocab_size
    made = config(copy, tmp_path)
    chats.write(tmp_path, [*RECORDS, {"prompt": "<image>", "answer": "b"}])
    with pytest.raises(UserError, match=r"c.jsonl:41 has the token <image> with id 259, but .* vocab_size is 259"):
        run(made, tmp_path / "other")


def test_interrupted_and_whole_are_the_same(plain, source, tmp_path):
    """A run resumed after step 2 and trained through step 3 equals an uninterrupted run of three steps."""
    workdir = tmp_path / "run"
    shutil.copytree(plain[0], workdir)
    shutil.rmtree(max((workdir / "checkpoints").glob("[0-9]*")))
    made = config(source, plain[0].parent)
    run(made, workdir)
    assert same(runs.trained(plain[0])[1], runs.trained(workdir)[1])


@pytest.mark.parametrize("stage", [1, 3])
def test_on_a_mesh_the_losses_are_the_same(plain, source, tmp_path, stage):
    made = config(source, tmp_path, mesh_data=2, mesh_tensor=2, mesh_zero=stage)
    printed, losses = run(made, tmp_path / "run")
    assert "starting from the weights of" in printed
    np.testing.assert_allclose(losses, plain[2], rtol=1e-5)


def test_shards_are_read_and_padded_with_zeros(source):
    sizes = MeshConfig(data=2, tensor=2, zero=3)
    over = mesh.make_mesh(sizes)
    placed = mesh.placements(specs.param_specs(MODEL), sizes, "weights", False)
    targets = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=mesh.named_sharding(over, p)), placed
    )
    opened = opening.open_model(str(source))
    plain, made = opened.load(jnp.float32), opened.load(jnp.float32, targets)
    assert same(plain, made)
    padded = 0
    for x, y, target in zip(*map(jax.tree.leaves, (plain, made, targets)), strict=True):
        assert y.sharding == target.sharding
        assert y.shape == target.shape
        rest = np.array(y)
        rest[tuple(map(slice, x.shape))] = 0
        assert not rest.any()
        assert y.addressable_shards[0].data.size * 2 <= y.size
        padded += y.size > x.size
    assert padded == 1  # the vocabulary of 259 on two devices


def test_models_that_do_not_agree_are_refused(source, tmp_path):
    def asked(**fields):
        made = config(source, tmp_path)
        made.model = ModelConfig(**fields)
        return open_any.resolved(made)

    assert architectures.resolve(asked(rope_theta=5.0).model).rope_theta == 5.0  # changes no parameter's shape
    assert architectures.resolve(asked(unroll=2).model).unroll == 2
    with pytest.raises(UserError, match=r"config.model.width=32: .* leave config.model unset"):
        asked(width=32)
    with pytest.raises(UserError, match=r"config.model.layers=3: "):
        asked(layers=3)
    with pytest.raises(UserError, match=r"config.model.name is 'llama3-8b', but .* is another model \(vocab_size"):
        asked(name="llama3-8b")


def test_the_ledger_bills_the_imported_model(source, tmp_path):
    (tmp_path / "c.py").write_text("from jaxllm.config import Config\n\ndef get_config():\n    return Config()\n")
    arguments = [f"--config={tmp_path / 'c.py'}", "--config.data.sequence_length=64", "--json"]
    result = runs.command("jaxllm.ledger", *arguments, f"--config.init_from={source}")
    assert result.returncode == 0, result.stderr
    reported = json.loads(result.stdout)
    assert reported["parameters"] == specs.parameter_count(MODEL)
    assert reported["model"] == str(source)
    wrong = runs.command("jaxllm.ledger", *arguments, "--config.init_from=nowhere")
    assert wrong.returncode == 2
    assert len(wrong.stderr.strip().splitlines()) == 1


def test_a_workdir_is_a_source_too(plain, tmp_path):
    made = config(plain[0], plain[0].parent)
    printed, losses = run(made, tmp_path / "run")
    assert "starting from the weights of" in printed
    assert losses[0] < plain[2][0]
    assert (tmp_path / "run" / "tokenizer" / "chat_template.jinja").is_file()


def test_a_run_on_bytes_is_a_source(tmp_path):
    """A run with the byte tokenizer, as the quickstart is, has no tokenizer file to copy."""
    (tmp_path / "a.txt").write_text("one two three four five six seven eight nine ten\n" * 200)
    first = runs.tiny_config(str(tmp_path / "a.txt"), train_steps=2)
    first.optimizer.warmup_steps = 0
    run(first, tmp_path / "first")
    more = runs.tiny_config(str(tmp_path / "a.txt"), train_steps=2)
    more.optimizer.warmup_steps, more.model, more.init_from = 0, ModelConfig(), str(tmp_path / "first")
    printed, losses = run(more, tmp_path / "second")
    assert "starting from the weights of" in printed
    assert losses[0] < np.log(257) - 0.1


def test_the_field_itself():
    made = Config(init_from="somewhere")
    assert overrides.from_dict(overrides.to_dict(made)) == made
    assert overrides.field_paths(made)["init_from"] == "somewhere"
    with pytest.raises(UserError, match=r"config.init_from is 5; it must be a str"):
        overrides.from_dict({"init_from": 5})
    with pytest.raises(UserError, match="did you mean 'init_from'"):
        overrides.from_dict({"init_form": "x"})
    alone = Config()
    alone.data.tokenizer = "model"
    with pytest.raises(UserError, match=r"config.data.tokenizer is 'model' \(the tokenizer of config.init_from"):
        architectures.resolve_config(alone)


def test_a_model_without_a_tokenizer_needs_one(source, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(source, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer; set config.data.tokenizer"):
        open_any.resolved(config(bare, tmp_path))
    made = config(bare, tmp_path)
    made.data.tokenizer = str(source)
    assert open_any.prepare(made, tmp_path / "run").text.chat_template == chats.CHATML
