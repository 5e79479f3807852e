"""GGUF files: bitwise round trips of every family, and the layout of a file."""

import dataclasses

import gguf as library
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import assert_equal_trees, rewritten, write, write_plain
from gguf_models import FAMILIES, LLAMA, random_params

from jaxllm import architectures
from jaxllm.errors import UserError
from jaxllm.interop.gguf import file as gguf_file
from jaxllm.interop.gguf import keys as gguf_keys
from jaxllm.interop.gguf import metadata, rope
from jaxllm.interop.gguf import model as gguf


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_comes_back_to_the_bit(name, tmp_path):
    family, model = FAMILIES[name]
    params = random_params(model)
    if model.norm == "rmsnorm_plus_one":  # values that 1 + w in float32 represents exactly
        params = jax.tree_util.tree_map_with_path(_quarters, params)
    write(tmp_path / "m.gguf", model, params)
    opened = gguf.open_file(tmp_path / "m.gguf")
    assert opened.family == family
    # What the format cannot store: the scale of initial weights, and the coefficient of a training loss.
    assert opened.model == dataclasses.replace(model, init_std=0.02, router_aux_weight=0.0)
    assert_equal_trees(opened.load(jnp.float32), params)


def _quarters(path, leaf):
    return jnp.asarray(np.round(np.asarray(leaf) * 4) / 4) if "scale" in jax.tree_util.keystr(path) else leaf


@pytest.mark.parametrize("quantization", ["F16", "BF16"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "phi3"])
def test_numbers_of_16_bits_come_back_to_the_bit(name, quantization, tmp_path):
    _, model = FAMILIES[name]
    dtype = {"F16": jnp.float16, "BF16": jnp.bfloat16}[quantization]
    params = write(tmp_path / "m.gguf", model, random_params(model, dtype), quantization)
    opened = gguf.open_file(tmp_path / "m.gguf")
    again = opened.load(dtype)
    assert_equal_trees(again, params)
    write(tmp_path / "again.gguf", opened.model, again, quantization)
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    file = gguf_file.open_tensors(tmp_path / "m.gguf")
    assert file.kind("blk.0.ffn_norm.weight") == "F32"
    assert file.kind("token_embd.weight") == quantization


def test_norms_of_gemma_stand_as_one_plus_w(tmp_path):
    _, model = FAMILIES["gemma2"]
    params = write(tmp_path / "m.gguf", model)
    file = gguf_file.open_tensors(tmp_path / "m.gguf")
    w = np.asarray(params["final_norm"]["scale"])
    np.testing.assert_array_equal(file.read("output_norm.weight"), np.float32(1) + w)
    again = gguf.open_file(tmp_path / "m.gguf").load(jnp.float32)["final_norm"]["scale"]
    np.testing.assert_array_equal(1 + np.asarray(again), 1 + w)  # the value that the model computes with
    assert gguf_file.open_tensors(write_plain(tmp_path)).read("output_norm.weight").mean() != pytest.approx(2, abs=0.5)


GROUPED = dataclasses.replace(LLAMA, heads=8, kv_heads=2, head_dim=8, width=64, qkv_bias=True)


