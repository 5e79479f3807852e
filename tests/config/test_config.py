"""Configuration checks: invalid values are refused with a message that names the field and the fix."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm import config as config_lib
from jaxllm.architectures import resolve
from jaxllm.config import Architecture, Config, ModelConfig, validate
from jaxllm.config import overrides as config_tree
from jaxllm.errors import UserError


def changed(changes: dict[str, Any]) -> Config:
    """Returns the default configuration with the given dotted paths set."""
    config = Config()
    for path, value in changes.items():
        section, name = path.split(".")
        assert hasattr(getattr(config, section), name), path
        setattr(getattr(config, section), name, value)
    return config


def message(changes: dict[str, Any]) -> str:
    """Returns the error message for the changes, and asserts that it is one line."""
    config = changed(changes)
    with pytest.raises(UserError) as caught:
        validate.check(config, resolve(config.model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_default_passes() -> None:
    config = Config()
    validate.check(config, resolve(config.model))


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("model.layres", "model.layers"),
        ("model.n_layers", "model.layers"),
        ("optimizer.lr", "optimizer.peak_lr"),
        ("optimizer.warmup", "optimizer.warmup_steps"),
        ("train.layers", "model.layers"),  # the right field in the wrong section
        ("data.batch_size", "train.batch_size"),
        ("batch_size", "train.batch_size"),
        ("optimiser.peak_lr", "optimizer.peak_lr"),
        ("optimiser", "optimizer"),
        ("trian", "train"),
        ("trian.stpes", "train.steps"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, near: str) -> None:
    assert str(config_tree.unknown_key(key)) == f"config has no field '{key}'; did you mean '{near}'?"


def test_from_dict_refuses_unknown_keys() -> None:
    with pytest.raises(UserError, match=r"'train\.stepz'; did you mean 'train\.steps'"):
        config_tree.from_dict({"train": {"stepz": 1}})
    with pytest.raises(UserError, match=r"'trian'; did you mean 'train'"):
        config_tree.from_dict({"trian": {"steps": 1}})
    with pytest.raises(UserError, match=r"config\.train is 3; it must be a mapping"):
        config_tree.from_dict({"train": 3})


def test_attributes_that_are_no_fields_are_refused() -> None:
    config = Config()
    vars(config.train)["stepz"] = 1
    with pytest.raises(UserError, match=r"'train\.stepz'; did you mean 'train\.steps'"):
        config_tree.check_types(config)
    config = Config()
    vars(config)["optimiser"] = config.optimizer
    with pytest.raises(UserError, match=r"'optimiser'; did you mean 'optimizer'"):
        config_tree.check_types(config)
    config = Config()
    vars(config)["train"] = config.eval
    with pytest.raises(UserError, match=r"config\.train is EvalConfig\(.*\); it must be a TrainConfig"):
        config_tree.check_types(config)


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("train.steps", 1.5, "(float); it must be int"),
        ("train.steps", True, "(bool); it must be int"),
        ("train.steps", None, "(NoneType); it must be int"),
        ("optimizer.peak_lr", "3e-4", "(str); it must be float"),
        ("optimizer.peak_lr", False, "(bool); it must be float"),
        ("data.shuffle", 1, "(int); it must be bool"),
        ("data.path", Path("x"), "it must be str"),
        ("model.name", 3, "(int); it must be str"),
        ("model.layers", "2", "(str); it must be int | None"),
        ("model.pattern", ["full"], "(list); it must be tuple[str, ...] | None"),
        ("model.pattern", ("full", 3), "(tuple); it must be tuple[str, ...] | None"),
        ("model.rope_long_factors", (1.0, "2"), "(tuple); it must be tuple[float, ...] | None"),
    ],
)
def test_ill_typed_value(path: str, value: Any, wanted: str) -> None:
    with pytest.raises(UserError) as caught:
        config_tree.check_types(changed({path: value}))
    assert str(caught.value).startswith(f"config.{path} is {value!r} ")
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [("optimizer.peak_lr", 1), ("model.layers", None), ("model.layers", 2), ("model.pattern", ("sliding", "full"))],
)
def test_well_typed_value(path: str, value: Any) -> None:
    config_tree.check_types(changed({path: value}))


@pytest.mark.parametrize("path", config_lib.CHOICES)
def test_choices(path: str) -> None:
    assert path in config_tree.field_paths(Config())
    for choice in config_lib.CHOICES[path]:
        config_tree.check_types(changed({path: choice}))
    first, listed = config_lib.CHOICES[path][0], ", ".join(config_lib.CHOICES[path])
    with pytest.raises(UserError) as caught:
        config_tree.check_types(changed({path: first + "x"}))
    said = f"config.{path} is '{first}x'; it must be one of {listed} (did you mean '{first}'?)"
    assert str(caught.value) == said


@pytest.mark.parametrize("path", validate._MINIMUMS)
def test_least_values(path: str) -> None:
    least = validate._MINIMUMS[path]
    assert message({path: least - 1}) == f"config.{path} is {least - 1}; it must be at least {least}"


@pytest.mark.parametrize(
    "name", ["vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "context_length"]
)
def test_sizes_are_positive(name: str) -> None:
    assert message({f"model.{name}": 0}) == f"config.model.{name} is 0; it must be at least 1"


# An invalid change, the words that its message must contain, and a further change that fixes it.
RELATIONS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "grouped heads": (
        {"model.heads": 12, "model.kv_heads": 8},
        ["config.model.heads (12)", "config.model.kv_heads (8)", "divisor of 12"],
        {"model.kv_heads": 4},
    ),
    "empty pattern": ({"model.pattern": ()}, ["config.model.pattern is ()", "'full'"], {"model.pattern": ("full",)}),
    "unknown layer kind": (
        {"model.pattern": ("full", "local")},
        ["config.model.pattern", "'local'", "each 'full' or 'sliding'"],
        {"model.pattern": ("full", "full")},
    ),
    "sliding without a window": (
        {"model.pattern": ("sliding",)},
        ["config.model.window is 0", "config.model.pattern", "set window"],
        {"model.window": 8},
    ),
    "odd rotary head": (
        {"model.name": "llama3-8b", "model.head_dim": 127},
        ["config.model.head_dim (127)", "config.model.positions", "even"],
        {"model.positions": "learned"},
    ),
    "llama3 scaling of no context": (
        {"model.name": "llama3-8b", "model.rope_scaling": "llama3"},
        ["config.model.rope_scaling is 'llama3'", "config.model.rope_original_context is 0"],
        {"model.rope_original_context": 8192},
    ),
    "yarn scaling of no context": (
        {"model.name": "llama3-8b", "model.rope_scaling": "yarn"},
        ["config.model.rope_scaling is 'yarn'", "config.model.rope_original_context is 0"],
        {"model.rope_original_context": 8192},
    ),
    "unrotated layers beside learned positions": (
        {"model.pattern": ("full", "nope")},
        ["config.model.pattern has 'nope' layers", "config.model.positions is 'learned'"],
        {"model.positions": "rotary"},
    ),
    "odd part of a head": (
        {"model.name": "llama3-8b", "model.rope_dim": 95},
        ["config.model.rope_dim (95)", "even"],
        {"model.rope_dim": 96},
    ),
    "more rotated than there is": (
        {"model.name": "llama3-8b", "model.rope_dim": 130},
        ["config.model.rope_dim (130)", "config.model.head_dim (128)"],
        {"model.rope_dim": 128},
    ),
    "factors of other pairs": (
        {"model.name": "phi4-mini", "model.rope_dim": 128},
        ["config.model.rope_short_factors has 48 values", "each of the 64 rotated pairs"],
        {"model.rope_dim": 96},
    ),
    "a factor that is not positive": (
        {"model.name": "phi4-mini", "model.rope_long_factors": (0.0,) * 48},
        ["config.model.rope_long_factors", "all positive"],
        {"model.rope_long_factors": (2,) * 48},
    ),
    "negative attention factor": (
        {"model.rope_attention_factor": -1.0},
        ["config.model.rope_attention_factor is -1.0", "positive"],
        {"model.rope_attention_factor": 1.0},
    ),
    "zero rope factor": (
        {"model.rope_factor": 0.0},
        ["config.model.rope_factor is 0.0", "positive"],
        {"model.rope_factor": 0.5},
    ),
    "undefined rope factor": (
        {"model.rope_factor": float("nan")},
        ["config.model.rope_factor is nan", "positive"],
        {"model.rope_factor": 0.5},
    ),
    "no expert a token": (
        {"model.experts": 4},
        ["config.model.experts_per_token (0)", "config.model.experts (4)"],
        {"model.experts_per_token": 4},
    ),
    "too many experts a token": (
        {"model.experts": 4, "model.experts_per_token": 5},
        ["config.model.experts_per_token (5)", "config.model.experts (4)"],
        {"model.experts": 5},
    ),
    "no unrolling": ({"model.unroll": 0}, ["config.model.unroll is 0", "at least 1"], {"model.unroll": 1}),
    "sequence beyond the context": (
        {"data.sequence_length": 1025},
        ["config.data.sequence_length (1025)", "config.model.context_length (1024)"],
        {"model.context_length": 1025},
    ),
    "no path": (
        {"data.source": "text"},
        ["config.data.path is empty", "config.data.source is 'text'", "file or glob"],
        {"data.path": "*.txt"},
    ),
    "nothing held out": (
        {"data.validation_fraction": 0.0},
        ["config.data.validation_fraction is 0.0", "between 0 and 1"],
        {"data.validation_fraction": 0.5},
    ),
    "all held out": (
        {"data.validation_fraction": 1.0},
        ["config.data.validation_fraction is 1.0", "between 0 and 1"],
        {"data.validation_fraction": 0.5},
    ),
    "batch and micro-batches": (
        {"train.batch_size": 8, "train.accumulate": 3},
        ["config.train.batch_size (8)", "config.train.accumulate (3)", "config.mesh.data (1)", "next multiple is 9"],
        {"train.batch_size": 9},
    ),
    "batch and devices": (
        {"train.batch_size": 8, "train.accumulate": 2, "mesh.data": 8},
        ["config.train.batch_size (8)", "config.train.accumulate (2)", "config.mesh.data (8)", "next multiple is 16"],
        {"train.batch_size": 16},
    ),
    "long warm-up": (
        {"train.steps": 10, "optimizer.warmup_steps": 11},
        ["config.optimizer.warmup_steps (11)", "config.train.steps (10)", "shorten"],
        {"optimizer.warmup_steps": 10},
    ),
    "warm-up and decay": (
        {
            "optimizer.schedule": "wsd",
            "train.steps": 10,
            "optimizer.warmup_steps": 5,
            "optimizer.decay_steps": 6,
        },
        ["config.optimizer.warmup_steps (5)", "config.optimizer.decay_steps (6)", "config.train.steps (10)"],
        {"optimizer.decay_steps": 5},
    ),
    "no learning rate": (
        {"optimizer.peak_lr": 0.0},
        ["config.optimizer.peak_lr is 0.0", "positive"],
        {"optimizer.peak_lr": 1e-9},
    ),
    "undefined learning rate": (
        {"optimizer.peak_lr": float("nan")},
        ["config.optimizer.peak_lr is nan", "positive"],
        {"optimizer.peak_lr": 1e-9},
    ),
}


@pytest.mark.parametrize("case", RELATIONS)
def test_relation_between_fields(case: str) -> None:
    changes, words, mend = RELATIONS[case]
    said = message(changes)
    assert [word for word in words if word not in said] == []
    mended = changed(changes | mend)
    validate.check(mended, resolve(mended.model))


def test_check_begins_with_types_and_choices() -> None:
    assert "it must be int" in message({"train.steps": 1.5})
    assert "it must be one of" in message({"optimizer.name": "adamax"})


def test_dict_round_trip_through_json() -> None:
    config = changed(
        {"model.name": "gemma2-2b", "model.pattern": ("sliding", "full"), "model.layers": 2, "optimizer.peak_lr": 1e-5}
    )
    assert config_tree.from_dict(config_tree.to_dict(config)) == config
    assert config_tree.from_dict(json.loads(json.dumps(config_tree.to_dict(config)))) == config
    assert config_tree.from_dict({}) == Config() != config


def test_from_dict_checks_types() -> None:
    with pytest.raises(UserError, match=r"config\.train\.steps is 1\.5 \(float\); it must be int"):
        config_tree.from_dict({"train": {"steps": 1.5}})


def test_field_paths_reach_every_section() -> None:
    paths = config_tree.field_paths(Config())
    assert {path.split(".")[0] for path in paths} == {field.name for field in dataclasses.fields(Config)}
    assert paths["train.steps"] == Config().train.steps


def test_model_section_has_every_architecture_field_as_an_override() -> None:
    overrides = {field.name for field in dataclasses.fields(ModelConfig)} - {"name"}
    assert overrides == {field.name for field in dataclasses.fields(Architecture)}
    assert {getattr(ModelConfig(), name) for name in overrides} == {None}


@pytest.mark.parametrize("module", ["jaxllm.config", "jaxllm.architectures"])
def test_reading_a_configuration_imports_no_jax(module: str) -> None:
    heavy = {"jax", "jaxlib", "flax", "numpy"}
    program = f"import {module}, sys; print({heavy} & {{name.split('.')[0] for name in sys.modules}} or 'none')"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"
