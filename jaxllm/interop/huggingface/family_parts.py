"""What families of models have in common, a part at a time: from the fields of config.json to those of Architecture.

A part reads some fields, given what has been read before it, and writes them back. Whether a family can say what a
model is, is found by writing and reading again (`families.write_config`), so that a part may write without looking.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.huggingface.config_fields import Fields
from jaxllm.interop.huggingface.rope_fields import Rope

Known = Mapping[str, Any]

# What transformers calls them; the others that it knows compute something else.
_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")
_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}


@dataclasses.dataclass(frozen=True)
class Part:
    """Attributes:
    read: (fields, fields of Architecture known so far) -> more of them.
    write: model -> fields of the file.
    """

    read: Callable[[Fields, Known], dict[str, Any]]
    write: Callable[[Architecture], dict[str, Any]]


def heads(kv_heads: int | None = None, head_dim: int | None = None) -> Part:
    """Key heads and the size of a head.

    Args:
      kv_heads, head_dim: where the file has none; None: as many as query heads, and the width's share of a head.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        derived = known["width"] // known["heads"]
        # A missing field is the family's number; a null asks to derive it.
        keys, size = known["heads"], derived
        if "num_key_value_heads" not in fields:
            keys = kv_heads or keys
        if "head_dim" not in fields:
            size = head_dim or size
        return {"kv_heads": fields.value("num_key_value_heads", keys), "head_dim": fields.value("head_dim", size)}

    return Part(read, lambda m: {"num_key_value_heads": m.kv_heads, "head_dim": m.head_dim})


def gated_activation(name: str, default: str) -> Part:
    """The activation of a gated MLP.

    Args:
      name: of the field that counts.
      default: its value where it is missing.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        del known
        found = fields.value(name, default)
        for other in {"hidden_act", "hidden_activation"} - {name}:
            fields.only(other, found, None)
        if found not in _SILU + _GELU_TANH:
            told = ", ".join(_SILU + _GELU_TANH)
            raise UserError(f"{fields.where}: {name} is {found!r}, which jaxllm has no model for; it can do {told}")
        return {"mlp": "swiglu" if found in _SILU else "geglu"}

    return Part(read, lambda m: {name: _SILU[0] if m.mlp == "swiglu" else _GELU_TANH[0]})


def _read_biases(fields: Fields, known: Known) -> dict[str, Any]:
    del known
    bias = fields.value("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


# On queries, keys, values and the output together.
ATTENTION_BIAS = Part(_read_biases, lambda m: {"attention_bias": m.qkv_bias})


def without(*names: str) -> Part:
    """Flags that files of the family may have, and that are false in all of it."""

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        del known
        for name in names:
            fields.only(name, False, None)
        return {}

    return Part(read, lambda m: {})


def rope(theta: float, **more: Any) -> Part:
    """Rotary positions; the arguments of `Rope`."""
    both = Rope(theta, **more)
    return Part(both.read, both.write)


def shortest(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that, repeated, gives these kinds of layers."""
    return next(
        tuple(kinds[:n]) for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
    )


def layer_kinds(model: Architecture) -> list[str]:
    """The kind of every layer."""
    return [model.pattern[i % len(model.pattern)] for i in range(model.layers)]


def _with_window(kinds: Sequence[str], window: int | None, where: str) -> dict[str, Any]:
    pattern = shortest(kinds)
    if "sliding" not in pattern:
        return {"pattern": pattern, "window": 0}
    if not window:
        raise UserError(f"{where}: layers slide and sliding_window is {window!r}; use the file of one release")
    return {"pattern": pattern, "window": window}