def in_pairs(rows, heads):
    """Permutes rows as llama.cpp's converter does: within each head 0, H/2, 1, H/2 + 1, …"""
    H = len(rows) // heads
    order = [head * H + half * (H // 2) + i for head in range(heads) for i in range(H // 2) for half in (0, 1)]
    return rows[order]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_query_and_key_rows_are_put_back_with_their_own_head_counts(family, tmp_path):
    """Reads a float16 file laid out as llama.cpp's converter writes a checkpoint's matrices [out, in]."""
    write(tmp_path / "base.gguf", GROUPED, quantization="F16")
    rng = np.random.default_rng(0)
    shapes = {"q": (64, 64), "k": (16, 64)}
    original = {name: rng.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}
    biases = {name: rng.normal(size=len(w)).astype(np.float32) for name, w in original.items()}
    heads = {"q": 8, "k": 2}

    def loaded(heads):
        tensors = {}
        for name in "qk":
            put = (lambda x, n=heads[name]: in_pairs(x, n)) if family == "llama" else (lambda x: x)
            tensors[f"blk.0.attn_{name}.weight"] = put(original[name])
            tensors[f"blk.0.attn_{name}.bias"] = put(biases[name])
        keys = {k.replace("qwen2.", f"{family}."): v for k, v in base.metadata._values.items()}
        keys |= {k: None for k in base.metadata._values if k.startswith("qwen2.") and family != "qwen2"}
        path = rewritten(tmp_path / "base.gguf", tmp_path / "m.gguf", keys, tensors, family)
        return gguf.open_file(path).load(jnp.float16)["layers"][0]["attn"]

    def right(attn):
        return all(
            np.array_equal(np.asarray(attn[name][0]).reshape(64, -1).T, original[name])
            and np.array_equal(np.asarray(attn[f"{name}_bias"][0]).ravel(), biases[name].astype(np.float16))
            for name in "qk"
        )

    base = gguf_file.open_tensors(tmp_path / "base.gguf")
    assert right(loaded(heads))
    if family == "llama":  # using the number of query heads for the keys is detected
        assert not right(loaded({"q": 8, "k": 8}))


def test_a_reader_that_permutes_the_wrong_family_is_caught(tmp_path, monkeypatch):
    params = write(tmp_path / "m.gguf", GROUPED)
    monkeypatch.setattr(metadata, "_PERMUTED", ("llama", "qwen2"))
    again = gguf.open_file(tmp_path / "m.gguf").load(jnp.float32)
    with pytest.raises(AssertionError, match=r"\['k'\]"):
        assert_equal_trees(again, params)


def test_the_header_is_read_as_the_library_reads_it(tmp_path):
    write(tmp_path / "m.gguf", FAMILIES["gemma3"][1], tokenizer=None, name="tiny", chat_template="{{ 1 }}")
    reader, file = library.GGUFReader(tmp_path / "m.gguf"), gguf_file.open_tensors(tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert set(fields) == set(file.metadata._values)
    for name, value in fields.items():
        ours = file.metadata.raw(name)
        assert (np.float32(ours) if isinstance(value, float) else ours) == value, name
    assert {tensor.name for tensor in reader.tensors} == set(file.shapes) != set()
    for tensor in reader.tensors:
        np.testing.assert_array_equal(tensor.data, file.read(tensor.name))
    assert file.metadata.require("gemma3.attention.layer_norm_rms_epsilon", float) == 1e-5  # as written, not as rounded


def test_a_model_in_several_files(tmp_path):
    params = write(tmp_path / "m.gguf", LLAMA)
    file = gguf_file.open_tensors(tmp_path / "m.gguf")
    names = list(file.shapes)
    parts = [names[:5], names[5:]]
    for number, part in enumerate(parts, 1):
        drop = dict.fromkeys(set(names) - set(part))
        keys = {"split.count": 2, "split.no": number - 1, "split.tensors.count": len(names)}
        rewritten(tmp_path / "m.gguf", tmp_path / f"x-{number:05d}-of-00002.gguf", keys, drop)
    assert_equal_trees(gguf.open_file(tmp_path / "x-00001-of-00002.gguf").load(jnp.float32), params)
    with pytest.raises(UserError, match="is one of 2 files; give the first one"):
        gguf.open_file(tmp_path / "x-00002-of-00002.gguf")
    (tmp_path / "x-00002-of-00002.gguf").unlink()
    with pytest.raises(UserError, match=r"x-00002-of-00002.gguf: no such file"):
        gguf.open_file(tmp_path / "x-00001-of-00002.gguf")


def test_metadata_of_the_published_names_is_read_without_a_model():
    """Runs `parse_metadata` on shapes alone at the size of a 70B model."""
    model = architectures.ARCHITECTURES["llama3.1-70b"]
    keys = gguf_keys.architecture_keys(model, "llama") | {"general.architecture": "llama"}
    constants = rope.constant_tensors(model)
    shapes = {"token_embd.weight": (model.vocab_size, model.width), "output.weight": (), "rope_freqs.weight": (64,)}
    parsed = metadata.parse_metadata(gguf_file.Metadata(keys, "x"), shapes, constants.__getitem__)
    assert dataclasses.replace(parsed.model, init_std=model.init_std) == model
