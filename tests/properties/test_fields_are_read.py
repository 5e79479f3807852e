"""Every field of the configuration changes something that can be observed; a field that nothing reads fails."""

import copy
import dataclasses
import re
import types

import chats
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import runs

from jaxllm import architectures, programs
from jaxllm.config import Architecture, Config, ModelConfig, TrainConfig, overrides
from jaxllm.data import pipeline
from jaxllm.ledger.formula import training_memory
from jaxllm.model import specs, transformer
from jaxllm.parallel import mesh
from jaxllm.train import metrics

LLAMA3 = dataclasses.replace(
    models.ROTARY, rope_scaling="llama3", rope_factor=8.0, rope_original_context=64, rope_theta=100.0
)
# YaRN's ramp begins and ends at whole pairs, so there must be many of them.
YARN = dataclasses.replace(
    LLAMA3, head_dim=64, rope_theta=1e4, rope_original_context=4096, rope_scaling="yarn", rope_beta_fast=32.0
)

# Field -> (a model in which it matters, another value).
CHANGES = {
    "vocab_size": (models.ROTARY, 65),
    "layers": (models.ROTARY, 3),
    "width": (models.ROTARY, 40),
    "heads": (models.ROTARY, 6),
    "kv_heads": (models.ROTARY, 4),
    "head_dim": (models.ROTARY, 10),
    "mlp_width": (models.ROTARY, 50),
    "context_length": (models.LEARNED, 100),
    "mlp": (models.ROTARY, "geglu"),
    "norm": (models.SLIDING, "rmsnorm"),
    "norm_placement": (models.ROTARY, "sandwich"),
    "norm_eps": (models.ROTARY, 1e-3),
    "positions": (models.ROTARY, "learned"),
    "qkv_bias": (models.ROTARY, True),
    "out_bias": (models.ROTARY, True),
    "mlp_bias": (models.ROTARY, True),
    "qk_norm": (models.ROTARY, True),
    "qk_norm_over": (models.POST, "head"),
    "tied_embeddings": (models.ROTARY, False),
    "init_std": (models.ROTARY, 0.3),
    "pattern": (models.SLIDING, ("sliding", "sliding", "full")),
    "window": (models.SLIDING, 5),
    "embedding_scale": (models.SLIDING, 2.0),
    "query_scale": (models.SLIDING, 0.5),
    "attention_softcap": (models.SLIDING, 10.0),
    "logit_softcap": (models.SLIDING, 10.0),
    "rope_theta": (models.ROTARY, 5e5),
    "rope_theta_sliding": (models.SLIDING, 200.0),
    "rope_dim": (models.ROTARY, 6),
    "rope_scaling": (models.SLIDING, "none"),
    "rope_factor": (models.SLIDING, 8.0),
    "rope_original_context": (LLAMA3, 32),
    "rope_low_freq_factor": (LLAMA3, 2.0),
    "rope_high_freq_factor": (LLAMA3, 8.0),
    "rope_beta_fast": (YARN, 2.0),
    "rope_beta_slow": (YARN, 4.0),
    "rope_short_factors": (models.LONGROPE, (1.0, 1.2, 1.3)),
    "rope_long_factors": (models.LONGROPE, (1.2, 2.5, 4.0)),
    "rope_attention_factor": (YARN, 1.5),
    "experts": (models.EXPERTS, 5),
    "experts_per_token": (models.EXPERTS, 1),
    "normalize_routing": (models.EXPERTS, False),
    "router_aux_weight": (models.EXPERTS, 0.5),
    "unroll": (models.ROTARY, 2),
}


def footprint(model):
    """Returns all that the system uses of a model: its specs, and its program with every constant."""
    tree = specs.param_specs(model)
    tokens = jnp.zeros((1, 8), jnp.int32)

    def program(params):
        hidden, _, aux_loss = transformer.forward(params, tokens, tokens, model)
        return transformer.logits(hidden, params, model), aux_loss

    traced = jax.make_jaxpr(program)(specs.abstract(tree, jnp.float32))
    return str(tree), str(traced), [np.asarray(const).tobytes() for const in traced.consts]