def all_slide(default: int | None) -> Part:
    """Every layer slides where there is a window.

    Args:
      default: the window where the field is missing; a null is none.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        window = fields.get("sliding_window", default)
        fields.only("layer_types", None, [_kind_name("sliding" if window else "full")] * known["layers"])
        return _with_window(["sliding" if window else "full"], window, fields.where)

    return Part(read, lambda m: {"sliding_window": m.window or None})


def all_slide_if_used(default: int) -> Part:
    """The same, where a flag says whether there is a window (Qwen3-MoE)."""

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        del known
        # Without the flag transformers reads the window as none, whatever max_window_layers says.
        window = fields.get("sliding_window", default)
        used = fields.value("use_sliding_window", False) and window
        fields.get("max_window_layers", None)
        return _with_window(["sliding" if used else "full"], window, fields.where)

    return Part(read, lambda m: {"use_sliding_window": bool(m.window), "sliding_window": m.window or None})


def upper_slide_if_used(default: int, first: int) -> Part:
    """Layers from `max_window_layers` on slide, where a flag says so (Qwen2, Qwen3).

    Args:
      default, first: window and first such layer where the fields are missing.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        window = fields.get("sliding_window", default) if fields.value("use_sliding_window", False) else None
        fields.get("sliding_window", None)
        begin = fields.value("max_window_layers", first)
        kinds = ["sliding" if window and i >= begin else "full" for i in range(known["layers"])]
        return _with_window(_listed(fields, known, kinds), window, fields.where)

    def write(model: Architecture) -> dict[str, Any]:
        kinds = layer_kinds(model)
        slides = "sliding" in kinds
        return {
            "use_sliding_window": slides,
            "sliding_window": model.window or None,
            "max_window_layers": kinds.index("sliding") if slides else model.layers,
            "layer_types": [_kind_name(kind) for kind in kinds],
        }

    return Part(read, write)


def slide_but_every(n: int, window: int) -> Part:
    """All layers slide but every n-th (Gemma 2 and 3).

    Args:
      n, window: where the fields are missing.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        every = fields.value("sliding_window_pattern", n, "_sliding_window_pattern")
        kinds = ["sliding" if (i + 1) % every else "full" for i in range(known["layers"])]
        found = fields.value("sliding_window", window)
        fields.only("sliding_window_size", found, None)  # an older name
        return _with_window(_listed(fields, known, kinds), found, fields.where)

    def write(model: Architecture) -> dict[str, Any]:
        return {"sliding_window": model.window, "layer_types": [_kind_name(kind) for kind in layer_kinds(model)]}

    return Part(read, write)


def _kind_name(kind: str) -> str:
    """The file's name of a kind of layer; its own where files have none."""
    return next((name for name, ours in _KINDS.items() if ours == kind), kind)


def _listed(fields: Fields, known: Known, kinds: Sequence[str]) -> Sequence[str]:
    """The kinds of layers that the file lists, or those given where it lists none."""
    names = fields.value("layer_types", [_kind_name(kind) for kind in kinds])
    if len(names) != known["layers"] or set(names) - set(_KINDS):
        raise UserError(
            f"{fields.where}: layer_types lists {len(names)} layers of {sorted(set(map(str, names)))}; it must have "
            f"{known['layers']}, each of {' or '.join(_KINDS)}"
        )
    return [_KINDS[name] for name in names]


def _read_smollm3(fields: Fields, known: Known) -> dict[str, Any]:
    layers, window = known["layers"], fields.get("sliding_window", None)
    every = fields.value("no_rope_layer_interval", 4)
    rotated = fields.value("no_rope_layers", [int((i + 1) % every != 0) for i in range(layers)])
    if len(rotated) < layers:
        raise UserError(
            f"{fields.where}: no_rope_layers lists {len(rotated)} layers and num_hidden_layers is {layers}; "
            "use the file of one release"
        )
    slides = window if fields.value("use_sliding_window", False) else None
    fields.get("max_window_layers", None)  # of Qwen's files, from which these were made
    kinds = _listed(fields, known, ["sliding" if slides and not rotated[i] else "full" for i in range(layers)])
    if any(kind == "sliding" and not turns for kind, turns in zip(kinds, rotated, strict=False)):
        raise UserError(f"{fields.where}: layers without positions slide, which jaxllm has no model for")
    kinds = [kind if turns else "nope" for kind, turns in zip(kinds, rotated, strict=False)]
    return _with_window(kinds, slides, fields.where)


