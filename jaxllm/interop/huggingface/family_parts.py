"""Reusable parts of model families: each converts some fields of config.json to fields of `Architecture` and back.

A part reads its fields, given the fields that earlier parts have read, and writes them back. `config_file.write_config`
reads the written file again to check that the family can represent the model, so a part's `write` need not validate.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.huggingface.config_fields import Fields
from jaxllm.interop.huggingface.rope_fields import Rope

Known = Mapping[str, Any]

# Names in transformers; its other activations compute something else.
_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")


@dataclasses.dataclass(frozen=True)
class Part:
    """Two-way conversion of some fields of config.json.

    Attributes:
      read: (fields of the file, fields of `Architecture` read so far) -> further fields of `Architecture`.
      write: model -> fields of the file.
    """

    read: Callable[[Fields, Known], dict[str, Any]]
    write: Callable[[Architecture], dict[str, Any]]


def heads(kv_heads: int | None = None, head_dim: int | None = None) -> Part:
    """Part for the number of key/value heads and the head dimension.

    Args:
      kv_heads: default if the field is missing; None: the number of query heads.
      head_dim: default if the field is missing; None: width / heads.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        derived = known["width"] // known["heads"]
        # A missing field takes the family's default; for null, transformers derives the value.
        keys, size = known["heads"], derived
        if "num_key_value_heads" not in fields:
            keys = kv_heads or keys
        if "head_dim" not in fields:
            size = head_dim or size
        return {"kv_heads": fields.value("num_key_value_heads", keys), "head_dim": fields.value("head_dim", size)}

    return Part(read, lambda m: {"num_key_value_heads": m.kv_heads, "head_dim": m.head_dim})


def gated_activation(name: str, default: str) -> Part:
    """Part for the activation of a gated MLP.

    Args:
      name: name of the field that is used.
      default: its value if it is missing.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        del known
        found = fields.value(name, default)
        for other in {"hidden_act", "hidden_activation"} - {name}:
            fields.expect(other, found, None)
        if found not in _SILU + _GELU_TANH:
            supported = ", ".join(_SILU + _GELU_TANH)
            raise UserError(
                f"{fields.where}: {name} is {found!r}, which is unsupported; supported values are {supported}"
            )
        return {"mlp": "swiglu" if found in _SILU else "geglu"}

    return Part(read, lambda m: {name: _SILU[0] if m.mlp == "swiglu" else _GELU_TANH[0]})


def _read_biases(fields: Fields, known: Known) -> dict[str, Any]:
    del known
    bias = fields.value("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


# One flag for the biases of queries, keys, values and the output.
ATTENTION_BIAS = Part(_read_biases, lambda m: {"attention_bias": m.qkv_bias})


def without(*names: str) -> Part:
    """Part for flags that files of the family may have, and that must be false."""

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        del known
        for name in names:
            fields.expect(name, False, None)
        return {}

    return Part(read, lambda m: {})


def rope(theta: float, **more: Any) -> Part:
    """Part for rotary positions; takes the arguments of `Rope`."""
    conversion = Rope(theta, **more)
    return Part(conversion.read, conversion.write)


def gemma(logit_softcap: float | None, attention_softcap: float | None) -> Part:
    """Part for Gemma's scaled embeddings and queries, and its soft caps on logits and attention scores.

    Args:
      logit_softcap: default if the field is missing; null means no cap.
      attention_softcap: likewise. None: the family's attention never has a cap, and the field must be null.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        fields.expect("use_bidirectional_attention", None, False)
        scalar = fields.value("query_pre_attn_scalar", 256.0)
        if attention_softcap is None:
            fields.expect("attn_logit_softcapping", None)
        return {
            "embedding_scale": math.sqrt(known["width"]),
            "query_scale": 0.0 if scalar == known["head_dim"] else scalar**-0.5,
            "logit_softcap": float(fields.get("final_logit_softcapping", logit_softcap) or 0),
            "attention_softcap": float(fields.get("attn_logit_softcapping", attention_softcap) or 0),
        }

    def write(model: Architecture) -> dict[str, Any]:
        return {
            "query_pre_attn_scalar": round(model.attention_scale**-2),  # transformers accepts integers only
            "final_logit_softcapping": model.logit_softcap or None,
            "attn_logit_softcapping": model.attention_softcap or None,
        }

    return Part(read, write)


def _read_mixtral(fields: Fields, known: Known) -> dict[str, Any]:
    del known
    fields.expect("router_jitter_noise", 0.0, 0, None)
    return {"experts": fields.value("num_local_experts", 8, "num_experts")}


MIXTRAL = Part(_read_mixtral, lambda m: {"num_local_experts": m.experts})


def _read_qwen3_moe(fields: Fields, known: Known) -> dict[str, Any]:
    del known
    fields.expect("mlp_only_layers", None, [])
    fields.expect("decoder_sparse_step", 1)
    fields.get("intermediate_size", None)  # width of dense layers; there are none
    return {"experts": fields.value("num_experts", 128, "num_local_experts")}


def _write_qwen3_moe(model: Architecture) -> dict[str, Any]:
    sparse = {"mlp_only_layers": [], "decoder_sparse_step": 1}
    return {"num_experts": model.experts, "intermediate_size": model.mlp_width} | sparse


QWEN3_MOE = Part(_read_qwen3_moe, _write_qwen3_moe)


def _read_gpt2(fields: Fields, known: Known) -> dict[str, Any]:
    fields.expect("scale_attn_by_inverse_layer_idx", False)
    fields.expect("n_ctx", known["context_length"])  # an older name
    found = fields.value("activation_function", _GELU_TANH[1])
    if found not in _GELU_TANH:
        raise UserError(
            f"{fields.where}: activation_function is {found!r}, which is unsupported; supported values are "
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
