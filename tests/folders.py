"""Hugging Face folders of small random models, written by jaxllm alone."""

import dataclasses
import json
import pathlib

import ml_dtypes
import models
import numpy as np

from jaxllm.config import Architecture
from jaxllm.interop import rules
from jaxllm.interop.huggingface import config_file, folder_rules
from jaxllm.interop.huggingface import model as huggingface
from jaxllm.interop.text import Text
from jaxllm.model import specs

_GEMMA2 = dataclasses.replace(
    models.SLIDING,
    qk_norm=False,
    query_scale=0.0,
    rope_scaling="none",
    rope_factor=1.0,
    rope_theta_sliding=0.0,
)
# One model per family. Where possible, layers remain after the last whole pattern and head_dim is not width / heads.
FAMILIES: dict[str, Architecture] = {
    "gpt2": dataclasses.replace(models.LEARNED, tied_embeddings=True),
    "llama": dataclasses.replace(models.ROTARY, head_dim=10, qkv_bias=True, out_bias=True, mlp_bias=True),
    "mistral": dataclasses.replace(models.ROTARY, pattern=("sliding",), window=6, tied_embeddings=False),
    "mixtral": models.EXPERTS,
    "qwen2": dataclasses.replace(
        models.ROTARY, qkv_bias=True, layers=3, pattern=("full", "sliding", "sliding"), window=6
    ),
    "qwen3": dataclasses.replace(models.ROTARY, qk_norm=True, head_dim=16),
    "qwen3_moe": dataclasses.replace(models.EXPERTS, qk_norm=True, normalize_routing=False),
    "gemma2": _GEMMA2,
    "gemma3_text": dataclasses.replace(_GEMMA2, qk_norm=True, attention_softcap=0.0, rope_theta_sliding=100.0),
    "smollm3": dataclasses.replace(models.ROTARY, layers=6, pattern=("full", "full", "full", "nope")),
    "phi3": dataclasses.replace(
        models.ROTARY,
        rope_dim=6,
        rope_scaling="longrope",
        rope_original_context=32,
        rope_factor=4.0,
        rope_short_factors=(1.0, 1.5, 2.0),
        rope_long_factors=(2.0, 3.0, 5.0),
    ),
    "olmo2": dataclasses.replace(models.ROTARY, norm_placement="post", qk_norm=True, qk_norm_over="projection"),
}


def random_tree(model: Architecture, dtype=ml_dtypes.bfloat16, seed: int = 0):
    """Returns a parameter tree of random bits that represent finite values."""
    generator = np.random.default_rng(seed)
    return specs.map_specs(lambda spec: generator.standard_normal(spec.shape).astype(dtype), specs.param_specs(model))


def write(
    folder: pathlib.Path, model: Architecture, tree, family: str = "", shard_bytes: int = 1 << 40
) -> pathlib.Path:
    """Writes a Hugging Face folder of the model in the dtype of the tree."""
    folder.mkdir(exist_ok=True)
    dtype = np.asarray(tree["embed"]["tokens"]).dtype
    huggingface.export(folder, model, tree, dtype, shard_bytes=shard_bytes, family=family, text=Text(end_ids=(1, 2)))
    return folder


def tensors(model: Architecture, tree, family: str) -> dict[str, np.ndarray]:
    return dict(rules.save(model, folder_rules.build_rules(model, family), tree))


def change_config(folder: pathlib.Path, **fields) -> None:
    """Sets fields of config.json; the value ... removes a field."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def config_of(model: Architecture, family: str = "") -> dict:
    return config_file.write_config(model, family)[1]
