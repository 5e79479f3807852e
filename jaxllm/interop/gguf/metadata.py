"""Converts the metadata of a GGUF file to an `Architecture`.

Sources: the keys and their defaults in llama.cpp (src/llama-model.cpp and src/models, one file per family), and its
converters. Properties that a family implies without storing them are in `FAMILIES` where possible.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.gguf import rope
from jaxllm.interop.gguf.file import FamilyKeys, Metadata
from jaxllm.interop.gguf.tensors import Layout
from jaxllm.interop.rules import shortest_pattern

Shapes = Mapping[str, tuple[int, ...]]

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
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Not stored, as they do not affect inference: the initializer scale and the weight of an auxiliary training loss.
INIT_STD = 0.02
NOT_STORED = ("init_std", "router_aux_weight", "unroll")


def layout_of(family: str) -> Layout:
    """Returns the tensor layout that llama.cpp expects for a family."""
    return Layout(family in _PERMUTED, fused_qkv=family in ("gpt2", "phi3"), fused_gate=family == "phi3")


def epsilon_key(family: str) -> str:
    """Returns the key of the epsilon of a family's norms."""
    kind = "layer_norm_epsilon" if FAMILIES[family]["norm"] == "layernorm" else "layer_norm_rms_epsilon"
    return f"attention.{kind}"


@dataclasses.dataclass(frozen=True)
class ParsedMetadata:
    """Architecture and tensor layout of the model in a GGUF file.

    Attributes:
      family: `general.architecture` of the file.
      model: the architecture.
      layout: layout of the tensors.
      constants: names of tensors that are not weights; `model` represents their content.
    """

    family: str
    model: Architecture
    layout: Layout
    constants: frozenset[str]


def parse_metadata(metadata: Metadata, shapes: Shapes, read: Callable[[str], np.ndarray]) -> ParsedMetadata:
    """Reads the architecture of a file; rejects the file if any key of its family is not used.

    Args:
      metadata: metadata of the file.
      shapes: shapes of its tensors.
      read: returns a tensor by name; called for constants only.
    Raises:
      UserError: the family is not supported, or a key is missing, unknown, or has a value that is not supported.
    """
    kind = metadata.get("general.type", str)
    if kind not in (None, "model"):
        raise UserError(f"{metadata.where}: general.type is {kind!r}; give the file with the model's weights")
    family = metadata.require("general.architecture", str)
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"{metadata.where}: general.architecture is {family!r}, which is unsupported; supported values are {known}"
        )
    keys = FamilyKeys(metadata, family)
    model = _architecture(keys, shapes, read)
    for key, value in _EXPECTED.items():
        keys.expect(key, value)
    unknown = metadata.unread(f"{family}.")
    if unknown:
        raise UserError(
            f"{metadata.where} has {', '.join(unknown)}, which jaxllm does not support; the model might compute "
            "something else: use another model"
        )
    fused = "blk.0.attn_qkv.weight" in shapes
    return ParsedMetadata(
        family,
        model,
        dataclasses.replace(layout_of(family), fused_qkv=fused),
        frozenset(rope.CONSTANT_TENSORS & set(shapes)),
    )


# Keys that have no effect at this value (None: at any value).
_EXPECTED: dict[str, Any] = {
    "tensor_data_layout": None,  # layout of the weights before conversion
    "rope.scaling.finetuned": None,  # origin of the scaling
    "attention.causal": True,
    "expert_gating_func": 1,  # softmax
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_shared_count": 0,
    "use_parallel_residual": False,
    "embedding_length_per_layer_input": 0,
    "pooling_type": 0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
}


def _architecture(keys: FamilyKeys, shapes: Shapes, read: Callable[[str], np.ndarray]) -> Architecture:
    family, where = keys.family, keys.metadata.where
    if "token_embd.weight" not in shapes:
        raise UserError(
            f"{where} has no tensor token_embd.weight; give the file of a model, not of a vocabulary or an adapter"
        )
    layers, width, heads = keys.size("block_count"), keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", width // max(heads, 1))
    keys.expect("attention.value_length", head_dim)
    vocabulary = shapes["token_embd.weight"][0]
    keys.expect("vocab_size", vocabulary)
    context = keys.size("context_length")
    experts = keys.size("expert_count", 0)
    mlp_width = keys.size("expert_feed_forward_length", 0) if experts else 0
    dense_width = keys.size("feed_forward_length", mlp_width or None)
    gemma = family.startswith("gemma")
    by_width = _SCALED_BY_WIDTH.get(family) == layers
    fields: dict[str, Any] = dict(
        vocab_size=vocabulary,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=keys.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=mlp_width or dense_width,
        context_length=context,
        norm_eps=keys.number(epsilon_key(family)),
        qkv_bias=bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & set(shapes)),
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        tied_embeddings="output.weight" not in shapes,
        init_std=INIT_STD,
        experts=experts,
        experts_per_token=keys.size("expert_used_count") if experts else 0,
        embedding_scale=math.sqrt(width) if gemma else 1.0,
        query_scale=(width / heads) ** -0.5 if by_width else 0.0,
        # llama.cpp's defaults are Gemma 2's.
        attention_softcap=keys.number("attn_logit_softcapping", 50.0) if family == "gemma2" else 0.0,
        logit_softcap=keys.number("final_logit_softcapping", 30.0 if family == "gemma2" else 0.0) if gemma else 0.0,
        **_pattern(keys, layers, context),
    )
    fields |= FAMILIES[family]
    if fields["positions"] == "rotary":
        fields |= rope.read_rope(keys, head_dim, set(shapes), read)
    return Architecture(**fields)


def _pattern(keys: FamilyKeys, layers: int, context: int) -> dict[str, Any]:
    """Reads pattern and window. The file has a list, a period whose last layer is full, or the family's default."""
    default = {"gemma2": 4096}.get(keys.family, 0)
    window = keys.size("attention.sliding_window", default)
    pattern = keys.metadata.raw(f"{keys.family}.attention.sliding_window_pattern")
    if not 0 < window < context:  # the window masks nothing
        return {"pattern": ("full",), "window": 0}
    if isinstance(pattern, list):
        is_sliding = [bool(flag) for flag in pattern]
        if len(is_sliding) != layers:
            where, count = keys.metadata.where, len(is_sliding)
            raise UserError(f"{where}: sliding_window_pattern has {count} layers of {layers}; convert the model again")
    else:
        period = pattern if isinstance(pattern, int) else {"gemma2": 2, "gemma3": 6, "olmo2": 4}.get(keys.family, 0)
        is_sliding = [period < 1 or layer % period < period - 1 for layer in range(layers)]
    return {"pattern": shortest_pattern(["sliding" if flag else "full" for flag in is_sliding]), "window": window}
