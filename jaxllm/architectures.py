"""The numbers of published transformers, and how a run's `model` section becomes one of them.

A family's helper states once what its members share; a member's row reads

    layers, width D, query heads N, key/value heads K, head dimension H, MLP width F

in the order of the helper's signature. Adding a model is adding a row. The counts of parameters that the
publishers state are held in `tests/test_architectures.py`.
"""

import dataclasses
import difflib
import math
from typing import Any

from jaxllm import config as config_lib
from jaxllm import config_checks, longrope
from jaxllm.config import Architecture, Config, ModelConfig
from jaxllm.errors import UserError


def _gpt(layers: int, width: int, heads: int, **changes: Any) -> Architecture:
    """GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020).

    Learned positions, LayerNorm, biases everywhere, the tanh approximation of GELU, an MLP of 4 D. Source:
    hparams.json of the GPT-2 release; table 2.1 of the GPT-3 paper.
    """
    gpt2 = Architecture(
        vocab_size=50257,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mlp_width=4 * width,
        context_length=1024,
        mlp="gelu",
        norm="layernorm",
        norm_placement="pre",
        norm_eps=1e-5,
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm=False,
        tied_embeddings=True,
        init_std=0.02,
    )
    return dataclasses.replace(gpt2, **changes)


def _llama(
    layers: int, width: int, heads: int, kv_heads: int, head_dim: int, mlp_width: int, **changes: Any
) -> Architecture:
    """Llama 2 (Touvron et al. 2023), and what nearly every later decoder keeps of it.

    Rotary positions, RMSNorm, SwiGLU, no biases, untied embeddings. Source: config.json of each release.
    """
    llama2 = Architecture(
        vocab_size=32000,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        context_length=4096,
        mlp="swiglu",
        norm="rmsnorm",
        norm_placement="pre",
        norm_eps=1e-5,
        positions="rotary",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=False,
        init_std=0.02,
    )
    return dataclasses.replace(llama2, **changes)


def _llama3(*row: int, **changes: Any) -> Architecture:
    """Llama 3 (Grattafiori et al. 2024): a larger vocabulary and rotary base."""
    return _llama(*row, **{"vocab_size": 128256, "context_length": 8192, "rope_theta": 500_000.0} | changes)


def _llama31(*row: int, factor: float = 8.0, **changes: Any) -> Architecture:
    """Llama 3.1, and 3.2 with another factor: 131072 positions by scaled rotary frequencies."""
    shared: dict[str, Any] = {
        "context_length": 131072,
        "rope_scaling": "llama3",
        "rope_factor": factor,
        "rope_original_context": 8192,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
    }
    return _llama3(*row, **shared | changes)


def _qwen25(*row: int, **changes: Any) -> Architecture:
    """Qwen2.5 base models (Qwen Team 2024): biases on queries, keys and values.

    The vocabulary is padded, to another size from 7B on. Source: config.json of each release.
    """
    shared: dict[str, Any] = {
        "vocab_size": 152064,
        "context_length": 131072,
        "norm_eps": 1e-5,
        "qkv_bias": True,
        "rope_theta": 1_000_000.0,
    }
    return _llama(*row, **shared | changes)


def _qwen25_small(*row: int, **changes: Any) -> Architecture:
    """Qwen2.5 below 7B: tied embeddings."""
    return _qwen25(*row, **{"vocab_size": 151936, "norm_eps": 1e-6, "tied_embeddings": True} | changes)


def _qwen3(*row: int, **changes: Any) -> Architecture:
    """Qwen3 (Qwen Team 2025): RMSNorm on queries and keys in place of biases.

    The context is that of the post-trained releases; the base models' config.json has 32768.
    """
    shared: dict[str, Any] = {
        "vocab_size": 151936,
        "context_length": 40960,
        "norm_eps": 1e-6,
        "qk_norm": True,
        "rope_theta": 1_000_000.0,
    }
    return _llama(*row, **shared | changes)


def _gemma(*row: int, **changes: Any) -> Architecture:
    """What Gemma 2 and 3 share: GeGLU, norms of scale 1 + w on both sides of a sub-layer, scaled embeddings."""
    shared: dict[str, Any] = {
        "mlp": "geglu",
        "norm": "rmsnorm_plus_one",
        "norm_placement": "sandwich",
        "norm_eps": 1e-6,
        "tied_embeddings": True,
    }
    model = _llama(*row, **shared | changes)
    return dataclasses.replace(model, embedding_scale=math.sqrt(model.width))


def _gemma2(*row: int, **changes: Any) -> Architecture:
    """Gemma 2 (Gemma Team 2024): soft-capped logits; even layers slide, odd ones see everything."""
    shared: dict[str, Any] = {
        "vocab_size": 256000,
        "context_length": 8192,
        "pattern": ("sliding", "full"),
        "window": 4096,
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
    }
    return _gemma(*row, **shared | changes)


