"""Quantized tensors: every type is dequantized into the right place, one at a time; unsupported types are named."""

import dataclasses
import weakref

import gguf as library
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_files import rewritten, write, write_plain
from gguf_models import LLAMA

from jaxllm.errors import UserError
from jaxllm.interop.gguf import file as gguf_file
from jaxllm.interop.gguf import model as gguf

WIDE = dataclasses.replace(LLAMA, width=256, heads=4, kv_heads=2, head_dim=64, mlp_width=256, layers=1, vocab_size=32)


# Position of the scales in blocks of types without a quantizer: (first byte, number of float16 values).
SCALES = {"Q2_K": (80, 2), "Q3_K": (108, 1), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1)}


KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *SCALES]


def blocks(kind, shape, rng):
    """Returns a quantized matrix of random values, or of random bits with finite scales."""
    type_ = GGMLQuantizationType[kind]
    if kind not in SCALES:
        return quantize(rng.normal(size=shape).astype(np.float32), type_)
    size, bytes_ = library.GGML_QUANT_SIZES[type_]
    bits = rng.integers(0, 256, (shape[0], shape[1] // size, bytes_), np.uint8)
    start, count = SCALES[kind]
    scales = rng.uniform(0.01, 0.1, (*bits.shape[:2], count)).astype(np.float16)
    bits[..., start : start + 2 * count] = scales.view(np.uint8)
    return bits.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_blocks_arrive_where_they_belong(kind, tmp_path):
    write(tmp_path / "base.gguf", WIDE)
    rng = np.random.default_rng(1)
    names = ["attn_q", "attn_output", "ffn_gate", "ffn_down", "attn_k"]
    shapes = gguf_file.open_tensors(tmp_path / "base.gguf").shapes
    raw = {f"blk.0.{name}.weight": blocks(kind, shapes[f"blk.0.{name}.weight"], rng) for name in names}
    raw["token_embd.weight"] = blocks(kind, shapes["token_embd.weight"], rng)
    typed = {name: (data, GGMLQuantizationType[kind]) for name, data in raw.items()}
    path = rewritten(tmp_path / "base.gguf", tmp_path / "m.gguf", tensors=typed)
    params = gguf.open_file(path).load(jnp.float32)
    want = {name: dequantize(data, GGMLQuantizationType[kind]) for name, data in raw.items()}
    layer = jax.tree.map(lambda x: np.asarray(x[0]), params["layers"][0])
    np.testing.assert_array_equal(params["embed"]["tokens"], want["token_embd.weight"])
    np.testing.assert_array_equal(layer["mlp"]["gate"], want["blk.0.ffn_gate.weight"].T)
    np.testing.assert_array_equal(layer["mlp"]["down"], want["blk.0.ffn_down.weight"].T)
    out = want["blk.0.attn_output.weight"].T.reshape(4, 64, 256)
    np.testing.assert_array_equal(layer["attn"]["out"], out)
    for name, heads in (("q", 4), ("k", 2)):
        rows = want[f"blk.0.attn_{name}.weight"]
        for head in range(heads):
            for i in (0, 5, 31):
                for half in (0, 1):
                    row = rows[head * 64 + 2 * i + half]
                    np.testing.assert_array_equal(layer["attn"][name][:, head, i + 32 * half], row)
    assert not np.array_equal(layer["mlp"]["gate"], want["blk.0.ffn_gate.weight"])  # a transpose is detected


def test_q8_0_is_what_the_library_makes_and_narrow_rows_are_f16(tmp_path):
    params = write(tmp_path / "m.gguf", WIDE, quantization="Q8_0")
    file = gguf_file.open_tensors(tmp_path / "m.gguf")
    up = np.asarray(params["layers"][0]["mlp"]["up"][0]).T
    q8 = GGMLQuantizationType.Q8_0
    np.testing.assert_array_equal(file.read("blk.0.ffn_up.weight"), dequantize(quantize(up, q8), q8))
    assert np.abs(file.read("blk.0.ffn_up.weight") - up).max() <= np.abs(up).max() / 127
    write(tmp_path / "narrow.gguf", LLAMA, quantization="Q8_0")
    narrow = gguf_file.open_tensors(tmp_path / "narrow.gguf")
    assert (narrow.kind("blk.0.ffn_up.weight"), narrow.kind("blk.0.ffn_down.weight")) == ("Q8_0", "F16")


def test_never_more_than_one_tensor_is_dequantised(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf", WIDE, quantization="Q8_0")
    alive, most = [], []

    def counted(data, kind):
        made = dequantize(data, kind).copy()  # a separate array, kept alive by views of it
        alive.append(1)
        most.append(len(alive))
        weakref.finalize(made, alive.pop)
        return made

    monkeypatch.setattr(gguf_file, "dequantize", counted)
    gguf.open_file(tmp_path / "m.gguf").load(jnp.float32)
    assert len(most) == 8
    assert max(most) == 1


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ4_NL", "MXFP4", "TQ1_0", "Q8_K", "I32"])
def test_types_without_a_reader_are_named(kind, tmp_path):
    block, size = library.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = np.zeros((64, max(1, 32 // block) * size), np.uint8)
    tensors = {"token_embd.weight": (data, GGMLQuantizationType[kind])}
    path = rewritten(write_plain(tmp_path), tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(
        UserError, match=rf"token_embd.weight has the unsupported type {kind}; supported types are F32, F16"
    ):
        gguf.open_file(path)


@pytest.mark.parametrize("at_a_time", [1, 700, 1 << 18])
def test_rows_that_are_dequantised_a_few_at_a_time_are_the_same(at_a_time, tmp_path, monkeypatch):
    write(tmp_path / "m.gguf", WIDE, quantization="Q8_0")
    file = gguf_file.open_tensors(tmp_path / "m.gguf")
    header, extent = file._tensors["token_embd.weight"]
    rows = np.frombuffer(header.data, np.uint8, extent.nbytes, extent.start).reshape(32, -1)
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", at_a_time)
    np.testing.assert_array_equal(file.read("token_embd.weight"), dequantize(rows, extent.kind))
