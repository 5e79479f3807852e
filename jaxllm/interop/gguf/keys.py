"""Converts an `Architecture` to the metadata keys of a GGUF file; the inverse of `metadata`, which checks it."""

import dataclasses
import math
from typing import Any

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.gguf import metadata, rope
from jaxllm.interop.gguf.file import Metadata
from jaxllm.interop.gguf.metadata import NOT_STORED, epsilon_key
from jaxllm.interop.rules import layer_kinds


def choose_family(model: Architecture) -> str:
    """Chooses the GGUF family for a model, such that llama.cpp computes the same function.

    Raises:
      UserError: the family cannot represent the model; the message names the field.
    """
    if model.positions == "learned":
        family = "gpt2"
    elif model.norm_placement == "post":
        family = "olmo2"
    elif "nope" in model.pattern:
        family = "smollm3"
    elif model.rope_scaling == "longrope" or model.rope_dim:
        family = "phi3"
    elif model.norm == "rmsnorm_plus_one":
        family = "gemma3" if model.qk_norm else "gemma2"
    elif model.qk_norm:
        family = "qwen3moe" if model.experts else "qwen3"
    else:
        is_square = model.heads * model.head_dim == model.width
        family = "qwen2" if model.qkv_bias and not model.out_bias and not model.mlp_bias and is_square else "llama"
    _check(model, family)
    return family


def _check(model: Architecture, family: str) -> None:
    """Reads back the keys that would be written and checks that the architecture is the same.

    Raises:
      UserError: a field differs, so the format cannot represent it.
    """
    fixed: dict[str, Any] = {"gpt2": {"qkv_bias": True, "out_bias": True, "mlp_bias": True}}.get(family, {})
    if family not in ("llama", "gpt2"):
        fixed = {"out_bias": False, "mlp_bias": False, "qkv_bias": family == "qwen2"}
    if family == "olmo2":
        fixed["tied_embeddings"] = False
    if family == "gemma2":
        fixed["tied_embeddings"] = True
        if not model.attention_softcap or not model.logit_softcap:
            raise UserError("GGUF's gemma2 models have both soft caps, but this model does not; convert to safetensors")
    if family in ("gpt2", "qwen2", "olmo2", "phi3"):
        fixed["head_dim"] = model.width // model.heads
    if model.experts:
        fixed |= {"normalize_routing": True, "mlp_bias": False}
        if family not in ("llama", "qwen3moe"):
            fixed["experts"] = 0
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (model.vocab_size, model.width),
        **dict.fromkeys(_marker_tensors(model), ()),
    }
    constants = rope.constant_tensors(model)
    metadata_keys = Metadata(architecture_keys(model, family) | {"general.architecture": family}, "the model")
    again = metadata.parse_metadata(
        metadata_keys, shapes | {name: x.shape for name, x in constants.items()}, constants.__getitem__
    ).model
    for field in dataclasses.fields(Architecture):
        ours, theirs = getattr(model, field.name), fixed.get(field.name, getattr(again, field.name))
        if field.name not in NOT_STORED and ours != theirs and not _equivalent(model, again, field.name):
            raise UserError(
                f"GGUF's {family} models cannot have {field.name} = {ours!r} (llama.cpp would use {theirs!r}); "
                "convert to safetensors"
            )


def _marker_tensors(model: Architecture) -> list[str]:
    """Lists the tensors from whose presence a reader infers biases and untied embeddings."""
    present = {
        "blk.0.attn_q.bias": model.qkv_bias,
        "blk.0.attn_output.bias": model.out_bias,
        "blk.0.ffn_down.bias": model.mlp_bias,
        "output.weight": not model.tied_embeddings,
    }
    return [name for name, is_present in present.items() if is_present]


def _equivalent(model: Architecture, again: Architecture, name: str) -> bool:
    """Returns True if a field differs between two models but has the same effect."""
    if name == "query_scale":
        return math.isclose(model.attention_scale, again.attention_scale, rel_tol=1e-12)
    if name in ("pattern", "window"):
        kinds = [layer_kinds(m) for m in (model, again)]
        return kinds[0] == kinds[1] and (model.window == again.window or "sliding" not in kinds[0])
    return name.startswith("rope_") and rope.equivalent(model, again)


def architecture_keys(model: Architecture, family: str) -> dict[str, Any]:
    """Returns the metadata keys of a model, with the types that llama.cpp expects: int for counts, else float."""
    kinds = layer_kinds(model)
    keys: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "embedding_length": model.width,
        "block_count": model.layers,
        "feed_forward_length": model.mlp_width,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        epsilon_key(family): float(model.norm_eps),
    }
    if model.experts:
        keys |= {"expert_count": model.experts, "expert_used_count": model.experts_per_token}
        if family == "qwen3moe":
            keys["expert_feed_forward_length"] = model.mlp_width
    if "sliding" in kinds:
        # llama.cpp ignores the window for families other than Gemma; results are equal for contexts up to the window.
        keys["attention.sliding_window"] = model.window
        keys["attention.sliding_window_pattern"] = [kind == "sliding" for kind in kinds]
    elif family == "gemma2":
        keys["attention.sliding_window"] = model.context_length
    if family == "gemma2":
        keys["attn_logit_softcapping"] = float(model.attention_softcap)
    if family.startswith("gemma"):
        keys["final_logit_softcapping"] = float(model.logit_softcap)
    if model.positions == "rotary":
        keys |= rope.rope_keys(model)
    return {f"{family}.{key}": value for key, value in keys.items()}
