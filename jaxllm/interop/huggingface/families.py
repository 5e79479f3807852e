"""Table of the supported Hugging Face model families, used by `config_file` to read and write config.json.

To add a family, add a row with: the mapping from fields of the file to fields of `Architecture`, with the defaults of
transformers (configuration classes, release 5); the values shared by all of its models; and the parts that need code.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.interop.huggingface import family_parts as parts
from jaxllm.interop.huggingface import layer_kinds
from jaxllm.interop.huggingface.family_parts import Part


@dataclasses.dataclass(frozen=True)
class Family:
    """Mapping between config.json and `Architecture` for one model family.

    Attributes:
      class_name: name of the language model class in transformers.
      plain: field of the file -> (field of `Architecture`, default if the field is missing or null).
      fixed: fields of `Architecture` with the same value in all models of the family.
      parts: conversions that depend on more than one field.
    """

    class_name: str
    plain: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, Any]
    parts: tuple[Part, ...]


def _sizes(
    vocab_size: int, width: int, mlp_width: int, layers: int, heads: int, context: int, eps: float, tied: bool
) -> dict[str, tuple[str, Any]]:
    return {
        "vocab_size": ("vocab_size", vocab_size),
        "hidden_size": ("width", width),
        "intermediate_size": ("mlp_width", mlp_width),
        "num_hidden_layers": ("layers", layers),
        "num_attention_heads": ("heads", heads),
        "max_position_embeddings": ("context_length", context),
        "initializer_range": ("init_std", 0.02),
        "rms_norm_eps": ("norm_eps", eps),
        "tie_word_embeddings": ("tied_embeddings", tied),
    }


_LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "norm_placement": "pre",
    "positions": "rotary",
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
}
_GEMMA: dict[str, Any] = _LLAMA | {"norm": "rmsnorm_plus_one", "norm_placement": "sandwich"}
_SILU = parts.gated_activation("hidden_act", "silu")
_GELU = parts.gated_activation("hidden_activation", "gelu_pytorch_tanh")
_NO_BIAS = parts.without("attention_bias", "mlp_bias")
_ROUTER: dict[str, tuple[str, Any]] = {"router_aux_loss_coef": ("router_aux_weight", 0.001)}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        class_name="GPT2LMHeadModel",
        plain={
            "vocab_size": ("vocab_size", 50257),
            "n_embd": ("width", 768),
            "n_layer": ("layers", 12),
            "n_head": ("heads", 12),
            "n_positions": ("context_length", 1024),
            "initializer_range": ("init_std", 0.02),
            "layer_norm_epsilon": ("norm_eps", 1e-5),
            "tie_word_embeddings": ("tied_embeddings", True),
        },
        fixed={
            "mlp": "gelu",
            "norm": "layernorm",
            "norm_placement": "pre",
            "positions": "learned",
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "qk_norm": False,
        },
        parts=(parts.GPT2,),
    ),
    # Llama 2, 3, 3.1 and 3.2, SmolLM2.
    "llama": Family(
        class_name="LlamaForCausalLM",
        plain=_sizes(32000, 4096, 11008, 32, 32, 2048, 1e-6, tied=False) | {"mlp_bias": ("mlp_bias", False)},
        fixed=_LLAMA,
        parts=(parts.heads(), _SILU, parts.ATTENTION_BIAS, parts.rope(1e4)),
    ),
    "mistral": Family(
        class_name="MistralForCausalLM",
        plain=_sizes(32000, 4096, 14336, 32, 32, 131072, 1e-6, tied=False),
        fixed=_LLAMA,
        parts=(parts.heads(kv_heads=8), _SILU, _NO_BIAS, layer_kinds.all_slide(4096), parts.rope(1e4)),
    ),
    "mixtral": Family(
        class_name="MixtralForCausalLM",
        plain=_sizes(32000, 4096, 14336, 32, 32, 131072, 1e-5, tied=False)
        | _ROUTER
        | {"num_experts_per_tok": ("experts_per_token", 2)},
        fixed=_LLAMA | {"normalize_routing": True},
        parts=(parts.heads(kv_heads=8), _SILU, _NO_BIAS, parts.MIXTRAL, layer_kinds.all_slide(None), parts.rope(1e6)),
    ),
    # Qwen2 and Qwen2.5.
    "qwen2": Family(
        class_name="Qwen2ForCausalLM",
        plain=_sizes(151936, 4096, 22016, 32, 32, 32768, 1e-6, tied=False),
        fixed=_LLAMA | {"qkv_bias": True},
        parts=(
            *(parts.heads(kv_heads=32), _SILU, parts.without("mlp_bias", "use_mrope")),
            *(layer_kinds.upper_slide_if_used(4096, first=28), parts.rope(1e4)),
        ),
    ),
    "qwen3": Family(
        class_name="Qwen3ForCausalLM",
        plain=_sizes(151936, 4096, 22016, 32, 32, 32768, 1e-6, tied=False),
        fixed=_LLAMA | {"qk_norm": True},
        parts=(
            *(parts.heads(kv_heads=32, head_dim=128), _SILU, parts.ATTENTION_BIAS, parts.without("mlp_bias")),
            *(layer_kinds.upper_slide_if_used(4096, first=28), parts.rope(1e4)),
        ),
    ),
    "qwen3_moe": Family(
        class_name="Qwen3MoeForCausalLM",
        plain=_sizes(151936, 2048, 768, 24, 32, 32768, 1e-6, tied=False)
        | _ROUTER
        | {
            "num_experts_per_tok": ("experts_per_token", 8),
            "norm_topk_prob": ("normalize_routing", False),
            "moe_intermediate_size": ("mlp_width", 768),
        },
        fixed=_LLAMA | {"qk_norm": True},
        parts=(
            *(parts.heads(kv_heads=4), _SILU, parts.ATTENTION_BIAS, parts.without("mlp_bias"), parts.QWEN3_MOE),
            *(layer_kinds.all_slide_if_used(4096), parts.rope(1e4)),
        ),
    ),
    "gemma2": Family(
        class_name="Gemma2ForCausalLM",
        plain=_sizes(256000, 2304, 9216, 26, 8, 8192, 1e-6, tied=True),
        fixed=_GEMMA,
        parts=(
            *(parts.heads(kv_heads=4, head_dim=256), _GELU, parts.ATTENTION_BIAS, parts.without("mlp_bias")),
            *(layer_kinds.slide_but_every(2, 4096), parts.gemma(30.0, 50.0), parts.rope(1e4)),
        ),
    ),
    "gemma3_text": Family(
        class_name="Gemma3ForCausalLM",
        plain=_sizes(262208, 2304, 9216, 26, 8, 131072, 1e-6, tied=True),
        fixed=_GEMMA | {"qk_norm": True},
        parts=(
            *(parts.heads(kv_heads=4, head_dim=256), _GELU, parts.ATTENTION_BIAS, parts.without("mlp_bias")),
            *(layer_kinds.slide_but_every(6, 4096), parts.gemma(None, None), parts.rope(1e6, sliding=1e4)),
        ),
    ),
    "smollm3": Family(
        class_name="SmolLM3ForCausalLM",
        plain=_sizes(128256, 2048, 11008, 36, 16, 32768, 1e-6, tied=True) | {"mlp_bias": ("mlp_bias", False)},
        fixed=_LLAMA,
        parts=(parts.heads(kv_heads=4), _SILU, parts.ATTENTION_BIAS, layer_kinds.SMOLLM3, parts.rope(2e6)),
    ),
    # Phi-3, Phi-3.5 and Phi-4, mini and medium; the small and MoE models have other architectures.
    "phi3": Family(
        class_name="Phi3ForCausalLM",
        plain=_sizes(32064, 3072, 8192, 32, 32, 4096, 1e-5, tied=False),
        fixed=_LLAMA,
        parts=(
            *(parts.heads(), _SILU, _NO_BIAS, parts.without("lm_head_bias"), layer_kinds.all_slide(None)),
            parts.rope(1e4, partial=True, original=4096, aliases={"su": "longrope", "yarn": "longrope"}),
        ),
    ),
    "olmo2": Family(
        class_name="Olmo2ForCausalLM",
        plain=_sizes(50304, 4096, 11008, 32, 32, 2048, 1e-5, tied=False),
        fixed=_LLAMA | {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "projection"},
        parts=(parts.heads(), _SILU, parts.ATTENTION_BIAS, parts.without("mlp_bias"), parts.rope(1e4)),
    ),
}
