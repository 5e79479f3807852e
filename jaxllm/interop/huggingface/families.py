"""The kinds of models that Hugging Face folders hold: config.json to Architecture, and back.

Adding a family is adding a row: which field of the file is which of ours, with what transformers takes where it is
missing (its configuration classes, release 5); what holds for all members; and the parts with a logic of their own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.huggingface import family_parts as parts
from jaxllm.interop.huggingface.config_fields import Fields
from jaxllm.interop.huggingface.family_parts import Part


@dataclasses.dataclass(frozen=True)
class Family:
    """Attributes:
    class_name: of the language model in transformers.
    plain: field of the file -> (field of Architecture, its value where it is missing or null).
    fixed: fields of Architecture that are the same in all members.
    parts: what depends on more than one field.
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
        parts=(parts.heads(kv_heads=8), _SILU, _NO_BIAS, parts.all_slide(4096), parts.rope(1e4)),
    ),
    "mixtral": Family(
        class_name="MixtralForCausalLM",
        plain=_sizes(32000, 4096, 14336, 32, 32, 131072, 1e-5, tied=False)
        | _ROUTER
        | {"num_experts_per_tok": ("experts_per_token", 2)},
        fixed=_LLAMA | {"normalize_routing": True},
        parts=(parts.heads(kv_heads=8), _SILU, _NO_BIAS, parts.MIXTRAL, parts.all_slide(None), parts.rope(1e6)),
    ),
    # Qwen2 and Qwen2.5.
    "qwen2": Family(
        class_name="Qwen2ForCausalLM",
        plain=_sizes(151936, 4096, 22016, 32, 32, 32768, 1e-6, tied=False),
        fixed=_LLAMA | {"qkv_bias": True},
        parts=(
            *(parts.heads(kv_heads=32), _SILU, parts.without("mlp_bias", "use_mrope")),
            *(parts.upper_slide_if_used(4096, first=28), parts.rope(1e4)),
        ),
    ),
    "qwen3": Family(
        class_name="Qwen3ForCausalLM",
        plain=_sizes(151936, 4096, 22016, 32, 32, 32768, 1e-6, tied=False),
        fixed=_LLAMA | {"qk_norm": True},
        parts=(
            *(parts.heads(kv_heads=32, head_dim=128), _SILU, parts.ATTENTION_BIAS, parts.without("mlp_bias")),
            *(parts.upper_slide_if_used(4096, first=28), parts.rope(1e4)),
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
            *(parts.all_slide_if_used(4096), parts.rope(1e4)),
        ),
    ),
    "gemma2": Family(
        class_name="Gemma2ForCausalLM",
        plain=_sizes(256000, 2304, 9216, 26, 8, 8192, 1e-6, tied=True),
        fixed=_GEMMA,
        parts=(
            *(parts.heads(kv_heads=4, head_dim=256), _GELU, parts.ATTENTION_BIAS, parts.without("mlp_bias")),
            *(parts.slide_but_every(2, 4096), parts.gemma(30.0, 50.0), parts.rope(1e4)),
        ),
    ),
    "gemma3_text": Family(
        class_name="Gemma3ForCausalLM",
        plain=_sizes(262208, 2304, 9216, 26, 8, 131072, 1e-6, tied=True),
        fixed=_GEMMA | {"qk_norm": True},
        parts=(
            *(parts.heads(kv_heads=4, head_dim=256), _GELU, parts.ATTENTION_BIAS, parts.without("mlp_bias")),
            *(parts.slide_but_every(6, 4096), parts.gemma(None, None), parts.rope(1e6, sliding=1e4)),
        ),
    ),
    "smollm3": Family(
        class_name="SmolLM3ForCausalLM",
        plain=_sizes(128256, 2048, 11008, 36, 16, 32768, 1e-6, tied=True) | {"mlp_bias": ("mlp_bias", False)},
        fixed=_LLAMA,
        parts=(parts.heads(kv_heads=4), _SILU, parts.ATTENTION_BIAS, parts.SMOLLM3, parts.rope(2e6)),
    ),
    # Phi-3, Phi-3.5 and Phi-4, mini and medium; the small ones and those with experts are of other kinds.
    "phi3": Family(
        class_name="Phi3ForCausalLM",
        plain=_sizes(32064, 3072, 8192, 32, 32, 4096, 1e-5, tied=False),
        fixed=_LLAMA,
        parts=(
            *(parts.heads(), _SILU, _NO_BIAS, parts.without("lm_head_bias"), parts.all_slide(None)),
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
# Fields of a Gemma 3 model of texts and images that say nothing about texts.
_OF_IMAGES = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")


def read_config(values: Mapping[str, Any], where: str) -> tuple[str, Architecture]:
    """(name of the family, architecture) of a config.json.

    Args:
      values: the file's content.
      where: the file, for messages.
    Raises:
      UserError: a family that is not known, a field that is neither used nor known not to matter, or one whose value
        there is no model for; names it.
    """
    name = values.get("model_type")
    if name == "gemma3":
        return "gemma3_text", _read_gemma3(values, where)
    if name not in FAMILIES:
        told = ", ".join((*FAMILIES, "gemma3"))
        raise UserError(f"{where}: model_type is {name!r}; jaxllm can do {told}")
    return name, _read(FAMILIES[name], Fields(values, where))


def _read_gemma3(values: Mapping[str, Any], where: str) -> Architecture:
    """The language model in a model of texts and images."""
    outer = Fields(values, where)
    inner = Fields(outer.value("text_config", {}), f"{where}: text_config")
    for name in _OF_IMAGES:
        outer.get(name, None)
    outer.get("initializer_range", None)  # of the image model
    model = _read(FAMILIES["gemma3_text"], inner)
    outer.only("tie_word_embeddings", model.tied_embeddings)
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
    """(name of the family, config.json) of a model, without what is not about its architecture.

    A family will do when its file, read again, gives the same model; so what is written is what is meant.

    Args:
      prefer: the family to try first.
    Raises:
      UserError: no family has such a model; names the fields in which the nearest differs.
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
        except UserError:  # it has no way to say it
            continue
        if again == wanted:
            return name, values
        differences[name] = _differences(wanted, again)
    name, fields = min(differences.items(), key=lambda item: len(item[1]))
    raise UserError(
        f"no Hugging Face model is built like this one; the nearest, {name}, differs in {', '.join(fields)}"
    )


def _differences(wanted: Architecture, found: Architecture) -> list[str]:
    names = [field.name for field in dataclasses.fields(Architecture)]
    pairs = [(name, getattr(wanted, name), getattr(found, name)) for name in names]
    return [f"{name} ({ours!r}, there {theirs!r})" for name, ours, theirs in pairs if ours != theirs]


def canonical(model: Architecture) -> Architecture:
    """The model with every field that it makes no use of at its default, and its pattern at its shortest.

    Two models that compute the same have the same canonical form. Arrays lie as `model.pattern` says: use it to
    compare, not to load.
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
    return dataclasses.replace(model, pattern=parts.shortest(parts.layer_kinds(model)), **changes)
