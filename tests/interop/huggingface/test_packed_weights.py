"""Checkpoints packed by GPTQ and AWQ: both layouts of zero points, group indices, and files that contradict themselves.

The packer here is independent of the code under test.
"""

import dataclasses
import json
import re
import warnings

import folders
import jax
import models
import numpy as np
import pytest

from jaxllm.errors import Notice, UserError
from jaxllm.interop.huggingface import safetensors_files
from jaxllm.interop.huggingface.model import open_folder
from jaxllm.interop.huggingface.packed_weights import unpack

MODEL = dataclasses.replace(models.ROTARY, tied_embeddings=False)
EXPERTS = dataclasses.replace(models.EXPERTS, tied_embeddings=False)
GROUP = 8
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
LINEAR = re.compile(r".*_proj\.weight")


def words(codes, order):
    """Packs 4-bit codes [rows, 8 n] into int32 [rows, n]; nibble k of a word is column order[k]."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.int64)
    for word in range(packed.shape[1]):
        for nibble, column in enumerate(order):
            packed[:, word] += codes[:, 8 * word + column].astype(np.int64) << (4 * nibble)
    return packed.astype(np.uint32).view(np.int32)


PLAIN, INTERLEAVED = range(8), (0, 2, 4, 6, 1, 3, 5, 7)


def packed(shape, method, stored_offset=0, symmetric=False, act_order=False, seed=0):
    """Returns (tensors of one linear map of [outputs, inputs], its float weight)."""
    generator = np.random.default_rng(seed)
    outputs, inputs = shape
    codes = generator.integers(0, 16, shape)
    shape_of_groups = (inputs // GROUP, outputs)
    zeros = np.full(shape_of_groups, 8) if symmetric else generator.integers(0, 16, shape_of_groups)
    scales = generator.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    groups = np.arange(inputs) // GROUP
    if act_order:
        groups = generator.permutation(groups)
    weight = (codes - zeros.T[:, groups]) * scales.T.astype(np.float32)[:, groups]
    order = INTERLEAVED if method == "awq" else PLAIN
    stored = (zeros - stored_offset) % 16
    tensors = {
        "qweight": words(codes.T, order) if method == "awq" else words(codes, PLAIN).T,
        "qzeros": words(stored, order),
        "scales": scales,
    }
    if method == "gptq":
        tensors["g_idx"] = groups.astype(np.int32)
    return tensors, weight.astype(np.float32)


def write(folder, table, make=packed, model=MODEL, plain=(), **options):
    """Writes a folder whose linear maps are packed, except `plain`; returns the float tensors by name."""
    family = "mixtral" if model.experts else "llama"
    tree = folders.random_tree(model, np.float32)
    folders.write(folder, model, tree, family)
    tensors = folders.tensors(model, tree, family)
    stored, wanted = {}, {}
    for seed, (name, x) in enumerate(tensors.items()):
        module = name.removesuffix(".weight")
        if (LINEAR.fullmatch(name) or re.search(r"\.w[123]\.", name)) and not any(part in module for part in plain):
            parts, wanted[name] = make(x.shape, table["quant_method"], seed=seed, **options)
            stored |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            stored[name] = wanted[name] = x
    rewrite(folder, stored)
    folders.change_config(folder, quantization_config=table)
    return wanted


def rewrite(folder, tensors):
    """Writes model.safetensors with tensors of any dtype."""
    names = {"float32": "F32", "float16": "F16", "int32": "I32"}
    header, at = {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": names[x.dtype.name], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / safetensors_files.SINGLE_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).tobytes())


def read(folder):
    return dict(jax.tree_util.tree_leaves_with_path(open_folder(folder).load(np.float32)))


@pytest.mark.parametrize(
    ("table", "options"),
    [
        (GPTQ, {"symmetric": True, "stored_offset": 1}),
        (GPTQ | {"sym": False}, {"stored_offset": 1}),
        (GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, {}),
        (GPTQ | {"sym": False, "desc_act": True}, {"stored_offset": 1, "act_order": True}),
        (AWQ, {}),
    ],
    ids=["symmetric", "asymmetric", "second layout", "act-order", "awq"],
)
def test_weights_are_dequantized(tmp_path, table, options):
    """The tree equals that of a plain folder with the dequantized weights, value by value."""
    wanted = write(tmp_path / "packed", table, **options)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text((tmp_path / "packed" / "config.json").read_text())
    folders.change_config(tmp_path / "plain", quantization_config=...)
    rewrite(tmp_path / "plain", wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read(tmp_path / "packed")
    for path, x in read(tmp_path / "plain").items():
        np.testing.assert_array_equal(found[path], x)


def one(codes, zero, scale=0.5):
    """Makes linear maps whose codes and stored zero points are all equal."""

    def make(shape, method, seed):
        __, weight = packed(shape, method)
        groups = shape[1] // GROUP
        return {
            "qweight": words(np.full(shape, codes), PLAIN).T,
            "qzeros": words(np.full((groups, shape[0]), zero), PLAIN),
            "scales": np.full((groups, shape[0]), scale, np.float16),
        }, weight

    return make


# AutoGPTQ/AutoGPTQ#640, #325; vllm-project/vllm#38966: zero points off by one, and files with the wrong label.
@pytest.mark.parametrize(
    ("layout", "symmetric", "stored", "code", "value", "warns"),
    [
        ("gptq", True, 7, 9, 0.5, False),
        ("gptq_v2", True, 8, 9, 0.5, False),
        ("gptq", True, 8, 9, 0.5, True),
        ("gptq_v2", True, 7, 9, 0.5, True),
        ("gptq", False, 15, 3, 1.5, False),  # a zero point of 0, stored as -1 modulo 16
        ("gptq_v2", False, 0, 3, 1.5, False),
    ],
)
def test_both_layouts_of_zero_points(tmp_path, layout, symmetric, stored, code, value, warns):
    table = GPTQ | {"checkpoint_format": layout, "sym": symmetric}
    write(tmp_path / "model", table, one(code, stored))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened = open_folder(tmp_path / "model")
    assert [w.category for w in caught] == [Notice] * warns
    assert all(f"checkpoint_format is '{layout}'" in str(w.message) for w in caught)
    np.testing.assert_array_equal(np.asarray(opened.load(np.float32)["layers"][0]["attn"]["q"]), value)


def test_a_group_of_zeros_is_zero(tmp_path):
    write(tmp_path / "model", GPTQ, one(9, 7, scale=0.0))
    assert not np.asarray(open_folder(tmp_path / "model").load(np.float32)["layers"][0]["mlp"]["up"]).any()


def test_awq_order():
    np.testing.assert_array_equal(unpack(np.array([[0x75316420]], np.int32), 4, INTERLEAVED), [range(8)])
    np.testing.assert_array_equal(unpack(np.array([[0x76543210]], np.int32), 4), [range(8)])
    np.testing.assert_array_equal(unpack(np.array([[-1]], np.int32), 8), [[255] * 4])


# NVIDIA/TensorRT-LLM#1528: "gate" is a whole module of Mixtral, and a part of the name of one of Llama.
@pytest.mark.parametrize(
    "model", [MODEL, dataclasses.replace(models.EXPERTS, tied_embeddings=False)], ids=["llama", "mixtral"]
)
def test_modules_not_converted_are_whole_names(tmp_path, model):
    wanted = write(tmp_path / "model", AWQ | {"modules_to_not_convert": ["gate"]}, model=model)
    files = set(safetensors_files.open_tensors(tmp_path / "model").entries)
    assert any("gate" in name for name in files)
    layers = open_folder(tmp_path / "model").load(np.float32)["layers"][0]
    if model.experts:
        router = wanted["model.layers.0.block_sparse_moe.gate.weight"]
        np.testing.assert_array_equal(layers["mlp"]["router"][0], router.T)
    else:
        np.testing.assert_array_equal(layers["mlp"]["gate"][0], wanted["model.layers.0.mlp.gate_proj.weight"].T)


def test_contradictions_are_refused_by_name(tmp_path):
    folder = tmp_path / "model"
    write(folder, AWQ | {"modules_to_not_convert": ["gate_proj"]})
    with pytest.raises(UserError, match=r"layers\.\d\.mlp\.gate_proj is packed, but .* lists 'gate_proj'"):
        open_folder(folder)
    folder = tmp_path / "mixed"
    wanted = write(folder, AWQ, plain=("gate_proj",))  # plain although it is not listed: what it is decides
    np.testing.assert_array_equal(
        open_folder(folder).load(np.float32)["layers"][0]["mlp"]["gate"][0],
        wanted["model.layers.0.mlp.gate_proj.weight"].T,
    )
    tensors, _ = packed((8, GROUP), "awq")
    extra = {f"model.norm.{part}": x for part, x in tensors.items()}
    files = safetensors_files.open_tensors(folder)
    everything = {n: files.read(n) if e.dtype[0] == "F" else files.read_integers(n) for n, e in files.entries.items()}
    everything = {name: np.array(x) for name, x in everything.items()}
    rewrite(folder, everything | extra)
    with pytest.raises(UserError, match=r"model\.norm has both weight and qweight"):
        open_folder(folder)
    everything.pop("model.layers.0.self_attn.q_proj.scales")
    rewrite(folder, everything)
    with pytest.raises(UserError, match=r"q_proj\.scales is missing"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (GPTQ | {"bits": 3}, "bits 3, which is unsupported for gptq; supported values are 2, 4, 8"),
        (AWQ | {"version": "gemv"}, "format 'gemv'"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
    ],
)
def test_other_methods_are_refused(tmp_path, table, message):
    write(tmp_path / "model", GPTQ, symmetric=True, stored_offset=1)
    folders.change_config(tmp_path / "model", quantization_config=table)
    with pytest.raises(UserError, match=message):
        open_folder(tmp_path / "model")


def test_symmetric_files_with_other_zero_points_are_refused(tmp_path):
    write(tmp_path / "model", GPTQ, one(9, 3))
    with pytest.raises(UserError, match=r"_proj: .* says sym, but its zero points are not all 8"):
        open_folder(tmp_path / "model").load(np.float32)
