"""PEFT adapter folders: exported adapters equal the trained ones and match the tensors of the base model's folder."""

import dataclasses
import json

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import LoraConfig
from jaxllm.errors import UserError
from jaxllm.interop import peft
from jaxllm.interop.huggingface import model as huggingface
from jaxllm.interop.huggingface.safetensors_files import TensorFiles, read_header
from jaxllm.model import adapter_specs, adapters, specs

EVERY = ("q", "k", "v", "out", "gate", "up", "down")
TARGETS = {
    "llama": EVERY,
    "gemma2": EVERY,  # layers remain after the last whole pattern
    "mixtral": ("q", "k", "v", "out"),
    "gpt2": ("out", "up", "down"),
    "phi3": ("out", "down"),
}


def random(tree):
    return specs.map_specs(lambda s: np.random.default_rng(s.size).standard_normal(s.shape).astype(np.float32), tree)


@pytest.fixture(params=TARGETS, scope="module")
def made(request, tmp_path_factory):
    """Returns (family, model, LoraConfig, adapters, folder that contains model/ and adapter/)."""
    family = request.param
    model, lora = folders.FAMILIES[family], LoraConfig(rank=3, alpha=5.0, targets=TARGETS[family])
    folder = tmp_path_factory.mktemp(family)
    folders.write(folder / "model", model, folders.random_tree(model, np.float32), family)
    pairs = random(adapter_specs.adapter_specs(model, lora))
    (folder / "adapter").mkdir()
    peft.export(folder / "adapter", model, lora, pairs, "base/model")
    return family, model, lora, pairs, folder


def test_b_times_a_is_the_change_of_the_models_own_tensors(made):
    """For every tensor of the base folder, scale · B·A equals merged minus base: shapes, names and layers are right."""
    family, model, lora, pairs, folder = made
    base = huggingface.open_folder(folder / "model").load(np.float32)
    merged = adapters.merged(model, base, pairs, adapters.scale_of(lora), jnp.float32)
    before, after = (folders.tensors(model, tree, family) for tree in (base, merged))
    stored = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    files = TensorFiles(read_header(folder / "adapter" / "adapter_model.safetensors"))
    left = set(files.entries)
    for name in before:
        at = f"base_model.model.{name.removesuffix('.weight')}"
        change = np.zeros_like(before[name])
        if f"{at}.lora_A.weight" in left:
            a, b = (files.read(f"{at}.{half}.weight") for half in ("lora_A", "lora_B"))
            assert (a.shape[0], b.shape[1]) == (3, 3)
            change = stored["lora_alpha"] / stored["r"] * b @ a
            change = change.T if stored["fan_in_fan_out"] else change
            left -= {f"{at}.{half}.weight" for half in ("lora_A", "lora_B")}
            assert any(f".{at}".endswith(f".{word}") for word in stored["target_modules"])
            assert np.abs(change).max() > 0.1
        np.testing.assert_allclose(after[name], before[name] + change, atol=1e-4, err_msg=name)
        # PEFT adapts every module with a matching name suffix, so each must have an adapter.
        if any(f".{at}".endswith(f".{word}") for word in stored["target_modules"]):
            assert np.abs(change).max() > 0
    assert not left


def test_there_and_back(made):
    _, model, lora, pairs, folder = made
    opened = peft.with_adapters(huggingface.open_folder(folder / "model"), folder / "adapter")
    base = huggingface.open_folder(folder / "model").load(np.float32)
    want = adapters.merged(model, base, pairs, adapters.scale_of(lora), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, want, opened.load(jnp.float32))
    other = adapters.merged(model, base, pairs, 1.0, jnp.float32)
    assert not all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(other), strict=True))


def test_a_part_of_a_tensor_is_refused(tmp_path):
    for family, target, word in (("phi3", "q", "q, k, v"), ("phi3", "up", "gate, up"), ("gpt2", "v", "q, k, v")):
        model, lora = folders.FAMILIES[family], LoraConfig(rank=2, targets=(target,))
        with pytest.raises(UserError, match=f"{family} stores {word} in one tensor.* convert --to safetensors"):
            peft.export(tmp_path, model, lora, random(adapter_specs.adapter_specs(model, lora)), "base")


def test_adapters_of_another_kind_or_model_are_refused(tmp_path):
    model, lora = folders.FAMILIES["llama"], LoraConfig(rank=3, alpha=6.0, targets=("q", "up"))
    folders.write(tmp_path / "model", model, folders.random_tree(model, np.float32), "llama")
    opened = huggingface.open_folder(tmp_path / "model")
    folder = tmp_path / "adapter"

    def written(model=model, **fields):
        for file in folder.glob("*"):
            file.unlink()
        folder.mkdir(exist_ok=True)
        peft.export(folder, model, lora, random(adapter_specs.adapter_specs(model, lora)), "base")
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        return folder

    peft.with_adapters(opened, written())
    for fields, word in (
        ({"use_rslora": True}, "use_rslora = True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern = "),
        ({"r": None}, "r and lora_alpha must be numbers"),
    ):
        with pytest.raises(UserError, match=word):
            peft.with_adapters(opened, written(**fields))
    with pytest.raises(
        UserError, match=r"does not have one adapter per layer .*missing: base_model.model.model.layers"
    ):
        peft.with_adapters(opened, written(dataclasses.replace(model, layers=1)))
    with pytest.raises(UserError, match=r"has shape .* use adapters that were trained on this model"):
        peft.with_adapters(opened, written(dataclasses.replace(model, width=48)))
    with pytest.raises(UserError, match="cannot be read"):
        peft.with_adapters(opened, tmp_path / "nowhere")
