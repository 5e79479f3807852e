"""Small models of every GGUF family, covering all special cases of each."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np

from jaxllm.config import Architecture
from jaxllm.model.specs import abstract, param_specs

LLAMA = models.ROTARY
QWEN2 = dataclasses.replace(LLAMA, qkv_bias=True)
QWEN3 = dataclasses.replace(LLAMA, qk_norm=True, head_dim=16)
GEMMA = dataclasses.replace(
    models.SLIDING, query_scale=0.0, rope_scaling="none", rope_factor=1.0, rope_theta_sliding=0.0
)
LLAMA3 = dataclasses.replace(
    *(LLAMA,),
    head_dim=64,
    rope_theta=500_000.0,
    rope_scaling="llama3",
    rope_factor=32.0,
    rope_original_context=8192,
    context_length=131072,
    tied_embeddings=False,
)
FAMILIES: dict[str, tuple[str, Architecture]] = {
    "llama": ("llama", dataclasses.replace(LLAMA, tied_embeddings=False)),
    "llama, biases": ("llama", dataclasses.replace(QWEN2, out_bias=True, mlp_bias=True)),
    "llama, wide heads": ("llama", dataclasses.replace(LLAMA, head_dim=20)),
    "llama 3.2": ("llama", LLAMA3),
    "yarn": ("llama", dataclasses.replace(LLAMA, rope_scaling="yarn", rope_factor=4.0, rope_original_context=32)),
    "mistral": ("llama", dataclasses.replace(LLAMA, pattern=("sliding",), window=6)),
    "mixtral": ("llama", models.EXPERTS),
    "qwen2": ("qwen2", QWEN2),
    "qwen3": ("qwen3", QWEN3),
    "qwen3moe": ("qwen3moe", dataclasses.replace(models.EXPERTS, qk_norm=True)),
    "gemma2": ("gemma2", dataclasses.replace(GEMMA, qk_norm=False)),
    "gemma3": (
        "gemma3",
        dataclasses.replace(
            *(GEMMA,),
            attention_softcap=0.0,
            logit_softcap=0.0,
            pattern=("sliding", "sliding", "full"),
            rope_theta=1e6,
            rope_theta_sliding=1e4,
            rope_scaling="linear",
            rope_factor=8.0,
        ),
    ),
    "gpt2": ("gpt2", dataclasses.replace(models.LEARNED, tied_embeddings=True)),
    "gpt2, untied": ("gpt2", models.LEARNED),
    "olmo2": (
        "olmo2",
        dataclasses.replace(
            LLAMA, norm_placement="post", qk_norm=True, qk_norm_over="projection", tied_embeddings=False
        ),
    ),
    "smollm3": ("smollm3", dataclasses.replace(LLAMA, layers=5, pattern=("full", "full", "full", "nope"))),
    "phi3": (
        "phi3",
        dataclasses.replace(
            *(LLAMA,),
            rope_dim=6,
            rope_scaling="longrope",
            rope_original_context=32,
            rope_factor=4.0,
            rope_short_factors=(1.0, 1.05, 1.5),
            rope_long_factors=(1.0, 2.25, 8.5),
        ),
    ),
}


def random_params(model, dtype=jnp.float32, seed=0, scale=1.0):
    """Returns random parameters, including norms and biases, with the given standard deviation."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * rng.normal(size=x.shape), x.dtype), abstract(param_specs(model), dtype)
    )
