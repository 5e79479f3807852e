"""Model families: one function per published family, with the fields that its members share.

Each function takes the sizes of a member, in the order of its signature

    layers, width D, query heads N, key/value heads K, head dimension H, MLP width F

and keyword arguments for fields in which the member differs; `jaxllm.architectures.registry` has one row per model.
"""

import dataclasses
import math
from typing import Any

from jaxllm.config import Architecture


def gpt(layers: int, width: int, heads: int, **changes: Any) -> Architecture:
    """GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020).

    Learned positions, LayerNorm, biases everywhere, tanh approximation of GELU, MLP width 4 D. Source: hparams.json of
    the GPT-2 release; table 2.1 of the GPT-3 paper.
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


def llama(
    layers: int, width: int, heads: int, kv_heads: int, head_dim: int, mlp_width: int, **changes: Any
) -> Architecture:
    """Llama 2 (Touvron et al. 2023), the base of nearly every later decoder.

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


def llama3(*row: int, **changes: Any) -> Architecture:
    """Llama 3 (Grattafiori et al. 2024): Llama 2 with a larger vocabulary, context and rotary base."""
    return llama(*row, **{"vocab_size": 128256, "context_length": 8192, "rope_theta": 500_000.0} | changes)


def llama31(*row: int, factor: float = 8.0, **changes: Any) -> Architecture:
    """Llama 3.1, and 3.2 with another factor: Llama 3 with 131072 positions by scaled rotary frequencies."""
    shared: dict[str, Any] = {
        "context_length": 131072,
        "rope_scaling": "llama3",
        "rope_factor": factor,
        "rope_original_context": 8192,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
    }
    return llama3(*row, **shared | changes)


def qwen25(*row: int, **changes: Any) -> Architecture:
    """Qwen2.5 base models (Qwen Team 2024): Llama with biases on queries, keys and values.

    The vocabulary is padded, to a different size from 7B on. Source: config.json of each release.
    """
    shared: dict[str, Any] = {
        "vocab_size": 152064,
        "context_length": 131072,
        "norm_eps": 1e-5,
        "qkv_bias": True,
        "rope_theta": 1_000_000.0,
    }
    return llama(*row, **shared | changes)


def qwen25_small(*row: int, **changes: Any) -> Architecture:
    """Qwen2.5 below 7B: tied embeddings and a smaller padded vocabulary."""
    return qwen25(*row, **{"vocab_size": 151936, "norm_eps": 1e-6, "tied_embeddings": True} | changes)


def qwen3(*row: int, **changes: Any) -> Architecture:
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
    return llama(*row, **shared | changes)


def gemma(*row: int, **changes: Any) -> Architecture:
    """Fields common to Gemma 2 and 3.

    GeGLU, tied and scaled embeddings, and RMSNorm of scale 1 + w both before and after each sub-layer.
    """
    shared: dict[str, Any] = {
        "mlp": "geglu",
        "norm": "rmsnorm_plus_one",
        "norm_placement": "sandwich",
        "norm_eps": 1e-6,
        "tied_embeddings": True,
    }
    model = llama(*row, **shared | changes)
    return dataclasses.replace(model, embedding_scale=math.sqrt(model.width))


def gemma2(*row: int, **changes: Any) -> Architecture:
    """Gemma 2 (Gemma Team 2024): soft-capped logits; sliding-window attention in even layers, full in odd ones."""
    shared: dict[str, Any] = {
        "vocab_size": 256000,
        "context_length": 8192,
        "pattern": ("sliding", "full"),
        "window": 4096,
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
    }
    return gemma(*row, **shared | changes)


def gemma3(*row: int, **changes: Any) -> Architecture:
    """Gemma 3 language models (Gemma Team 2025): five sliding-window layers, then one of full attention.

    The vocabulary is the tokenizer's, 262144, in all sizes. The image-and-text checkpoints (4B and larger) have 64 more
    embedding rows, for image tokens; use `vocab_size=262208` to match their shape.
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
    return gemma(*row, **shared | changes)


def smollm2(*row: int, **changes: Any) -> Architecture:
    """SmolLM2 (Ben Allal et al. 2025): Llama with tied embeddings. Source: config.json of each release."""
    shared: dict[str, Any] = {
        "vocab_size": 49152,
        "context_length": 8192,
        "tied_embeddings": True,
        "rope_theta": 100_000.0,
    }
    return llama(*row, **shared | changes)


def smollm3(*row: int, **changes: Any) -> Architecture:
    """SmolLM3 (Bakouch et al. 2025): no rotary positions in every fourth layer. Source: config.json of the release."""
    shared: dict[str, Any] = {
        "vocab_size": 128256,
        "context_length": 65536,
        "norm_eps": 1e-6,
        "pattern": ("full",) * 3 + ("nope",),
        "tied_embeddings": True,
        "rope_theta": 5_000_000.0,
    }
    return llama(*row, **shared | changes)


def olmo2(*row: int, **changes: Any) -> Architecture:
    """OLMo 2 (Walsh et al. 2025): norms after the sub-layers; queries and keys normalized over all heads together.

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
    return llama(*row, **shared | changes)


def phi3(*row: int, **changes: Any) -> Architecture:
    """Phi-3 (Abdin et al. 2024) and models of its architecture: Llama's, with a window in models of 4096 positions.

    Source: config.json of each release. The windows of the longer models are no shorter than their context.
    """
    return llama(*row, **{"vocab_size": 32064} | changes)


def phi_longrope(*row: int, short: tuple[float, ...], long: tuple[float, ...], **changes: Any) -> Architecture:
    """Phi models extended from 4096 to 131072 positions by longrope.

    Args:
      short, long: factors that divide the frequency of each rotary pair, for short and for long sequences.
    """
    shared: dict[str, Any] = {
        "context_length": 131072,
        "rope_scaling": "longrope",
        "rope_factor": 32.0,
        "rope_original_context": 4096,
        "rope_short_factors": short,
        "rope_long_factors": long,
    }
    return phi3(*row, **shared | changes)