def test_the_table_has_every_field():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Architecture)}


@pytest.mark.parametrize("field", CHANGES)
def test_model_field_is_read(field):
    model, value = CHANGES[field]
    assert getattr(model, field) != value
    assert footprint(dataclasses.replace(model, **{field: value})) != footprint(model)


def test_the_footprint_ignores_what_does_not_matter():
    """A field that the model does not use changes nothing, so a change above is due to the field."""
    unused = dataclasses.replace(models.ROTARY, window=3, rope_beta_fast=7.0, experts_per_token=9)
    unused = dataclasses.replace(unused, qk_norm_over="projection", rope_long_factors=(2.0,))
    assert footprint(unused) == footprint(models.ROTARY)


@pytest.mark.parametrize("field", CHANGES)
def test_override_of_a_model_field_is_read(field):
    """`config.model.<field>` overrides that field of the named model."""
    model, value = CHANGES[field]
    for wanted in (model, dataclasses.replace(model, **{field: value})):
        assert architectures.resolve(ModelConfig(**dataclasses.asdict(wanted))) == wanted


BF16, FP16, ADAPTERS = {"precision_policy": "bf16"}, {"precision_policy": "fp16"}, {"lora_rank": 2}
TOKENIZER = {"data_tokenizer": "FOLDER/tokenizer.json", "model_vocab_size": 259}
TOKENS = {"data_source": "tokens", "data_path": "FOLDER/tokens.bin"}
MESH = BF16 | {"mesh_data": 2, "mesh_replica": 2, "train_batch_size": 16, "train_accumulate": 2, "model_kv_heads": 2}
# Field -> (what observes it, fields of a run in which it matters, other values). Values differ from those of
# `Observers.config`. FOLDER is the folder of the data and of the first run.
CASES = {
    "model.name": ("bill", {}, "gpt2"),
    "data.source": ("data", {}, "text"),
    "data.path": ("data", {}, "FOLDER/a.jsonl"),
    "data.validation_path": ("data", {}, "FOLDER/b.jsonl"),
    "data.validation_fraction": ("data", {}, 0.7),
    "data.text_field": ("data", {}, "other"),
    "data.tokenizer": ("data", {}, "FOLDER/tokenizer.json"),
    "data.token_dtype": ("data", TOKENS, "int32"),
    "data.sequence_length": ("data", {}, 16),
    "data.shuffle": ("data", {}, False),
    "data.shuffle_window": ("data", {}, 2),
    "data.seed": ("data", {}, 1),
    "data.streams": ("data", {}, 2),
    "optimizer.name": ("bill", {}, "lion"),
    "optimizer.peak_lr": ("schedule", {}, 0.5),
    "optimizer.schedule": ("schedule", {}, "linear", "constant", "wsd"),
    "optimizer.warmup_steps": ("schedule", {}, 3),
    "optimizer.decay_steps": ("schedule", {"optimizer_schedule": "wsd"}, 3),
    "optimizer.final_lr_fraction": ("schedule", {}, 0.5),
    "optimizer.weight_decay": ("step", {}, 0.1),
    "optimizer.b1": ("step", {}, 0.5),
    "optimizer.b2": ("step", {}, 0.5),
    "optimizer.eps": ("step", {}, 1e-3),
    "optimizer.clip_norm": ("step", {}, 0.5),
    "optimizer.moment_dtype": ("bill", {}, "bfloat16"),
    "optimizer.offload": ("bill", BF16, "moments", "all"),
    "precision.policy": ("bill", {}, "bf16", "fp16", "bf16_pure"),
    "precision.loss_scale": ("initial", FP16, 8.0),
    "precision.loss_scale_growth": ("step", FP16, 7),
    "attention.implementation": ("bill", {"model_head_dim": 16}, "xla"),
    "remat.policy": ("bill", {}, "full", "dots", "names:attn_qkv", "offload:attn_qkv"),
    "mesh.replica": ("bill", MESH, 1, 4),
    "mesh.data": ("bill", MESH, 1, 4),
    "mesh.tensor": ("bill", MESH, 2),
    "mesh.zero": ("bill", MESH, 1, 2, 3),
    "lora.rank": ("bill", {}, 2),
    "lora.alpha": ("step", ADAPTERS, 8.0),
    "lora.targets": ("bill", ADAPTERS, ("q",)),
    "train.steps": ("run", {}, 4),
    "train.batch_size": ("bill", {}, 8),
    "train.accumulate": ("bill", {}, 2),
    "train.loss_chunk": ("bill", {}, 16),
    "train.attention_chunk": ("bill", {}, 8),
    "train.seed": ("initial", {}, 1),
    "checkpoint.every": ("run", {}, 4),
    "checkpoint.keep": ("run", {"checkpoint_every": 2}, 1),
    "eval.every": ("run", {}, 4),
    "eval.batches": ("run", {}, 2),
    "log.every": ("run", {}, 3),
    "log.tensorboard": ("run", {}, True),
    "log.profile_start": ("run", {"log_profile_steps": 1}, 3),
    "log.profile_steps": ("run", {}, 2),
    "ledger.check": ("run", {}, "off"),
    "ledger.tolerance": ("run", {}, 1e9),
    "init_from": ("run", TOKENIZER, "FOLDER/run1"),
}


