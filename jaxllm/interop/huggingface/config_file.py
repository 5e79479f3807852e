"""Converts config.json to `Architecture` and back; a field that is neither used nor neutral is an error."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.huggingface.config_fields import Fields
from jaxllm.interop.huggingface.families import FAMILIES, Family
from jaxllm.interop.rules import layer_kinds, shortest_pattern

# Fields of a multimodal Gemma 3 model that do not affect text.
_IMAGE_FIELDS = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")


def read_config(values: Mapping[str, Any], where: str) -> tuple[str, Architecture]:
    """Converts the content of config.json to (name of the family, architecture).

    Args:
      values: content of the file.
      where: name of the file, for messages.
    Raises:
      UserError: the family is not supported, a field is neither used nor known to be neutral, or the value of a field
        is not supported; the message names the field.
    """
    name = values.get("model_type")
    if name == "gemma3":
        return "gemma3_text", _read_gemma3(values, where)
    if name not in FAMILIES:
        supported = ", ".join((*FAMILIES, "gemma3"))
        raise UserError(f"{where}: model_type is {name!r}, which is unsupported; supported values are {supported}")
    return name, _read(FAMILIES[name], Fields(values, where))


def _read_gemma3(values: Mapping[str, Any], where: str) -> Architecture:
    """Reads the language model of a multimodal Gemma 3 model."""
    outer = Fields(values, where)
    inner = Fields(outer.value("text_config", {}), f"{where}: text_config")
    for name in _IMAGE_FIELDS:
        outer.get(name, None)
    outer.get("initializer_range", None)  # of the vision model
    model = _read(FAMILIES["gemma3_text"], inner)
    outer.expect("tie_word_embeddings", model.tied_embeddings)
    outer.finish()
    return model


def _read(family: Family, fields: Fields) -> Architecture:
    known: dict[str, Any] = dict(family.fixed)
    for field, (ours, default) in family.plain.items():
        known[ours] = fields.value(field, default)
    for part in family.parts:
        known |= part.read(fields, known)
    fields.finish()
    return Architecture(**known)


def write_config(model: Architecture, prefer: str = "") -> tuple[str, dict[str, Any]]:
    """Converts an architecture to (name of the family, content of config.json), without non-architecture fields.

    A family is accepted if its file, read again, gives the same canonical architecture.

    Args:
      model: the architecture.
      prefer: the family to try first.
    Raises:
      UserError: no family can represent the model; the message lists the fields in which the closest one differs.
    """
    wanted = canonical(model)
    differences: dict[str, list[str]] = {}
    for name in sorted(FAMILIES, key=lambda name: name != prefer):
        family = FAMILIES[name]
        values: dict[str, Any] = {"model_type": name, "architectures": [family.class_name]}
        values |= {field: getattr(model, ours) for field, (ours, _) in family.plain.items()}
        for part in family.parts:
            values |= part.write(model)
        try:
            again = canonical(read_config(values, name)[1])
        except UserError:  # the family cannot represent the model
            continue
        if again == wanted:
            return name, values
        differences[name] = _differences(wanted, again)
    name, fields = min(differences.items(), key=lambda item: len(item[1]))
    raise UserError(
        f"no Hugging Face family can represent this model; the closest, {name}, differs in {', '.join(fields)}"
    )


def _differences(wanted: Architecture, found: Architecture) -> list[str]:
    names = [field.name for field in dataclasses.fields(Architecture)]
    pairs = [(name, getattr(wanted, name), getattr(found, name)) for name in names]
    return [f"{name} ({ours!r} instead of {theirs!r})" for name, ours, theirs in pairs if ours != theirs]


def canonical(model: Architecture) -> Architecture:
    """Returns the model with unused fields at their defaults and its pattern at its shortest.

    Two models that compute the same function have the same canonical form. Use it to compare models, not to load
    them: `model.pattern` determines the layout of the arrays.
    """
    default: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Architecture)}
    rotary = model.positions == "rotary"
    scaling = model.rope_scaling if rotary else "none"
    used = {
        "rope_theta": rotary,
        "rope_dim": rotary and model.rope_dim != model.head_dim,
        "rope_scaling": rotary,
        "rope_factor": scaling != "none",
        "rope_original_context": scaling in ("llama3", "yarn", "longrope"),
        "rope_low_freq_factor": scaling == "llama3",
        "rope_high_freq_factor": scaling == "llama3",
        "rope_beta_fast": scaling == "yarn",
        "rope_beta_slow": scaling == "yarn",
        "rope_short_factors": scaling == "longrope",
        "rope_long_factors": scaling == "longrope",
        "rope_attention_factor": scaling in ("yarn", "longrope"),
        "rope_theta_sliding": rotary and "sliding" in model.pattern[: model.layers],
        "window": "sliding" in model.pattern[: model.layers],
        "qk_norm_over": model.qk_norm,
        "experts_per_token": model.experts > 0,
        "normalize_routing": model.experts > 0,
        "router_aux_weight": model.experts > 0,
        "query_scale": model.query_scale != model.head_dim**-0.5,
        "unroll": False,
    }
    changes = {name: default[name] for name, is_used in used.items() if not is_used}
    return dataclasses.replace(model, pattern=shortest_pattern(layer_kinds(model)), **changes)
