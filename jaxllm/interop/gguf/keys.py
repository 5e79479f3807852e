"""Converts an `Architecture` to the metadata keys of a GGUF file; the inverse of `metadata`, which checks it."""

import dataclasses
import math
from typing import Any

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.gguf import metadata, rope
from jaxllm.interop.gguf.families import NOT_STORED, epsilon_key
from jaxllm.interop.gguf.file import Metadata


def choose(model: Architecture) -> str:
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
        whole = model.heads * model.head_dim == model.width
        family = "qwen2" if model.qkv_bias and not model.out_bias and not model.mlp_bias and whole else "llama"
    _check(model, family)
    return family


def _check(model: Architecture, family: str) -> None:
    """Reads back the keys that would be written and checks that the architecture is the same.

    Raises:
      UserError: a field differs, so the format cannot represent it.
    """
    needs: dict[str, Any] = {"gpt2": {"qkv_bias": True, "out_bias": True, "mlp_bias": True}}.get(family, {})
    if family not in ("llama", "gpt2"):
        needs = {"out_bias": False, "mlp_bias": False, "qkv_bias": family == "qwen2"}
    if family == "olmo2":
        needs["tied_embeddings"] = False
    if family == "gemma2":
        needs["tied_embeddings"] = True
        if not model.attention_softcap or not model.logit_softcap:
            raise UserError("GGUF's gemma2 models have both soft caps, and this one has not; convert to safetensors")
    if family in ("gpt2", "qwen2", "olmo2", "phi3"):
        needs["head_dim"] = model.width // model.heads
    if model.experts:
        needs |= {"normalize_routing": True, "mlp_bias": False}
        if family not in ("llama", "qwen3moe"):
            needs["experts"] = 0
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (model.vocab_size, model.width),
        **dict.fromkeys(_told_by_tensors(model), ()),
    }
    constants = rope.constants(model)
    written = Metadata(values(model, family) | {"general.architecture": family}, "the model")
    again = metadata.describe(
        written, shapes | {name: x.shape for name, x in constants.items()}, constants.__getitem__
    ).model
    for field in dataclasses.fields(Architecture):
        ours, theirs = getattr(model, field.name), needs.get(field.name, getattr(again, field.name))
        if field.name not in NOT_STORED and ours != theirs and not _equivalent(model, again, field.name):
            raise UserError(
                f"GGUF's {family} models cannot have {field.name} = {ours!r} (they would be run with {theirs!r}); "
                "convert to safetensors"
            )


def _told_by_tensors(model: Architecture) -> list[str]:
    flags = {
        "blk.0.attn_q.bias": model.qkv_bias,
        "blk.0.attn_output.bias": model.out_bias,
        "blk.0.ffn_down.bias": model.mlp_bias,
        "output.weight": not model.tied_embeddings,
    }
    return [name for name, there in flags.items() if there]


def _equivalent(model: Architecture, again: Architecture, name: str) -> bool:
    """Returns True if a field differs between two models but has the same effect."""
    if name == "query_scale":
        return math.isclose(model.attention_scale, again.attention_scale, rel_tol=1e-12)
    if name in ("pattern", "window"):
        kinds = [tuple(m.pattern[i % len(m.pattern)] for i in range(m.layers)) for m in (model, again)]
        return kinds[0] == kinds[1] and (model.window == again.window or "sliding" not in kinds[0])
    return name.startswith("rope_") and rope.same(model, again)


def values(model: Architecture, family: str) -> dict[str, Any]:
    """Returns the metadata keys of a model, with the types that llama.cpp expects: int for counts, else float."""
    layers = [model.pattern[i % len(model.pattern)] for i in range(model.layers)]
    made: dict[str, Any] = {
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
        made |= {"expert_count": model.experts, "expert_used_count": model.experts_per_token}
        if family == "qwen3moe":
            made["expert_feed_forward_length"] = model.mlp_width
    if "sliding" in layers:
        # llama.cpp ignores the window for families other than Gemma; results are equal for contexts up to the window.
        made["attention.sliding_window"] = model.window
        made["attention.sliding_window_pattern"] = [kind == "sliding" for kind in layers]
    elif family == "gemma2":
        made["attention.sliding_window"] = model.context_length
    if family == "gemma2":
        made["attn_logit_softcapping"] = float(model.attention_softcap)
    if family.startswith("gemma"):
        made["final_logit_softcapping"] = float(model.logit_softcap)
    if model.positions == "rotary":
        made |= rope.values(model)
    return {f"{family}.{key}": value for key, value in made.items()}
