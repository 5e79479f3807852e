"""Tensor mapping rules for Hugging Face checkpoints, by model family.

Their matrices are [outputs, inputs] (GPT-2: [inputs, outputs]); ours have a separate heads dimension. On load, rules
return views (transposes and reshapes); elements are copied only once, into their destination.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from jaxllm.config import Architecture
from jaxllm.interop.rules import TensorMapping, Tensors

# Constants in old checkpoints: RoPE frequencies and GPT-2's causal masks.
CONSTANTS = r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias))"
# Vision tower and projector of multimodal models.
OF_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
# Prefixes of tensor names: in multimodal models, in language models, in base models without a head.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "transformer.", "")
_EMBEDDING = {"gpt2": "wte.weight"}
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "language_model.model.lm_head.weight")


def embedding_name(family: str, prefix: str) -> str:
    """Returns the name of the token embedding."""
    return prefix + _EMBEDDING.get(family, "embed_tokens.weight")


def find_prefix(family: str, names: Collection[str]) -> str:
    """Returns the prefix of the names in a checkpoint; the language model's prefix if it cannot be determined."""
    found = (prefix for prefix in _PREFIXES if embedding_name(family, prefix) in names)
    return next(found, "transformer." if family == "gpt2" else "model.")


def find_head(names: Collection[str]) -> str:
    """Returns the name of the head in a checkpoint; the default name if it has no head."""
    return next((name for name in _HEADS if name in names), _HEADS[0])


def make(model: Architecture, family: str, prefix: str | None = None, head: str = _HEADS[0]) -> list[TensorMapping]:
    """Builds the rules of all tensors, in the order of the layers.

    Args:
      model: the architecture.
      family: a key of `families.FAMILIES`.
      prefix: prefix of all names except the head's; None: the prefix of a language model.
      head: name of the head, if the model has one.
    """
    if prefix is None:
        prefix = "transformer." if family == "gpt2" else "model."
    of_layer = _gpt2_layer if family == "gpt2" else _llama_layer
    rules = [TensorMapping((embedding_name(family, prefix),), ("embed.tokens",))]
    if model.positions == "learned":
        rules.append(TensorMapping((f"{prefix}wpe.weight",), ("embed.positions",)))
    for layer in range(model.layers):
        rules += of_layer(model, family, layer, prefix)
    rules += _norm(prefix + ("ln_f" if family == "gpt2" else "norm"), "final_norm", None, family)
    if not model.tied_embeddings:
        rules.append(TensorMapping((head,), ("head",)))
    return rules


def _norm(name: str, path: str, layer: int | None, family: str) -> Iterator[TensorMapping]:
    yield TensorMapping((f"{name}.weight",), (f"{path}.scale",), layer)
    if family == "gpt2":
        yield TensorMapping((f"{name}.bias",), (f"{path}.bias",), layer)


