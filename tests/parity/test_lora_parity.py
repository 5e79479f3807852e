"""LoRA: adapters applied to activations in training, once exported, equal the merged weights in transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from test_transformers import TOLERANCE, distance, prompt, their_logits

from jaxllm.config import LoraConfig
from jaxllm.interop import peft
from jaxllm.interop.huggingface.safetensors_files import TensorFiles, read_header
from jaxllm.interop.opening import open_model
from jaxllm.model import adapter_specs, adapters, specs
from jaxllm.model.transformer import forward, logits

EVERY = ("q", "k", "v", "out", "gate", "up", "down")
CASES = {
    "llama2": EVERY,
    "gemma2": EVERY,
    "qwen2": ("q", "v"),
    "qwen3-moe": ("q", "k", "v", "out"),
    "gpt2": ("out", "up", "down"),
    "phi3": ("out", "down"),
}


def adapted_logits(ours, lora, pairs, tokens):
    """Returns the logits of the model with unmerged adapters, as in a training step."""
    params = adapters.joined(ours.load(np.float32), adapters.scaled(pairs, adapters.scale_of(lora)))

    def run(params, tokens):
        hidden, _, _ = forward(params, tokens, jnp.arange(tokens.shape[1])[None], ours.model)
        return logits(hidden, params, ours.model)

    return np.asarray(jax.jit(run)(params, jnp.asarray(tokens[None]))[0])


def changed(theirs, folder, scale=None):
    """Returns the transformers model with (lora_alpha / r) · lora_B · lora_A added to each adapted weight."""
    stored = json.loads((folder / "adapter_config.json").read_text())
    files = TensorFiles(read_header(folder / "adapter_model.safetensors"))
    used = 0
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            at = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{at}.lora_A.weight" in files.entries:
                a, b = (files.read(f"{at}.{half}.weight") for half in ("lora_A", "lora_B"))
                change = (stored["lora_alpha"] / stored["r"] if scale is None else scale) * b @ a
                parameter += torch.tensor(change.T if stored["fan_in_fan_out"] else change)
                used += 2
    assert used == len(files.entries)
    return theirs


@pytest.mark.parametrize("name", CASES)
def test_exported_adapters_make_the_same_model(name, tmp_path):
    ours = open_model(str(tiny.save(tiny.build(name), tmp_path)))
    lora = LoraConfig(rank=4, alpha=6.0, targets=CASES[name])
    pairs = specs.map_specs(
        lambda s: jnp.asarray(0.3 * np.random.default_rng(s.size).standard_normal(s.shape), jnp.float32),
        adapter_specs.adapter_specs(ours.model, lora),
    )
    folder = tmp_path / "adapter"
    folder.mkdir()
    peft.export(folder, ours.model, lora, pairs, name)
    tokens = prompt(40)
    found = adapted_logits(ours, lora, pairs, tokens)
    assert distance(found, their_logits(changed(tiny.build(name), folder), tokens)) <= TOLERANCE
    # Planted faults: without the scale, or without adapters, the logits differ.
    assert distance(found, their_logits(changed(tiny.build(name), folder, scale=1.0), tokens)) > 10 * TOLERANCE
    assert distance(found, their_logits(tiny.build(name), tokens)) > 10 * TOLERANCE
    again = peft.with_adapters(ours, folder).load(np.float32)

    def plain(params, tokens):
        hidden, _, _ = forward(params, tokens, jnp.arange(tokens.shape[1])[None], ours.model)
        return logits(hidden, params, ours.model)

    assert distance(found, np.asarray(jax.jit(plain)(again, jnp.asarray(tokens[None]))[0])) <= TOLERANCE
