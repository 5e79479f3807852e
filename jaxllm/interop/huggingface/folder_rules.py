"""Tensor mapping rules for Hugging Face checkpoints, by model family.

Matrices are [outputs, inputs] (see `matrix_layout`), but [inputs, outputs] in GPT-2.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from jaxllm.config import Architecture
from jaxllm.interop.matrix_layout import MatrixLayout, matrix_rule
from jaxllm.interop.rules import TensorMapping, Tensors

# Constants in old checkpoints: RoPE frequencies and GPT-2's causal masks.
CONSTANTS = r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias))"
# Vision tower and projector of multimodal models.
IMAGE_TENSORS = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
# Prefixes of tensor names: in multimodal models, in language models, in base models without a head.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "transformer.", "")
_EMBEDDING = {"gpt2": "wte.weight"}
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "language_model.model.lm_head.weight")


def embedding_name(family: str, prefix: str) -> str:
    """Returns the name of the token embedding."""
    return prefix + _EMBEDDING.get(family, "embed_tokens.weight")


def name_prefix(family: str, names: Collection[str]) -> str:
    """Returns the prefix of the names in a checkpoint; the language model's prefix if it cannot be determined."""
    found = (prefix for prefix in _PREFIXES if embedding_name(family, prefix) in names)
    return next(found, _default_prefix(family))


def _default_prefix(family: str) -> str:
    return "transformer." if family == "gpt2" else "model."


def head_name(names: Collection[str]) -> str:
    """Returns the name of the head in a checkpoint; the default name if it has no head."""
    return next((name for name in _HEADS if name in names), _HEADS[0])


def build_rules(
    model: Architecture, family: str, prefix: str | None = None, head: str = _HEADS[0]
) -> list[TensorMapping]:
    """Builds the rules of all tensors, in the order of the layers.

    Args:
      model: the architecture.
      family: a key of `families.FAMILIES`.
      prefix: prefix of all names except the head's; None: the prefix of a language model.
      head: name of the head, if the model has one.
    """
    prefix = _default_prefix(family) if prefix is None else prefix
    layer_rules = _gpt2_layer_rules if family == "gpt2" else _llama_layer_rules
    rules = [TensorMapping((embedding_name(family, prefix),), ("embed.tokens",))]
    if model.positions == "learned":
        rules.append(TensorMapping((f"{prefix}wpe.weight",), ("embed.positions",)))
    for layer in range(model.layers):
        rules += layer_rules(model, family, layer, prefix)
    rules += _norm_rules(prefix + ("ln_f" if family == "gpt2" else "norm"), "final_norm", None, family)
    if not model.tied_embeddings:
        rules.append(TensorMapping((head,), ("head",)))
    return rules


def _norm_rules(name: str, path: str, layer: int | None, family: str) -> Iterator[TensorMapping]:
    yield TensorMapping((f"{name}.weight",), (f"{path}.scale",), layer)
    if family == "gpt2":
        yield TensorMapping((f"{name}.bias",), (f"{path}.bias",), layer)


def _llama_layer_rules(model: Architecture, family: str, layer: int, prefix: str) -> Iterator[TensorMapping]:
    at = f"{prefix}layers.{layer}."
    yield from _layer_norm_rules(model, family, layer, at)
    yield from _attention_rules(model, family, layer, f"{at}self_attn.")
    if model.experts:
        yield from _expert_rules(model, family, layer, at)
    else:
        layouts = _mlp_layouts(model)
        if family == "phi3":
            fused = [layouts.pop(name) for name in ("gate", "up")]
            yield matrix_rule(f"{at}mlp.gate_up_proj.weight", ("mlp.gate", "mlp.up"), fused, layer)
        for name, layout in layouts.items():
            yield matrix_rule(f"{at}mlp.{name}_proj.weight", (f"mlp.{name}",), [layout], layer)
            if model.mlp_bias:
                yield TensorMapping((f"{at}mlp.{name}_proj.bias",), (f"mlp.{name}_bias",), layer)


def _mlp_layouts(model: Architecture) -> dict[str, MatrixLayout]:
    D, F = (model.width,), (model.mlp_width,)
    return {"gate": MatrixLayout(D, F), "up": MatrixLayout(D, F), "down": MatrixLayout(F, D)}