def _each(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: [function(x) for x in tensors]


def _transposed(tensors: Tensors) -> Tensors:
    return [x.T for x in tensors]


def _out_of(*shape: int) -> dict[str, Any]:
    """Returns conversions [outputs, D] <-> [D, *shape] for an output dimension that factors into `shape`."""
    size = int(np.prod(shape))
    return {
        "load": _each(lambda x: np.moveaxis(x.reshape(*shape, x.shape[1]), -1, 0)),
        "save": _each(lambda x: np.moveaxis(x, 0, -1).reshape(size, x.shape[0])),
    }


def _into(*shape: int) -> dict[str, Any]:
    """Returns conversions [D, inputs] <-> [*shape, D] for an input dimension that factors into `shape`."""
    size = int(np.prod(shape))
    return {
        "load": _each(lambda x: x.T.reshape(*shape, x.shape[0])),
        "save": _each(lambda x: x.reshape(size, x.shape[-1]).T),
    }


def _flat(*shape: int) -> dict[str, Any]:
    """Returns conversions [size] <-> [*shape]."""
    return {"load": _each(lambda x: x.reshape(shape)), "save": _each(lambda x: x.reshape(-1))}


_TRANSPOSED: dict[str, Any] = {"load": _transposed, "save": _transposed}


def _llama_layer(model: Architecture, family: str, layer: int, prefix: str) -> Iterator[TensorMapping]:
    at = f"{prefix}layers.{layer}."
    yield from _norms(model, family, layer, at)
    yield from _attention(model, family, layer, f"{at}self_attn.")
    if model.experts:
        yield from _experts(model, family, layer, at)
    elif family == "phi3":
        yield TensorMapping(
            (f"{at}mlp.gate_up_proj.weight",),
            ("mlp.gate", "mlp.up"),
            layer,
            load=lambda tensors: [x.T for x in np.split(tensors[0], 2)],
            save=lambda arrays: [np.concatenate([x.T for x in arrays])],
        )
        yield TensorMapping((f"{at}mlp.down_proj.weight",), ("mlp.down",), layer, **_TRANSPOSED)
    else:
        for name in ("gate", "up", "down"):
            yield TensorMapping((f"{at}mlp.{name}_proj.weight",), (f"mlp.{name}",), layer, **_TRANSPOSED)
            if model.mlp_bias:
                yield TensorMapping((f"{at}mlp.{name}_proj.bias",), (f"mlp.{name}_bias",), layer)


def _norms(model: Architecture, family: str, layer: int, at: str) -> Iterator[TensorMapping]:
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
        yield from _norm(at + name, path, layer, family)


def _attention(model: Architecture, family: str, layer: int, at: str) -> Iterator[TensorMapping]:
    N, K, H = model.heads, model.kv_heads, model.head_dim
    heads = {"q": N, "k": K, "v": K}
    if family == "phi3":
        cuts = (N * H, (N + K) * H)
        parts = [_out_of(n, H) for n in heads.values()]

        def split(tensors: Tensors) -> Tensors:
            rows = np.split(tensors[0], cuts)
            return [part["load"]([x])[0] for part, x in zip(parts, rows, strict=True)]

        def joined(arrays: Tensors) -> Tensors:
            return [np.concatenate([part["save"]([x])[0] for part, x in zip(parts, arrays, strict=True)])]

        yield TensorMapping((f"{at}qkv_proj.weight",), ("attn.q", "attn.k", "attn.v"), layer, split, joined)
    else:
        for name, n in heads.items():
            yield TensorMapping((f"{at}{name}_proj.weight",), (f"attn.{name}",), layer, **_out_of(n, H))
            if model.qkv_bias:
                yield TensorMapping((f"{at}{name}_proj.bias",), (f"attn.{name}_bias",), layer, **_flat(n, H))
    yield TensorMapping((f"{at}o_proj.weight",), ("attn.out",), layer, **_into(N, H))
    if model.out_bias:
        yield TensorMapping((f"{at}o_proj.bias",), ("attn.out_bias",), layer)
    if model.qk_norm:
        for name in ("q", "k"):
            shape = (heads[name], H) if model.qk_norm_over == "projection" else (H,)
            yield TensorMapping((f"{at}{name}_norm.weight",), (f"attn.{name}_norm.scale",), layer, **_flat(*shape))


def _experts(model: Architecture, family: str, layer: int, at: str) -> Iterator[TensorMapping]:
    at += "block_sparse_moe." if family == "mixtral" else "mlp."
    names = {"gate": "w1", "up": "w3", "down": "w2"} if family == "mixtral" else {n: f"{n}_proj" for n in _MLP}
    yield TensorMapping((f"{at}gate.weight",), ("mlp.router",), layer, **_TRANSPOSED)
    for expert in range(model.experts):
        for ours, name in names.items():
            theirs = f"{at}experts.{expert}.{name}.weight"
            yield TensorMapping((theirs,), (f"mlp.{ours}",), layer, **_TRANSPOSED, expert=expert)


_MLP = ("gate", "up", "down")


def _gpt2_layer(model: Architecture, family: str, layer: int, prefix: str) -> Iterator[TensorMapping]:
    at, N, H = f"{prefix}h.{layer}.", model.heads, model.head_dim
    yield from _norm(f"{at}ln_1", "attn_norm", layer, family)
    yield from _norm(f"{at}ln_2", "mlp_norm", layer, family)
    paths = tuple(f"attn.{name}" for name in "qkv")

    def split(tensors: Tensors) -> Tensors:
        return [x.reshape(*x.shape[:-1], N, H) for x in np.split(tensors[0], 3, axis=-1)]

    def joined(arrays: Sequence[np.ndarray]) -> Tensors:
        return [np.concatenate([x.reshape(*x.shape[:-2], N * H) for x in arrays], axis=-1)]

    yield TensorMapping((f"{at}attn.c_attn.weight",), paths, layer, split, joined)
    yield TensorMapping((f"{at}attn.c_attn.bias",), tuple(f"{path}_bias" for path in paths), layer, split, joined)
    yield TensorMapping(
        (f"{at}attn.c_proj.weight",),
        ("attn.out",),
        layer,
        load=_each(lambda x: x.reshape(N, H, x.shape[-1])),
        save=_each(lambda x: x.reshape(N * H, x.shape[-1])),
    )
    yield TensorMapping((f"{at}attn.c_proj.bias",), ("attn.out_bias",), layer)
    for name, ours in (("c_fc", "up"), ("c_proj", "down")):
        yield TensorMapping((f"{at}mlp.{name}.weight",), (f"mlp.{ours}",), layer)
        yield TensorMapping((f"{at}mlp.{name}.bias",), (f"mlp.{ours}_bias",), layer)
