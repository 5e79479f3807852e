"""Tests which attention implementation `auto` selects and reports on each platform, and when a named one is refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import models
import pytest

from jaxllm import architectures, programs
from jaxllm.config import Config, validate
from jaxllm.config import attention as attention_choice
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.kernels.decode.api import decode_attention
from jaxllm.ledger import bill
from jaxllm.ledger.formula import training_memory

NO_KERNELS = "auto: no Pallas kernels for cpu"
MODEL = dataclasses.replace(models.ROTARY, head_dim=64)


def run(implementation="auto", **fields):
    config = Config()
    config.attention.implementation = implementation
    config.data.sequence_length = 64
    for name, value in fields.items():
        section, _, field = name.partition("_")
        setattr(getattr(config, section), field, value)
    return config


def chosen(config, model=MODEL, platform="gpu", dtype="bfloat16"):
    return attention_choice.resolve(config, model, platform, dtype)


@pytest.mark.parametrize(
    ("platform", "dtype", "changes", "fields", "implementation", "message"),
    [
        ("gpu", "bfloat16", {}, {}, "pallas", "auto: supported on gpu"),
        ("gpu", "float32", {"head_dim": 256}, {}, "pallas", "auto: supported on gpu"),
        ("gpu", "float16", {"head_dim": 24}, {}, "pallas", "auto: supported on gpu"),
        ("tpu", "bfloat16", {}, {}, "pallas", "auto: supported on tpu"),
        ("cpu", "float32", {}, {}, "xla", NO_KERNELS),
        ("tpu", "float16", {}, {}, "xla", "auto: the tpu kernels support float32 or bfloat16, not float16"),
        ("gpu", "bfloat16", {"head_dim": 8}, {}, "xla", "auto: the kernels support a head_dim of 16 to 256, not 8"),
        ("gpu", "bfloat16", {"head_dim": 320}, {}, "xla", "auto: the kernels support a head_dim of 16 to 256, not 320"),
        ("gpu", "bfloat16", {}, {"train_attention_chunk": 32}, "xla", "auto: config.train.attention_chunk (32) is"),
        ("gpu", "bfloat16", {}, {"remat_policy": "names:mlp_up, attn_probs"}, "xla", "auto: attn_probs (saved by"),
        ("gpu", "bfloat16", {}, {"remat_policy": "offload:attn_scores"}, "xla", "auto: attn_scores (saved by"),
        ("gpu", "bfloat16", {}, {"remat_policy": "names:attn_context,attn_lse"}, "pallas", "auto: supported on gpu"),
        ("cpu", "float32", {}, {"remat_policy": "names:attn_context,attn_lse"}, "xla", NO_KERNELS),
    ],
)
def test_auto_takes_what_can_run_and_says_why(platform, dtype, changes, fields, implementation, message):
    found = chosen(run(**fields), dataclasses.replace(MODEL, **changes), platform, dtype)
    assert found.implementation == implementation
    assert found.line.startswith(f"attention: {implementation} ({message}")
    assert "\n" not in found.line


@pytest.mark.parametrize(
    ("implementation", "platform", "dtype", "changes", "fields", "message"),
    [
        ("pallas", "cpu", "float32", {}, {}, "no Pallas kernels for cpu"),
        ("pallas", "gpu", "bfloat16", {"head_dim": 8}, {}, "head_dim of 16 to 256, not 8"),
        ("pallas", "tpu", "float16", {}, {}, "float32 or bfloat16, not float16"),
        ("pallas", "gpu", "bfloat16", {}, {"train_attention_chunk": 32}, "config.train.attention_chunk (32)"),
        ("pallas", "gpu", "bfloat16", {}, {"remat_policy": "names:attn_probs"}, "attn_probs (saved by config.remat"),
        ("cudnn", "tpu", "bfloat16", {}, {}, "cuDNN does not run on tpu"),
        ("cudnn", "gpu", "float32", {}, {}, "supports bfloat16 or float16, not float32"),
        ("cudnn", "gpu", "bfloat16", {"head_dim": 256}, {}, "a multiple of 8 up to 128, not 256"),
        ("cudnn", "gpu", "bfloat16", {"head_dim": 20}, {}, "a multiple of 8 up to 128, not 20"),
        ("cudnn", "gpu", "bfloat16", {"attention_softcap": 50.0}, {}, "config.model.attention_softcap (50)"),
        ("cudnn", "gpu", "bfloat16", {}, {"data_sequence_length": 63}, "even config.data.sequence_length, not 63"),
        ("cudnn", "gpu", "bfloat16", {}, {"remat_policy": "names:attn_lse"}, "attn_lse (saved by config.remat"),
        ("cudnn", "gpu", "bfloat16", {}, {"train_attention_chunk": 32}, "config.train.attention_chunk (32)"),
        ("xla", "gpu", "bfloat16", {}, {"remat_policy": "names:attn_lse"}, "attn_lse (saved by config.remat"),
    ],
)
def test_a_name_means_that_one_or_nothing(implementation, platform, dtype, changes, fields, message):
    config = run(implementation, **fields)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        chosen(config, dataclasses.replace(MODEL, **changes), platform, dtype)
    assert str(caught.value).startswith(f"config.attention.implementation is {implementation!r}, but ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("implementation", ["pallas", "cudnn", "xla"])
def test_a_name_that_can_run_runs(implementation):
    found = chosen(run(implementation))
    assert found.implementation == implementation
    assert found.line == f"attention: {implementation} (set by config.attention.implementation)"


def test_what_contradicts_it_is_refused_with_the_configuration():
    validate.check(run("pallas"), MODEL)
    validate.check(run("auto", train_attention_chunk=32), MODEL)
    with pytest.raises(UserError, match="attention_chunk"):
        validate.check(run("pallas", train_attention_chunk=32), MODEL)


def test_the_trainer_the_ledger_and_the_program_agree():
    """The trainer, the ledger and the compiled program use one selection function, so they never disagree."""
    config = run(precision_policy="bf16")
    for platform in ("cpu", "gpu", "tpu"):
        step_spec = programs.make_step_spec(config, MODEL, platform)
        assert training_memory.training(MODEL, config, "bf16", platform).attention == step_spec.attention.line
    config.attention.implementation = "pallas"
    for make in (
        lambda: programs.make_step_spec(config, MODEL, "cpu"),
        lambda: training_memory.training(MODEL, config, "bf16"),
    ):
        with pytest.raises(UserError, match="no Pallas kernels for cpu"):
            make()


def test_the_line_is_in_the_ledger_s_json():
    config = run()
    config.model.name = "llama3.2-1b"
    model = architectures.resolve_config(config)
    billed = bill.training(config, model, detect.by_name("h100")).to_json()
    assert billed["attention"] == "attention: pallas (auto: supported on gpu)"
    sampled = bill.sampling("m", model, detect.by_name("h100"), 1, 128, 64).to_json()
    assert sampled["attention"].endswith("of new tokens pallas (supported on gpu)")


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kernels"),
    [(16, "float32", ["gpu", "tpu"]), (8, "float32", ["tpu"]), (16, "float16", ["gpu"]), (24, "bfloat16", ["tpu"])],
)
def test_decoding_takes_the_kernels_that_it_says(head_dim, dtype, kernels):
    """The program has a branch per platform; the printed line names the platforms that use kernels."""
    q, k = jnp.zeros((1, 1, 2, head_dim), dtype), jnp.zeros((1, 1, 8, head_dim), dtype)

    def token(q, k):
        rules = {"window": 0, "scale": 1.0, "softcap": 0.0, "capacity": 8}
        return decode_attention(q, k, k, jnp.ones(1, jnp.int32), **rules, platform="auto")

    said = [name for name in ("gpu", "tpu") if attention_choice.decoding(name, head_dim, dtype).line.count("pallas")]
    assert said == kernels
    assert str(jax.make_jaxpr(token)(q, k)).count("pallas_call[") == len(kernels)
    assert attention_choice.decoding("cpu", head_dim, dtype).line == "attention: xla (no Pallas kernels for cpu)"