def _write_smollm3(model: Architecture) -> dict[str, Any]:
    kinds = layer_kinds(model)
    return {
        "no_rope_layers": [int(kind != "nope") for kind in kinds],
        "use_sliding_window": "sliding" in kinds,
        "sliding_window": model.window or None,
        "layer_types": [_kind_name("full" if kind == "nope" else kind) for kind in kinds],
    }


# Layers without positions among those with.
SMOLLM3 = Part(_read_smollm3, _write_smollm3)


def gemma(logit_softcap: float | None, attention_softcap: float | None) -> Part:
    """Scaled embeddings and queries, capped logits and scores.

    Args:
      logit_softcap, attention_softcap: where the fields are missing. A null is no cap; where `attention_softcap` is
        None the family's attention has no cap, whatever the file says, so it may say none.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        fields.only("use_bidirectional_attention", None, False)
        scalar = fields.value("query_pre_attn_scalar", 256.0)
        if attention_softcap is None:
            fields.only("attn_logit_softcapping", None)
        return {
            "embedding_scale": math.sqrt(known["width"]),
            "query_scale": 0.0 if scalar == known["head_dim"] else scalar**-0.5,
            "logit_softcap": float(fields.get("final_logit_softcapping", logit_softcap) or 0),
            "attention_softcap": float(fields.get("attn_logit_softcapping", attention_softcap) or 0),
        }

    def write(model: Architecture) -> dict[str, Any]:
        return {
            "query_pre_attn_scalar": round(model.attention_scale**-2),  # transformers takes whole numbers only
            "final_logit_softcapping": model.logit_softcap or None,
            "attn_logit_softcapping": model.attention_softcap or None,
        }

    return Part(read, write)


def _read_mixtral(fields: Fields, known: Known) -> dict[str, Any]:
    del known
    fields.only("router_jitter_noise", 0.0, 0, None)
    return {"experts": fields.value("num_local_experts", 8, "num_experts")}


MIXTRAL = Part(_read_mixtral, lambda m: {"num_local_experts": m.experts})


def _read_qwen3_moe(fields: Fields, known: Known) -> dict[str, Any]:
    del known
    fields.only("mlp_only_layers", None, [])
    fields.only("decoder_sparse_step", 1)
    fields.get("intermediate_size", None)  # of the dense layers, of which there are none
    return {"experts": fields.value("num_experts", 128, "num_local_experts")}


def _write_qwen3_moe(model: Architecture) -> dict[str, Any]:
    sparse = {"mlp_only_layers": [], "decoder_sparse_step": 1}
    return {"num_experts": model.experts, "intermediate_size": model.mlp_width} | sparse


QWEN3_MOE = Part(_read_qwen3_moe, _write_qwen3_moe)


def _read_gpt2(fields: Fields, known: Known) -> dict[str, Any]:
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("n_ctx", known["context_length"])  # an older name
    found = fields.value("activation_function", _GELU_TANH[1])
    if found not in _GELU_TANH:
        raise UserError(
            f"{fields.where}: activation_function is {found!r}, which jaxllm has no model for; it can do "
            f"{', '.join(_GELU_TANH)}"
        )
    return {
        "kv_heads": known["heads"],
        "head_dim": known["width"] // known["heads"],
        "mlp_width": fields.value("n_inner", 4 * known["width"]),
        "query_scale": 0.0 if fields.value("scale_attn_weights", True) else 1.0,
    }


def _write_gpt2(model: Architecture) -> dict[str, Any]:
    return {
        "activation_function": _GELU_TANH[1],
        "n_inner": model.mlp_width,
        "n_ctx": model.context_length,
        "scale_attn_weights": not model.query_scale,
    }


GPT2 = Part(_read_gpt2, _write_gpt2)