def _gemma3(*row: int, **changes: Any) -> Architecture:
    """The language models of Gemma 3 (Gemma Team 2025): five sliding layers, then one that sees everything.

    The vocabulary is the tokenizer's, 262144, in all sizes. The image-and-text checkpoints (4B and more) have
    64 more embedding rows, for image tokens: `vocab_size=262208` is their shape.
    """
    shared: dict[str, Any] = {
        "vocab_size": 262144,
        "context_length": 131072,
        "pattern": ("sliding",) * 5 + ("full",),
        "window": 1024,
        "qk_norm": True,
        "rope_theta": 1_000_000.0,
        "rope_theta_sliding": 10_000.0,
        "rope_scaling": "linear",
        "rope_factor": 8.0,
    }
    return _gemma(*row, **shared | changes)


def _smollm2(*row: int, **changes: Any) -> Architecture:
    """SmolLM2 (Ben Allal et al. 2025): Llama with tied embeddings. Source: config.json of each release."""
    shared: dict[str, Any] = {
        "vocab_size": 49152,
        "context_length": 8192,
        "tied_embeddings": True,
        "rope_theta": 100_000.0,
    }
    return _llama(*row, **shared | changes)


def _smollm3(*row: int, **changes: Any) -> Architecture:
    """SmolLM3 (Bakouch et al. 2025): every fourth layer is not rotated. Source: config.json of the release."""
    shared: dict[str, Any] = {
        "vocab_size": 128256,
        "context_length": 65536,
        "norm_eps": 1e-6,
        "pattern": ("full",) * 3 + ("nope",),
        "tied_embeddings": True,
        "rope_theta": 5_000_000.0,
    }
    return _llama(*row, **shared | changes)


def _olmo2(*row: int, **changes: Any) -> Architecture:
    """OLMo 2 (Walsh et al. 2025): norms after the sub-layers, and of queries and keys over all heads together.

    Source: config.json of each release.
    """
    shared: dict[str, Any] = {
        "vocab_size": 100352,
        "norm_placement": "post",
        "norm_eps": 1e-6,
        "qk_norm": True,
        "qk_norm_over": "projection",
        "rope_theta": 500_000.0,
    }
    return _llama(*row, **shared | changes)


def _phi3(*row: int, **changes: Any) -> Architecture:
    """Phi-3 (Abdin et al. 2024) and what has its architecture: Llama's, with a window in the models of 4096 positions.

    Source: config.json of each release. The windows of the longer models are no shorter than their context.
    """
    return _llama(*row, **{"vocab_size": 32064} | changes)