def _layer_norm_rules(model: Architecture, family: str, layer: int, at: str) -> Iterator[TensorMapping]:
    names = {
        "pre": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
        "post": {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
        "sandwich": {
            "attn_norm": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
    }
    for path, name in names[model.norm_placement].items():
        yield from _norm_rules(at + name, path, layer, family)


def _attention_rules(model: Architecture, family: str, layer: int, at: str) -> Iterator[TensorMapping]:
    D, N, K, H = model.width, model.heads, model.kv_heads, model.head_dim
    heads = {"q": N, "k": K, "v": K}
    layouts = {name: MatrixLayout((D,), (n, H)) for name, n in heads.items()}
    if family == "phi3":
        paths = tuple(f"attn.{name}" for name in heads)
        yield matrix_rule(f"{at}qkv_proj.weight", paths, list(layouts.values()), layer)
    else:
        for name, n in heads.items():
            yield matrix_rule(f"{at}{name}_proj.weight", (f"attn.{name}",), [layouts[name]], layer)
            if model.qkv_bias:
                yield matrix_rule(f"{at}{name}_proj.bias", (f"attn.{name}_bias",), [MatrixLayout((), (n, H))], layer)
    yield matrix_rule(f"{at}o_proj.weight", ("attn.out",), [MatrixLayout((N, H), (D,))], layer)
    if model.out_bias:
        yield TensorMapping((f"{at}o_proj.bias",), ("attn.out_bias",), layer)
    if model.qk_norm:
        for name in ("q", "k"):
            layout = MatrixLayout((), (heads[name], H) if model.qk_norm_over == "projection" else (H,))
            yield matrix_rule(f"{at}{name}_norm.weight", (f"attn.{name}_norm.scale",), [layout], layer)


def _expert_rules(model: Architecture, family: str, layer: int, at: str) -> Iterator[TensorMapping]:
    at += "block_sparse_moe." if family == "mixtral" else "mlp."
    names = {"gate": "w1", "up": "w3", "down": "w2"} if family == "mixtral" else {}
    yield matrix_rule(f"{at}gate.weight", ("mlp.router",), [MatrixLayout((model.width,), (model.experts,))], layer)
    for expert in range(model.experts):
        for path, layout in _mlp_layouts(model).items():
            name = f"{at}experts.{expert}.{names.get(path, f'{path}_proj')}.weight"
            yield matrix_rule(name, (f"mlp.{path}",), [layout], layer, expert)


def _gpt2_layer_rules(model: Architecture, family: str, layer: int, prefix: str) -> Iterator[TensorMapping]:
    at, N, H = f"{prefix}h.{layer}.", model.heads, model.head_dim
    yield from _norm_rules(f"{at}ln_1", "attn_norm", layer, family)
    yield from _norm_rules(f"{at}ln_2", "mlp_norm", layer, family)
    paths = tuple(f"attn.{name}" for name in "qkv")

    def split(tensors: Tensors) -> Tensors:
        return [x.reshape(*x.shape[:-1], N, H) for x in np.split(tensors[0], 3, axis=-1)]

    def join(arrays: Sequence[np.ndarray]) -> Tensors:
        return [np.concatenate([x.reshape(*x.shape[:-2], N * H) for x in arrays], axis=-1)]

    yield TensorMapping((f"{at}attn.c_attn.weight",), paths, layer, split, join)
    yield TensorMapping((f"{at}attn.c_attn.bias",), tuple(f"{path}_bias" for path in paths), layer, split, join)
    yield TensorMapping(
        (f"{at}attn.c_proj.weight",),
        ("attn.out",),
        layer,
        load=lambda tensors: [x.reshape(N, H, x.shape[-1]) for x in tensors],
        save=lambda arrays: [x.reshape(N * H, x.shape[-1]) for x in arrays],
    )
    yield TensorMapping((f"{at}attn.c_proj.bias",), ("attn.out_bias",), layer)
    for name, ours in (("c_fc", "up"), ("c_proj", "down")):
        yield TensorMapping((f"{at}mlp.{name}.weight",), (f"mlp.{ours}",), layer)
        yield TensorMapping((f"{at}mlp.{name}.bias",), (f"mlp.{ours}_bias",), layer)
