"""Supported GGUF model families, and the properties that llama.cpp implies for each.

Sources: llama.cpp's src/models (one file per family) and its converters.
"""

from typing import Any

from jaxllm.interop.gguf.tensors import Layout

_RMS = {"mlp": "swiglu", "norm": "rmsnorm", "norm_placement": "pre", "positions": "rotary"}
_OLMO = {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "projection"}
_GEMMA = _RMS | {"mlp": "geglu", "norm": "rmsnorm_plus_one", "norm_placement": "sandwich"}
# `general.architecture` -> fields of `Architecture` common to all of its models.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _RMS | {"qk_norm": False},
    "qwen2": _RMS | {"qk_norm": False},
    "qwen3": _RMS | {"qk_norm": True},
    "qwen3moe": _RMS | {"qk_norm": True},
    "gemma2": _GEMMA | {"qk_norm": False},
    "gemma3": _GEMMA | {"qk_norm": True},
    "olmo2": _RMS | _OLMO,
    "smollm3": _RMS | {"qk_norm": False, "pattern": ("full", "full", "full", "nope")},
    "phi3": _RMS | {"qk_norm": False},
    "gpt2": {"mlp": "gelu", "norm": "layernorm", "norm_placement": "pre", "positions": "learned", "qk_norm": False},
}
# Families whose query and key rows have the two elements of a rotary pair adjacent.
_PERMUTED = ("llama", "smollm3")
# Family -> layers of Gemma's 27B models, which scale queries by width. Files identify them only by the layer count.
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Not stored, as they do not affect inference: the initializer scale and the weight of an auxiliary training loss.
INIT_STD = 0.02
NOT_STORED = ("init_std", "router_aux_weight", "unroll")


def layout(family: str) -> Layout:
    """Returns the tensor layout that llama.cpp expects for a family."""
    return Layout(family in _PERMUTED, fused_qkv=family in ("gpt2", "phi3"), fused_gate=family == "phi3")


def epsilon_key(family: str) -> str:
    """Returns the key of the epsilon of a family's norms."""
    kind = "layer_norm_epsilon" if FAMILIES[family]["norm"] == "layernorm" else "layer_norm_rms_epsilon"
    return f"attention.{kind}"