def _phi_longrope(*row: int, short: tuple[float, ...], long: tuple[float, ...], **changes: Any) -> Architecture:
    """131072 positions from 4096 by longrope."""
    shared: dict[str, Any] = {
        "context_length": 131072,
        "rope_scaling": "longrope",
        "rope_factor": 32.0,
        "rope_original_context": 4096,
        "rope_short_factors": short,
        "rope_long_factors": long,
    }
    return _phi3(*row, **shared | changes)


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    # The paper alternates dense and banded sparse attention without giving the band; here all layers are dense.
    "gpt3-175b": _gpt(96, 12288, 96, context_length=2048),
    "llama2-7b": _llama(32, 4096, 32, 32, 128, 11008),
    "llama2-13b": _llama(40, 5120, 40, 40, 128, 13824),
    "llama2-70b": _llama(80, 8192, 64, 8, 128, 28672),
    "llama3-8b": _llama3(32, 4096, 32, 8, 128, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 8, 128, 28672),
    "llama3.1-8b": _llama31(32, 4096, 32, 8, 128, 14336),
    "llama3.1-70b": _llama31(80, 8192, 64, 8, 128, 28672),
    "llama3.1-405b": _llama31(126, 16384, 128, 8, 128, 53248),
    "llama3.2-1b": _llama31(16, 2048, 32, 8, 64, 8192, factor=32.0, tied_embeddings=True),
    "llama3.2-3b": _llama31(28, 3072, 24, 8, 128, 8192, factor=32.0, tied_embeddings=True),
    # Jiang et al. 2023, v0.1; Jiang et al. 2024. Source: config.json of each release.
    "mistral-7b": _llama(32, 4096, 32, 8, 128, 14336, context_length=32768, pattern=("sliding",), window=4096),
    "mixtral-8x7b": _llama(
        *(32, 4096, 32, 8, 128, 14336),
        context_length=32768,
        rope_theta=1_000_000.0,
        experts=8,
        experts_per_token=2,
        router_aux_weight=0.02,
    ),
    "qwen2.5-0.5b": _qwen25_small(24, 896, 14, 2, 64, 4864, context_length=32768),
    "qwen2.5-1.5b": _qwen25_small(28, 1536, 12, 2, 128, 8960),
    "qwen2.5-3b": _qwen25_small(36, 2048, 16, 2, 128, 11008, context_length=32768),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 128, 18944, norm_eps=1e-6),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 128, 13824),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 128, 27648),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 128, 29568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 128, 3072, tied_embeddings=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 128, 6144, tied_embeddings=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 128, 9728, tied_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 128, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 128, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 128, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 128, 768, experts=128, experts_per_token=8, router_aux_weight=0.001),
    "gemma2-2b": _gemma2(26, 2304, 8, 4, 256, 9216),
    "gemma2-9b": _gemma2(42, 3584, 16, 8, 256, 14336),
    # Both 27B models scale attention by (D / N) ** -0.5, the smaller ones by H ** -0.5.
    "gemma2-27b": _gemma2(46, 4608, 32, 16, 128, 36864, query_scale=(4608 / 32) ** -0.5),
    "gemma3-1b": _gemma3(
        *(26, 1152, 4, 1, 256, 6912),
        context_length=32768,
        window=512,
        rope_scaling="none",
        rope_factor=1.0,
    ),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 256, 10240),
    "gemma3-12b": _gemma3(48, 3840, 16, 8, 256, 15360),
    "gemma3-27b": _gemma3(62, 5376, 32, 16, 128, 21504, query_scale=(5376 / 32) ** -0.5),
    "smollm2-135m": _smollm2(30, 576, 9, 3, 64, 1536, init_std=1 / 24),
    "smollm2-360m": _smollm2(32, 960, 15, 5, 64, 2560),
    "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 64, 8192, rope_theta=130_000.0),
    "smollm3-3b": _smollm3(36, 2048, 16, 4, 128, 11008),
    "olmo2-1b": _olmo2(16, 2048, 16, 16, 128, 8192),
    "olmo2-7b": _olmo2(32, 4096, 32, 32, 128, 11008),
    "olmo2-13b": _olmo2(40, 5120, 40, 40, 128, 13824),
    "olmo2-32b": _olmo2(64, 5120, 40, 8, 128, 27648),
    "phi3-mini-4k": _phi3(32, 3072, 32, 32, 96, 8192, pattern=("sliding",), window=2047),
    "phi3-medium-4k": _phi3(40, 5120, 40, 10, 128, 17920, pattern=("sliding",), window=2047),
    "phi3.5-mini": _phi_longrope(
        *(32, 3072, 32, 32, 96, 8192), short=longrope.PHI35_MINI_SHORT, long=longrope.PHI35_MINI_LONG
    ),
    "phi4": _phi3(40, 5120, 40, 10, 128, 17920, vocab_size=100352, context_length=16384, rope_theta=250_000.0),
    "phi4-mini": _phi_longrope(
        *(32, 3072, 24, 8, 128, 8192),
        short=longrope.PHI4_MINI_SHORT,
        long=longrope.PHI4_MINI_LONG,
        vocab_size=200064,
        rope_dim=96,
        tied_embeddings=True,
    ),
}


def resolve(model: ModelConfig) -> Architecture:
    """The architecture named `model.name`, with every override that is not None applied.

    An override changes its own field and no other: a new width or number of heads keeps head_dim, and a new
    width keeps embedding_scale. The one exception is a model with as many key heads as query heads (no
    grouping), which stays one: there `heads` sets `kv_heads` too, unless that is given. Where every field is given
    that has no default, as `listed` gives them, the name may be any.

    Raises:
      UserError: there is no such name; it tells the nearest ones.
    """
    fields = dataclasses.fields(Architecture)
    overrides = {field.name: getattr(model, field.name) for field in fields if getattr(model, field.name) is not None}
    if model.name not in ARCHITECTURES:
        if all(field.name in overrides for field in fields if field.default is dataclasses.MISSING):
            return Architecture(**overrides)
        near = difflib.get_close_matches(model.name, ARCHITECTURES, n=3, cutoff=0.0)
        raise UserError(f"config.model.name is {model.name!r}, which is no known model; nearest: {', '.join(near)}")
    entry = ARCHITECTURES[model.name]
    if "heads" in overrides and entry.kv_heads == entry.heads:
        overrides = {"kv_heads": overrides["heads"]} | overrides
    return dataclasses.replace(entry, **overrides)


def listed(name: str, model: Architecture) -> ModelConfig:
    """The configuration of a model that is in no table here: all of its numbers, under a name for messages."""
    return ModelConfig(name=name, **{field.name: getattr(model, field.name) for field in dataclasses.fields(model)})


def resolve_config(config: Config) -> Architecture:
    """The architecture of a run whose whole configuration has been checked.

    Raises:
      UserError: one line naming the fields and the fix.
    """
    config_lib.check_types(config)
    model = resolve(config.model)
    config_checks.check(config, model)
    return model
