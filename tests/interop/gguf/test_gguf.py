"""GGUF files: every quantisation, every family there and back to the bit, and what is refused."""

import contextlib
import dataclasses
import struct
import weakref

import gguf as library
import gguf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from jaxllm import architectures
from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.gguf import families, metadata, rope
from jaxllm.interop.gguf import file as gguf_file
from jaxllm.interop.gguf import keys as gguf_keys
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.tokenizer import ByteTokenizer

LLAMA = gguf_models.LLAMA
QWEN2 = gguf_models.QWEN2
LLAMA3 = gguf_models.LLAMA3
FAMILIES = gguf_models.FAMILIES
random_params = gguf_models.random_params


def write(path, model, params=None, quantization="F32", tokenizer=None, **changes):
    params = random_params(model) if params is None else params
    gguf.write(path, model, params, tokenizer, quantization=quantization, **changes)
    return params


def rewritten(source, path, keys=None, tensors=None, arch=None):
    """A copy of a file with other keys (None: without it) and tensors, by the `gguf` package alone."""
    file = gguf_file.open_tensors(source)
    values = file.metadata._values | (keys or {})
    writer = GGUFWriter(path, arch or values["general.architecture"])
    for key, value in values.items():
        if key != "general.architecture" and value is not None:
            gguf._add(writer, key, value)
    data = {name: file.read(name) for name in file.shapes} | (tensors or {})
    for name, tensor in data.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        elif tensor is not None:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equal_trees(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_comes_back_to_the_bit(name, tmp_path):
    family, model = FAMILIES[name]
    params = random_params(model)
    if model.norm == "rmsnorm_plus_one":  # what 1 + w in float32 can hold
        params = jax.tree_util.tree_map_with_path(_quarters, params)
    write(tmp_path / "m.gguf", model, params)
    opened = gguf.open_file(tmp_path / "m.gguf")
    assert opened.family == family
    for field in dataclasses.fields(Architecture):
        ours, theirs = getattr(model, field.name), getattr(opened.model, field.name)
        if field.name in families.NOT_STORED:
            continue
        assert ours == theirs or gguf_keys._equivalent(model, opened.model, field.name), (field.name, ours, theirs)
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
    np.testing.assert_array_equal(1 + np.asarray(again), 1 + w)  # what the model computes with
    assert gguf_file.open_tensors(write_plain(tmp_path)).read("output_norm.weight").mean() != pytest.approx(2, abs=0.5)


def write_plain(folder):
    write(folder / "plain.gguf", LLAMA)
    return folder / "plain.gguf"


# --- E4: rows of queries and keys

GROUPED = dataclasses.replace(LLAMA, heads=8, kv_heads=2, head_dim=8, width=64, qkv_bias=True)


def in_pairs(rows, heads):
    """Rows as llama.cpp's converter lays them: of each head 0, H/2, 1, H/2 + 1, …"""
    H = len(rows) // heads
    order = [head * H + half * (H // 2) + i for head in range(heads) for i in range(H // 2) for half in (0, 1)]
    return rows[order]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_query_and_key_rows_are_put_back_with_their_own_head_counts(family, tmp_path):
    """A file as llama.cpp's converter makes it of a checkpoint's matrices [out, in], in float16."""
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
    if family == "llama":  # a file, or a reader, that takes the query heads for the keys is told apart
        assert not right(loaded({"q": 8, "k": 8}))


def test_a_reader_that_permutes_the_wrong_family_is_caught(tmp_path, monkeypatch):
    params = write(tmp_path / "m.gguf", GROUPED)
    monkeypatch.setattr(families, "_PERMUTED", ("llama", "qwen2"))
    again = gguf.open_file(tmp_path / "m.gguf").load(jnp.float32)
    with pytest.raises(AssertionError, match=r"\['k'\]"):
        assert_equal_trees(again, params)


# --- quantised blocks

WIDE = dataclasses.replace(LLAMA, width=256, heads=4, kv_heads=2, head_dim=64, mlp_width=256, layers=1, vocab_size=32)
# Where the scales of a block stand that has no quantizer: (first byte, number of float16).
SCALES = {"Q2_K": (80, 2), "Q3_K": (108, 1), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1)}
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *SCALES]


def blocks(kind, shape, rng):
    """A quantised matrix: of random numbers, or of random bits with scales that are numbers."""
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
    assert not np.array_equal(layer["mlp"]["gate"], want["blk.0.ffn_gate.weight"])  # the transpose is seen


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


def test_the_header_is_read_as_the_library_reads_it(tmp_path):
    write(tmp_path / "m.gguf", FAMILIES["gemma3"][1], tokenizer=None, name="tiny", chat_template="{{ 1 }}")
    reader, file = library.GGUFReader(tmp_path / "m.gguf"), gguf_file.open_tensors(tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert set(fields) == set(file.metadata._values)
    for name, value in fields.items():
        ours = file.metadata.raw(name)
        assert ours == value or np.float32(ours) == value, name
    for tensor in reader.tensors:
        np.testing.assert_array_equal(tensor.data, file.read(tensor.name))
    assert file.metadata.need("gemma3.attention.layer_norm_rms_epsilon", float) == 1e-5  # as written, not as rounded


def test_never_more_than_one_tensor_is_dequantised(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf", WIDE, quantization="Q8_0")
    alive, most = [], []

    def counted(data, kind):
        made = dequantize(data, kind).copy()  # an array of its own, which views of it keep alive
        alive.append(1)
        most.append(len(alive))
        weakref.finalize(made, alive.pop)
        return made

    monkeypatch.setattr(gguf_file, "dequantize", counted)
    gguf.open_file(tmp_path / "m.gguf").load(jnp.float32)
    assert len(most) == 8
    assert max(most) == 1


# --- Llama 3.1's positions


def test_factors_of_llama_3_stand_for_their_numbers(tmp_path):
    write(tmp_path / "m.gguf", LLAMA3)
    factors = gguf_file.open_tensors(tmp_path / "m.gguf").read("rope_freqs.weight")
    multipliers = 1 / factors
    np.testing.assert_allclose(multipliers[:15], 1)
    np.testing.assert_allclose(multipliers[15:18], [0.605573, 0.303743, 0.103448], rtol=0, atol=5e-7)
    np.testing.assert_allclose(multipliers[18:], 0.03125)
    opened = gguf.open_file(tmp_path / "m.gguf").model
    assert opened.rope_scaling == "llama3"
    assert rope.same(opened, LLAMA3)
    # Converters before ours kept no original context: that of the releases is found.
    other = rewritten(tmp_path / "m.gguf", tmp_path / "o.gguf", {"llama.rope.scaling.original_context_length": None})
    assert gguf.open_file(other).model == opened
    for change in ({"rope_low_freq_factor": 2.0}, {"rope_factor": 8.0}, {"rope_original_context": 4096}):
        assert not rope.same(dataclasses.replace(opened, **change), LLAMA3)


def test_other_factors_are_solved_or_refused(tmp_path):
    odd = dataclasses.replace(LLAMA3, rope_low_freq_factor=1.5, rope_high_freq_factor=6.0, rope_original_context=16384)
    write(tmp_path / "odd.gguf", odd)
    assert rope.same(gguf.open_file(tmp_path / "odd.gguf").model, odd)
    factors = np.linspace(1, 9, 32).astype(np.float32)
    path = rewritten(tmp_path / "odd.gguf", tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    with pytest.raises(UserError, match=r"rope_freqs.weight is not a scaling like Llama 3.1's"):
        gguf.open_file(path)
    path = rewritten(tmp_path / "odd.gguf", tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors[:5]})
    with pytest.raises(UserError, match=r"5 factors for head_dim 64"):
        gguf.open_file(path)


# --- what is refused


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general.type": "adapter"}, "holds a adapter"),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.block_count": "two"}, "not of type int"),
        ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv, of which this reader knows nothing"),
        ({"llama.attention.value_length": 4}, "value_length is 4, and only 8"),
        ({"llama.vocab_size": 63}, "vocab_size is 63, and only 64"),
        ({"llama.attention.causal": False}, "attention.causal is False"),
        ({"llama.rope.scaling.type": "dynamic"}, "rope.scaling.type is 'dynamic'"),
        ({"llama.expert_gating_func": 2}, "expert_gating_func is 2"),
        ({"llama.attention.sliding_window": 4, "llama.attention.sliding_window_pattern": [True]}, "has 1 layers of 2"),
        ({"tokenizer.ggml.model": "bert"}, "of kind 'bert'"),
    ],
)
def test_keys_that_cannot_be_used_stop_the_import(keys, words, tmp_path):
    path = rewritten(write_plain(tmp_path), tmp_path / "m.gguf", keys)
    with pytest.raises(UserError) as caught:
        gguf.open_file(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_family_is_named(tmp_path):
    path = rewritten(write_plain(tmp_path), tmp_path / "m.gguf", arch="mamba")
    with pytest.raises(UserError, match="is a mamba model, which is not read; those that are: llama, qwen2"):
        gguf.open_file(path)


def test_all_missing_and_unexpected_tensors_are_listed(tmp_path):
    tensors = {
        "blk.0.attn_k.weight": None,
        "blk.1.ffn_norm.weight": None,
        "blk.0.attn_q_norm.weight": np.ones(8, np.float32),
        "blk.2.ffn_up.weight": np.ones((2, 2), np.float32),
    }
    path = rewritten(write_plain(tmp_path), tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(UserError) as caught:
        gguf.open_file(path)
    for name in tensors:
        assert name in str(caught.value)


def test_a_tensor_of_another_shape_is_told(tmp_path):
    tensors = {"blk.0.attn_k.weight": np.ones((17, 32), np.float32)}
    path = rewritten(write_plain(tmp_path), tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(UserError, match=r"blk.0.attn_k.weight \[17, 32\]"):
        gguf.open_file(path).load(jnp.float32)


def test_types_without_a_reader_are_named(tmp_path):
    data = np.zeros((64, 32 // 32 * 18), np.uint8)
    tensors = {"token_embd.weight": (data, GGMLQuantizationType.IQ4_NL)}
    path = rewritten(write_plain(tmp_path), tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(UserError, match=r"token_embd.weight is IQ4_NL, which is not read; use a file of F32, F16"):
        gguf.open_file(path)


def test_damaged_files_are_told_before_anything_is_read(tmp_path):
    whole = write_plain(tmp_path).read_bytes()
    path = tmp_path / "m.gguf"
    cases = {"is not a GGUF file": b"GGML" + whole[4:], "GGUF big-endian": whole[:4] + struct.pack(">I", 3) + whole[8:]}
    cases |= {"cut short": whole[:-64], "is cut short or damaged": whole[:300], "not a GGUF": b""}
    cases["GGUF version 1"] = whole[:4] + struct.pack("<I", 1) + whole[8:]
    for words, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            gguf.open_file(path)
        assert words in str(caught.value)
    for at in range(24, 2000, 37):  # a flipped byte in the header never ends in anything but a line, or a model
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(UserError):
            gguf.open_file(path)
    with pytest.raises(UserError, match="no such file"):
        gguf.open_file(tmp_path / "nowhere.gguf")


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
    with pytest.raises(UserError, match="is one of 2 files; give the first"):
        gguf.open_file(tmp_path / "x-00002-of-00002.gguf")
    (tmp_path / "x-00002-of-00002.gguf").unlink()
    with pytest.raises(UserError, match=r"x-00002-of-00002.gguf: no such file"):
        gguf.open_file(tmp_path / "x-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gemma2", {"query_scale": 0.3}, "query_scale = 0.3"),
        ("llama", {"embedding_scale": 2.0}, "embedding_scale = 2.0"),
        ("llama", {"logit_softcap": 30.0}, "logit_softcap = 30.0"),
        ("mixtral", {"normalize_routing": False}, "normalize_routing = False"),
        ("gpt2", {"out_bias": False}, "out_bias = False"),
        ("qwen3", {"mlp": "geglu"}, "mlp = 'geglu'"),
        ("olmo2", {"tied_embeddings": True}, "tied_embeddings = True"),
        ("smollm3", {"pattern": ("full", "nope")}, "pattern = ('full', 'nope')"),
        ("gemma2", {"attention_softcap": 0.0}, "both soft caps"),
    ],
)
def test_models_that_llama_cpp_would_run_otherwise_are_not_written(name, change, words, tmp_path):
    _, model = FAMILIES[name]
    model = dataclasses.replace(model, **change)
    with pytest.raises(UserError) as caught:
        write(tmp_path / "m.gguf", model)
    assert words in str(caught.value)
    assert not (tmp_path / "m.gguf").exists()


def test_numbers_that_f16_cannot_hold_are_refused(tmp_path):
    params = random_params(LLAMA)
    params["embed"]["tokens"] = params["embed"]["tokens"].at[3, 4].set(7e4)
    with pytest.raises(UserError, match=r"token_embd.weight has numbers past 65504.*BF16"):
        write(tmp_path / "m.gguf", LLAMA, params, "F16")
    write(tmp_path / "m.gguf", LLAMA, params, "BF16")
    with pytest.raises(UserError, match="'Q4_K' is not written; those that are: F32, F16, BF16, Q8_0"):
        write(tmp_path / "m.gguf", LLAMA, params, "Q4_K")


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_every_published_model_has_a_family_that_says_all_of_it(name):
    model = architectures.ARCHITECTURES[name]
    family = gguf_keys.choose(model)
    kin = {"smollm2": "llama", "mistral": "llama", "mixtral": "llama", "gpt3": "gpt2", "qwen2.5": "qwen2"}
    start = name.split("-")[0]
    expected = kin.get(start, "llama" if start.startswith("llama") else start)
    assert family == ("qwen3moe" if model.experts and start == "qwen3" else expected) or start.startswith("phi")


def test_bytes_and_a_chat_template_travel_along(tmp_path):
    model = dataclasses.replace(LLAMA, vocab_size=264)
    write(tmp_path / "m.gguf", model, tokenizer=ByteTokenizer(), chat_template="{{ messages }}", name="tiny")
    opened = gguf.open_file(tmp_path / "m.gguf")
    assert opened.chat_template == "{{ messages }}"
    text = "naïve\n\t日本 \x00 🔥"
    assert opened.tokenizer.encode(text).tolist() == list(text.encode())
    assert opened.tokenizer.decode(list(text.encode())) == text
    assert (opened.tokenizer.bos_id, opened.end_ids, opened.tokenizer.vocab_size) == (None, (256,), 264)
    with pytest.raises(UserError, match="the tokenizer has 257 ids and the model's vocab_size is 64"):
        write(tmp_path / "m.gguf", LLAMA, tokenizer=ByteTokenizer())


def test_metadata_of_the_published_names_is_read_without_a_model():
    """`describe` at the size of a 70B model, from shapes alone."""
    model = architectures.ARCHITECTURES["llama3.1-70b"]
    keys = gguf_keys.values(model, "llama") | {"general.architecture": "llama"}
    constants = rope.constants(model)
    shapes = {"token_embd.weight": (model.vocab_size, model.width), "output.weight": (), "rope_freqs.weight": (64,)}
    described = metadata.describe(gguf_file.Metadata(keys, "x"), shapes, constants.__getitem__)
    assert dataclasses.replace(described.model, init_std=model.init_std) == model
