"""Converts the metadata of a GGUF file to an `Architecture`.

Sources: the keys and their defaults in llama.cpp (src/llama-model.cpp and src/models), and its converters. Properties
that a family implies without storing them (Gemma's scaled embeddings) are in `families` where possible.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.gguf import rope
from jaxllm.interop.gguf.families import FAMILIES, INIT_STD, SCALED_BY_WIDTH, epsilon_key, layout
from jaxllm.interop.gguf.file import Metadata
from jaxllm.interop.gguf.tensors import Layout

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Described:
    """Description of the model in a GGUF file.

    Attributes:
      family: `general.architecture` of the file.
      model: the architecture.
      layout: layout of the tensors.
      constants: names of tensors that are not weights; their content is represented in `model`.
    """

    family: str
    model: Architecture
    layout: Layout
    constants: frozenset[str]


def describe(metadata: Metadata, shapes: Shapes, read: Callable[[str], np.ndarray]) -> Described:
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
        raise UserError(f"{metadata.where} holds a {kind}, not a model; give the file with the model's weights")
    family = metadata.need("general.architecture", str)
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"{metadata.where} is a {family} model, which is not read; those that are: {known}")
    keys = _Keys(metadata, family)
    model = _architecture(keys, shapes, read)
    for key, harmless in _HARMLESS.items():
        keys.only(key, harmless)
    unknown = metadata.unasked(f"{family}.")
    if unknown:
        raise UserError(
            f"{metadata.where} has {', '.join(unknown)}, of which this reader knows nothing; a model that needs them "
            "would come out wrong"
        )
    fused = "blk.0.attn_qkv.weight" in shapes
    return Described(
        family,
        model,
        dataclasses.replace(layout(family), fused_qkv=fused),
        frozenset(rope.CONSTANTS & set(shapes)),
    )


# Keys that have no effect at this value (None: at any value).
_HARMLESS: dict[str, Any] = {
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


class _Keys:
    """Access to the keys of one family, without the prefix of its name."""

    def __init__(self, metadata: Metadata, family: str):
        self.metadata = metadata
        self.family = family

    def size(self, key: str, default: int | None = None) -> int:
        name = f"{self.family}.{key}"
        if default is None:
            return self.metadata.need(name, int)
        found = self.metadata.get(name, int)
        return default if found is None else found

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self.family}.{key}"
        if default is None:
            return float(self.metadata.need(name, float))
        found = self.metadata.get(name, float)
        return default if found is None else float(found)

    def only(self, key: str, allowed: Any) -> None:
        """Checks that a key is missing or has the allowed value (None: any value)."""
        value = self.metadata.raw(f"{self.family}.{key}")
        if value is not None and allowed is not None and value != allowed:
            raise UserError(
                f"{self.metadata.where}: {self.family}.{key} is {value!r:.60}, and only {allowed!r} can be expressed; "
                "use another model"
            )


def _architecture(keys: _Keys, shapes: Shapes, read: Callable[[str], np.ndarray]) -> Architecture:
    family, where = keys.family, keys.metadata.where
    if "token_embd.weight" not in shapes:
        raise UserError(f"{where} has no tensor token_embd.weight; it holds a vocabulary or an adapter, not a model")
    layers, width, heads = keys.size("block_count"), keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", width // max(heads, 1))
    keys.only("attention.value_length", head_dim)
    vocabulary = shapes["token_embd.weight"][0]
    keys.only("vocab_size", vocabulary)
    context = keys.size("context_length")
    experts = keys.size("expert_count", 0)
    mlp_width = keys.size("expert_feed_forward_length", 0) if experts else 0
    dense_width = keys.size("feed_forward_length", mlp_width or None)
    gemma = family.startswith("gemma")
    by_width = SCALED_BY_WIDTH.get(family) == layers
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
        fields |= rope.read(keys, head_dim, set(shapes), read)
    return Architecture(**fields)


def _pattern(keys: _Keys, layers: int, context: int) -> dict[str, Any]:
    """Reads pattern and window. The file has a list, a period whose last layer is full, or the family's default."""
    default = {"gemma2": 4096}.get(keys.family, 0)
    window = keys.size("attention.sliding_window", default)
    told = keys.metadata.raw(f"{keys.family}.attention.sliding_window_pattern")
    if not 0 < window < context:  # the window masks nothing
        return {"pattern": ("full",), "window": 0}
    if isinstance(told, list):
        slides = [bool(flag) for flag in told]
        if len(slides) != layers:
            raise UserError(f"{keys.metadata.where}: the sliding_window_pattern has {len(slides)} layers of {layers}")
    else:
        period = told if isinstance(told, int) else {"gemma2": 2, "gemma3": 6, "olmo2": 4}.get(keys.family, 0)
        slides = [period < 1 or layer % period < period - 1 for layer in range(layers)]
    kinds = tuple("sliding" if flag else "full" for flag in slides)
    length = next(n for n in range(1, layers + 1) if all(kinds[i] == kinds[i % n] for i in range(layers)))
    return {"pattern": kinds[:length], "window": window}