def uncovered(config):
    """Returns the fields that no test here changes."""
    overridden = {f"model.{field}" for field in CHANGES}
    return set(overrides.field_paths(config)) - set(CASES) - overridden


class Observers:
    """Programs, files and texts that a configuration leads to, each in a form that can be compared."""

    def __init__(self, folder, patch):
        self.folder, self.runs, self._seen = folder, 0, {}
        words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "delta"], (2, 8, 40))
        for name, documents in zip("ab", words, strict=True):
            records = [{"text": " ".join(line), "other": " ".join(line[::-1])} for line in documents]
            chats.write(folder, records, f"{name}.jsonl")
        (np.arange(2000, dtype=np.int32) % 250).tofile(folder / "tokens.bin")
        chats.byte_level(False)._plain.save(str(folder / "tokenizer.json"))
        self._programs = programs.train_step, programs.init_state
        self._replace_programs(patch)
        self.run(self.config(**TOKENIZER))

    def config(self, **fields):
        """Returns a run of six steps; `fields` are `section_field=value`, and `init_from` without a section."""
        config = runs.tiny_config("FOLDER/*.jsonl", train_steps=6, checkpoint_every=0, log_every=2, eval_batches=1)
        config.data.source, config.data.validation_fraction, config.precision.policy = "jsonl", 0.4, "fp32"
        for name, value in fields.items():
            section, _, field = name.partition("_")
            where, field = (config, name) if name == "init_from" else (getattr(config, section), field)
            assert hasattr(where, field), name
            setattr(where, field, value)
        for path, value in overrides.field_paths(config).items():
            if isinstance(value, str) and "FOLDER" in value:
                section, _, field = path.rpartition(".")
                setattr(
                    getattr(config, section) if section else config, field, value.replace("FOLDER", str(self.folder))
                )
        return config

    def observe(self, how, fields):
        """Returns what `how` observes of a run with these fields; remembered."""
        key = how, repr(sorted(fields.items()))
        if key not in self._seen:
            self._seen[key] = getattr(self, how)(self.config(**fields))
        return self._seen[key]

    def _step_spec(self, config):
        return programs.make_step_spec(config, architectures.resolve_config(config), "cpu")

    def bill(self, config):
        """Returns the rows of the ledger on a GPU."""
        model = architectures.resolve_config(config)
        return training_memory.training(model, config, config.precision.policy, "gpu").rows

    def schedule(self, config):
        """Returns the learning rate of each step."""
        made = self._step_spec(config).schedule
        return [float(made(jnp.int32(step))) for step in range(config.train.steps)]

    def step(self, config):
        """Returns the train step as traced."""
        program = self._programs[0](config, self._step_spec(config), mesh.make_mesh(config.mesh))
        return _text(program.jitted.trace(*program.inputs).jaxpr)

    def initial(self, config):
        """Returns the program of the initial state as traced."""
        program = self._programs[1](config, self._step_spec(config), mesh.make_mesh(config.mesh))
        return _text(program.jitted.trace().jaxpr)

    def data(self, config):
        """Returns the first batches of training and evaluation."""
        batches = pipeline.train_iterator(config.data, config.train.batch_size)
        held_out = pipeline.validation_batches(config.data, config.train.batch_size, 2)
        found = [*(next(batches) for _ in range(8)), *held_out]
        return [{name: array.tolist() for name, array in batch.items()} for batch in found]

    def run(self, config):
        """Returns a run's exit status, output, records, files and checkpoints, and the order of steps and profiles."""
        self.runs, self.calls = self.runs + 1, []
        workdir = self.folder / f"run{self.runs}"
        status, text = runs.train(config, workdir)
        lines = [line.split("  ")[0] for line in text.splitlines() if re.match("step|ledger|starting", line)]
        records = [
            {name: value for name, value in record.items() if name != "seconds"}
            for record in metrics.read(workdir / "metrics.jsonl")
        ]
        files = [sorted(path.name for path in folder.iterdir()) for folder in (workdir, workdir / "checkpoints")]
        return status, lines, records, files, self.calls

    def _replace_programs(self, patch):
        """Makes runs do everything but compute: nothing is compiled, and the profiler only notes its calls."""
        compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
        sums = {"nll": 1.0, "tokens": 1.0}

        def step(state, batch):
            self.calls.append("step")
            return state, {"loss": 1.0, "grad_norm": 1.0}

        step.memory_analysis, step.cost_analysis = compiled.memory_analysis, compiled.cost_analysis

        def init_state(*arguments):
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), programs.abstract_state(*arguments)
            )
            return types.SimpleNamespace(jitted=lambda: zeros)

        for name, executable in (("train_step", step), ("eval_step", lambda weights, batch: sums)):
            patch.setattr(programs, name, lambda *_, it=executable: types.SimpleNamespace(compile=lambda: it))
        patch.setattr(programs, "init_state", init_state)
        patch.setattr(jax.profiler, "start_trace", lambda _: self.calls.append("start trace"))
        patch.setattr(jax.profiler, "stop_trace", lambda: self.calls.append("stop trace"))


def _text(jaxpr):
    """Returns a program's text without the addresses of its functions, which differ every time."""
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


@pytest.fixture(scope="module")
def observers(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield Observers(tmp_path_factory.mktemp("fields"), patch)


def test_every_field_is_covered():
    assert uncovered(Config()) == set()


@pytest.mark.parametrize("path", CASES)
def test_field_is_read(observers, path):
    how, fields, *values = CASES[path]
    for value in values:
        changed = fields | {path.replace(".", "_", 1): value}
        assert observers.observe(how, changed) != observers.observe(how, fields), value


@pytest.mark.parametrize("how", ["bill", "schedule", "step", "initial", "data", "run"])
def test_a_field_that_nothing_reads_is_caught(observers, how, monkeypatch):
    """It is not covered, and changes nothing that is observed, so the changes above are due to their fields."""
    field = copy.copy(TrainConfig.__dataclass_fields__["seed"])
    field.name, field.init = "unread", False
    monkeypatch.setitem(TrainConfig.__dataclass_fields__, "unread", field)
    monkeypatch.setattr(TrainConfig, "unread", 0, raising=False)
    assert uncovered(Config()) == {"train.unread"}
    assert observers.observe(how, {"train_unread": 1}) == observers.observe(how, {})
