"""Mapping rules between the tensors of a GGUF file and the arrays of the parameter tree.

Sources: the table of tensor names in the `gguf` package; llama.cpp's converters for the transforms of the elements.
Matrices are [outputs, inputs]. Two quirks are undone here: in some families, the two elements of a rotary pair are
adjacent rows of the query and key matrices, while ours are half a head apart; and Gemma's norms store 1 + w.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxllm.config import Architecture
from jaxllm.interop.matrix_layout import MatrixLayout, matrix_rule
from jaxllm.interop.rules import TensorMapping, Tensors


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of the tensors in a GGUF file.

    Attributes:
      permuted: the rows of the query and key matrices are ordered in adjacent rotary pairs.
      fused_qkv: queries, keys and values are one tensor.
      fused_gate: gate and up projection are concatenated, in this order, in one tensor called "ffn_up".
    """

    permuted: bool
    fused_qkv: bool
    fused_gate: bool


def build_rules(model: Architecture, layout: Layout) -> list[TensorMapping]:
    """Builds the rules that map every tensor of a file, except constants, to every array of the parameter tree."""
    rules = [_copy_rule("token_embd.weight", "embed.tokens")]
    if model.positions == "learned":
        rules.append(_copy_rule("position_embd.weight", "embed.positions"))
    rules += _norm_rules(model, "output_norm", "final_norm", None)
    if not model.tied_embeddings:
        rules.append(_copy_rule("output.weight", "head"))
    for layer in range(model.layers):
        rules += _attention_rules(model, layout, layer)
        rules += _mlp_rules(model, layout, layer)
        for name, path in _layer_norms(model):
            rules += _norm_rules(model, f"blk.{layer}.{name}", path, layer)
    return rules


def _layer_norms(model: Architecture) -> list[tuple[str, str]]:
    norms = []
    if model.norm_placement in ("pre", "sandwich"):
        norms += [("attn_norm", "attn_norm"), ("ffn_norm", "mlp_norm")]
    if model.norm_placement in ("post", "sandwich"):
        norms += [("post_attention_norm", "attn_post_norm"), ("post_ffw_norm", "mlp_post_norm")]
    return norms


def _attention_rules(model: Architecture, layout: Layout, layer: int) -> Iterator[TensorMapping]:
    D, N, K, H = model.width, model.heads, model.kv_heads, model.head_dim
    heads = {"q": N, "k": K, "v": K}
    kinds = ["weight", "bias"] if model.qkv_bias else ["weight"]
    for kind in kinds:
        parts = [
            MatrixLayout((D,) if kind == "weight" else (), (n, H), layout.permuted and name != "v")
            for name, n in heads.items()
        ]
        paths = tuple(f"attn.{name}" if kind == "weight" else f"attn.{name}_bias" for name in heads)
        if layout.fused_qkv:
            yield matrix_rule(f"blk.{layer}.attn_qkv.{kind}", paths, parts, layer)
        else:
            for name, path, part in zip(heads, paths, parts, strict=True):
                yield matrix_rule(f"blk.{layer}.attn_{name}.{kind}", (path,), [part], layer)
    yield matrix_rule(f"blk.{layer}.attn_output.weight", ("attn.out",), [MatrixLayout((N, H), (D,))], layer)
    if model.out_bias:
        yield _copy_rule(f"blk.{layer}.attn_output.bias", "attn.out_bias", layer)
    for name, n in (("q", N), ("k", K)) if model.qk_norm else ():
        shape = (n, H) if model.qk_norm_over == "projection" else (H,)
        yield _scale_rule(model, f"blk.{layer}.attn_{name}_norm", f"attn.{name}_norm", layer, shape)


def _mlp_rules(model: Architecture, layout: Layout, layer: int) -> Iterator[TensorMapping]:
    D, F, E = model.width, model.mlp_width, model.experts
    suffix = "_exps" if E else ""
    if E:
        yield matrix_rule(f"blk.{layer}.ffn_gate_inp.weight", ("mlp.router",), [MatrixLayout((D,), (E,))], layer)
    names = (["gate"] if model.gated else []) + ["up"]
    for kind in ["weight", "bias"] if model.mlp_bias else ["weight"]:
        paths = tuple(f"mlp.{name}" if kind == "weight" else f"mlp.{name}_bias" for name in names)
        part = MatrixLayout((D,) if kind == "weight" else (), (F,), lead=E)
        if layout.fused_gate:
            yield matrix_rule(f"blk.{layer}.ffn_up{suffix}.{kind}", paths, [part] * len(paths), layer)
        else:
            for name, path in zip(names, paths, strict=True):
                yield matrix_rule(f"blk.{layer}.ffn_{name}{suffix}.{kind}", (path,), [part], layer)
    yield matrix_rule(f"blk.{layer}.ffn_down{suffix}.weight", ("mlp.down",), [MatrixLayout((F,), (D,), lead=E)], layer)
    if model.mlp_bias:
        yield matrix_rule(
            f"blk.{layer}.ffn_down{suffix}.bias", ("mlp.down_bias",), [MatrixLayout((), (D,), lead=E)], layer
        )


def _copy_rule(name: str, path: str, layer: int | None = None) -> TensorMapping:
    return TensorMapping((name,), (path,), layer)


def _norm_rules(model: Architecture, name: str, path: str, layer: int | None) -> Iterator[TensorMapping]:
    yield _scale_rule(model, name, path, layer, (model.width,))
    if model.norm == "layernorm":
        yield _copy_rule(f"{name}.bias", f"{path}.bias", layer)


def _scale_rule(model: Architecture, name: str, path: str, layer: int | None, shape: tuple[int, ...]) -> TensorMapping:
    plus_one = model.norm == "rmsnorm_plus_one"

    def load(tensors: Tensors) -> Tensors:
        return [(_minus_one(tensors[0]) if plus_one else tensors[0]).reshape(shape)]

    def save(arrays: Tensors) -> Tensors:
        return [(_plus_one(arrays[0]) if plus_one else arrays[0]).reshape(-1)]

    return TensorMapping((f"{name}.weight",), (f"{path}.scale",), layer, load, save)


def _minus_one(tensor: np.ndarray) -> np.ndarray:
    """Converts a scale 1 + w to w: exact for scales of at least 1/2; smaller ones lose only negligible low bits."""
    return tensor.astype(np.float32) - np.float32(1)


def _plus_one(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) + np.float32(1)


def storage_type(name: str, tensor: np.ndarray, quantization: str) -> str:
    """Returns the type in which a tensor is written: always F32 for tensors that llama.cpp computes with in float32."""
    unit = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    if tensor.ndim < 2 or unit in ("ffn_gate_inp", "position_embd"):
        return "F32"
    return "F16" if quantization == "Q8_0" and tensor.shape[-1] % 32 else quantization
