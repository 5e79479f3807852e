"""The families of models that GGUF files hold, and what llama.cpp takes for granted about each.

Sources: llama.cpp's src/models (one file a family) and its converters.
"""

from typing import Any

from jaxllm.interop.gguf.tensors import Layout

_RMS = {"mlp": "swiglu", "norm": "rmsnorm", "norm_placement": "pre", "positions": "rotary"}
_OLMO = {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "projection"}
_GEMMA = _RMS | {"mlp": "geglu", "norm": "rmsnorm_plus_one", "norm_placement": "sandwich"}
# `general.architecture` -> the fields that all of its models share.
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
# Their queries and keys have the two numbers of a rotary pair side by side.
_PERMUTED = ("llama", "smollm3")
# Gemma's 27B models, which their files do not tell from the others but by the layers: attention is scaled by width.
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Not in a file, and of no weight in what its model computes: how new weights would be drawn, and a loss of training.
INIT_STD = 0.02
NOT_STORED = ("init_std", "router_aux_weight", "unroll")


def layout(family: str) -> Layout:
    """How llama.cpp expects a family's tensors."""
    return Layout(family in _PERMUTED, fused_qkv=family in ("gpt2", "phi3"), fused_gate=family == "phi3")


def epsilon_key(family: str) -> str:
    """The key of what a norm adds to the mean square."""
    kind = "layer_norm_epsilon" if FAMILIES[family]["norm"] == "layernorm" else "layer_norm_rms_epsilon"
    return f"attention.{kind}"
