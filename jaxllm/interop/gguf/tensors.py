"""Mapping rules between the tensors of a GGUF file and the arrays of the parameter tree.

Sources: the table of tensor names in the `gguf` package; llama.cpp's converters for the transforms of the elements.
Matrices are [outputs, inputs]. Two quirks are undone here: in some families, the two elements of a rotary pair are
adjacent rows of the query and key matrices, while ours are half a head apart; and Gemma's norms store 1 + w.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from jaxllm.config import Architecture
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


def rules(model: Architecture, layout: Layout) -> list[TensorMapping]:
    """Builds the rules that map every tensor of a file, except constants, to every array of the parameter tree."""
    made = [_plain("token_embd.weight", "embed.tokens")]
    if model.positions == "learned":
        made.append(_plain("position_embd.weight", "embed.positions"))
    made += _norm(model, "output_norm", "final_norm", None)
    if not model.tied_embeddings:
        made.append(_plain("output.weight", "head"))
    for layer in range(model.layers):
        made += _attention(model, layout, layer)
        made += _mlp(model, layout, layer)
        for name, path in _layer_norms(model):
            made += _norm(model, f"blk.{layer}.{name}", path, layer)
    return made


def _layer_norms(model: Architecture) -> list[tuple[str, str]]:
    norms = []
    if model.norm_placement in ("pre", "sandwich"):
        norms += [("attn_norm", "attn_norm"), ("ffn_norm", "mlp_norm")]
    if model.norm_placement in ("post", "sandwich"):
        norms += [("post_attention_norm", "attn_post_norm"), ("post_ffw_norm", "mlp_post_norm")]
    return norms


def _attention(model: Architecture, layout: Layout, layer: int) -> Iterator[TensorMapping]:
    D, N, K, H = model.width, model.heads, model.kv_heads, model.head_dim
    heads = {"q": N, "k": K, "v": K}
    kinds = ["weight", "bias"] if model.qkv_bias else ["weight"]
    for kind in kinds:
        parts = [
            _Rows((D,) if kind == "weight" else (), (n, H), layout.permuted and name != "v")
            for name, n in heads.items()
        ]
        paths = tuple(f"attn.{name}" if kind == "weight" else f"attn.{name}_bias" for name in heads)
        if layout.fused_qkv:
            yield _stacked(f"blk.{layer}.attn_qkv.{kind}", paths, parts, layer)
        else:
            for name, path, part in zip(heads, paths, parts, strict=True):
                yield _stacked(f"blk.{layer}.attn_{name}.{kind}", (path,), [part], layer)
    yield _stacked(f"blk.{layer}.attn_output.weight", ("attn.out",), [_Rows((N, H), (D,))], layer)
    if model.out_bias:
        yield _plain(f"blk.{layer}.attn_output.bias", "attn.out_bias", layer)
    for name, n in (("q", N), ("k", K)) if model.qk_norm else ():
        shape = (n, H) if model.qk_norm_over == "projection" else (H,)
        yield _scale(model, f"blk.{layer}.attn_{name}_norm", f"attn.{name}_norm", layer, shape)


def _mlp(model: Architecture, layout: Layout, layer: int) -> Iterator[TensorMapping]:
    D, F, E = model.width, model.mlp_width, model.experts
    suffix = "_exps" if E else ""
    if E:
        yield _stacked(f"blk.{layer}.ffn_gate_inp.weight", ("mlp.router",), [_Rows((D,), (E,))], layer)
    names = (["gate"] if model.gated else []) + ["up"]
    for kind in ["weight", "bias"] if model.mlp_bias else ["weight"]:
        paths = tuple(f"mlp.{name}" if kind == "weight" else f"mlp.{name}_bias" for name in names)
        part = _Rows((D,) if kind == "weight" else (), (F,), lead=E)
        if layout.fused_gate:
            yield _stacked(f"blk.{layer}.ffn_up{suffix}.{kind}", paths, [part] * len(paths), layer)
        else:
            for name, path in zip(names, paths, strict=True):
                yield _stacked(f"blk.{layer}.ffn_{name}{suffix}.{kind}", (path,), [part], layer)
    yield _stacked(f"blk.{layer}.ffn_down{suffix}.weight", ("mlp.down",), [_Rows((F,), (D,), lead=E)], layer)
    if model.mlp_bias:
        yield _stacked(f"blk.{layer}.ffn_down{suffix}.bias", ("mlp.down_bias",), [_Rows((), (D,), lead=E)], layer)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Conversion of our matrix [*inputs, *outputs] to rows [outputs, inputs], or of our bias [*outputs] to [outputs].

    Attributes:
      inputs: input dimensions in our layout; empty for a bias.
      outputs: output dimensions in our layout.
      permuted: outputs are [heads, H], and the two elements of a rotary pair are adjacent in the file.
      lead: number of experts, the leading dimension in both layouts; 0 if there is none.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    permuted: bool = False
    lead: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.outputs)

    def load(self, tensor: np.ndarray) -> np.ndarray:
        lead = (self.lead,) if self.lead else ()
        if self.permuted:
            heads, H = self.outputs
            pairs = tensor.reshape(heads, H // 2, 2, *tensor.shape[1:])
            tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
        if self.inputs:
            tensor = tensor.reshape(*lead, self.count, math.prod(self.inputs)).swapaxes(-1, -2)
        return tensor.reshape(*lead, *self.inputs, *self.outputs)

    def save(self, array: np.ndarray) -> np.ndarray:
        lead = (self.lead,) if self.lead else ()
        rows = array.reshape(*lead, *([math.prod(self.inputs)] if self.inputs else []), self.count)
        if self.inputs:
            rows = rows.swapaxes(-1, -2)
        if self.permuted:
            heads, H = self.outputs
            rows = rows.reshape(heads, 2, H // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        return rows


def _stacked(name: str, paths: tuple[str, ...], parts: list[_Rows], layer: int) -> TensorMapping:
    """Builds the rule of a tensor that holds the rows of one array, or the concatenated rows of several."""
    axis = 1 if parts[0].lead else 0
    cuts = np.cumsum([part.count for part in parts])

    def load(tensors: Tensors) -> Tensors:
        if tensors[0].shape[axis] != cuts[-1]:
            raise ValueError(f"{cuts[-1]} rows are expected")
        pieces = np.split(tensors[0], cuts[:-1], axis) if len(parts) > 1 else [tensors[0]]
        return [part.load(piece) for part, piece in zip(parts, pieces, strict=True)]

    def save(arrays: Tensors) -> Tensors:
        pieces = [part.save(array) for part, array in zip(parts, arrays, strict=True)]
        return [np.concatenate(pieces, axis) if len(pieces) > 1 else pieces[0]]

    return TensorMapping((name,), paths, layer, load, save)


def _plain(name: str, path: str, layer: int | None = None) -> TensorMapping:
    return TensorMapping((name,), (path,), layer)


def _norm(model: Architecture, name: str, path: str, layer: int | None) -> Iterator[TensorMapping]:
    yield _scale(model, name, path, layer, (model.width,))
    if model.norm == "layernorm":
        yield _plain(f"{name}.bias", f"{path}.bias", layer)


def _scale(model: Architecture, name: str, path: str, layer: int | None, shape: tuple[int, ...]) -> TensorMapping:
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


def stored(name: str, tensor: np.ndarray, quantization: str) -> str:
    """Returns the type in which a tensor is written: always F32 for tensors that llama.cpp computes with in float32."""
    unit = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    if tensor.ndim < 2 or unit in ("ffn_gate_inp", "position_embd"):
        return "F32"
    return "F16" if quantization == "Q8_0" and tensor.shape[-1] % 32 else quantization
