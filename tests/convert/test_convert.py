"""Conversion command: every source and both formats; the output is complete or absent."""

import dataclasses
import json

import folders
import gguf_files
import gguf_models
import jax
import ml_dtypes
import numpy as np
import pytest
import runs
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from jaxllm.checkpoints import open_any
from jaxllm.interop import opening
from jaxllm.interop.gguf import file as gguf_file
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.huggingface.safetensors_files import INDEX
from jaxllm.interop.text import Text
from jaxllm.interop.tokenizer import ByteTokenizer

MODEL = folders.FAMILIES["llama"]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("to_convert")
    config = runs.tiny_config(runs.write_corpus(folder / "corpus"), train_steps=2)
    runs.train(config, folder / "run")
    return folder / "run"


def convert(source, kind, out, *more):
    return runs.command("jaxllm.convert", f"--model={source}", f"--to={kind}", f"--out={out}", *more)


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b))


def test_a_run_becomes_a_folder_and_a_file(workdir, tmp_path):
    """Every conversion there and back preserves the run's weights to the bit, and its tokenizer's ids."""
    run = open_any.open_any(str(workdir))
    weights = run.load(np.float32)
    folder, file, again = tmp_path / "folder", tmp_path / "model.gguf", tmp_path / "again"
    ways = [(workdir, "safetensors", folder, ()), (folder, "gguf", file, ("--quantization=F32",))]
    for source, kind, out, more in [*ways, (file, "safetensors", again, ())]:
        done = convert(source, kind, out, *more)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"wrote {out}\n")
        opened = open_any.open_any(str(out))
        assert same(opened.load(np.float32), weights), out
        text = "alpha, é\n🔥"
        assert opened.text.end_ids == (256,)
        assert opened.text.tokenizer.encode(text).tolist() == ByteTokenizer().encode(text).tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "folder", "model.gguf"]


def test_a_folder_keeps_its_dtype_its_family_and_its_tokenizer(tmp_path):
    model = folders.FAMILIES["phi3"]
    tree = folders.random_tree(model)
    folder = folders.write(tmp_path / "in", model, tree, "phi3")
    (folder / "tokenizer.json").write_text(ByteTokenizer().as_json_tokenizer().to_json())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    out = tmp_path / "out"
    assert convert(folder, "safetensors", out, "--shard_gib=1e-5").returncode == 0
    assert (out / INDEX).is_file()
    opened = opening.open_model(str(out))
    assert (opened.stored, opened.family, opened.text.chat_template) == (ml_dtypes.bfloat16, "phi3", "{{ messages }}")
    assert same(opened.load(ml_dtypes.bfloat16), tree)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    half = tmp_path / "half"
    assert convert(folder, "safetensors", half, "--dtype=float16").returncode == 0
    assert opening.open_model(str(half)).stored == np.float16
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "float16"


def tensors_of(path):
    """Returns name -> (type, bytes)."""
    file = gguf_file.open_tensors(path)
    return {
        name: (file.kind(name), bytes(e.shape) + h.data[e.start : e.start + e.nbytes])
        for name, (h, e) in (file._tensors.items())
    }


@pytest.mark.parametrize("quantization", ["F16", "Q8_0"])
def test_a_file_becomes_a_file_of_the_same_tensors(tmp_path, quantization):
    """A GGUF file converts to GGUF unchanged, with permuted rows, 1 + w and narrow rows; a flipped bit is detected."""
    model = dataclasses.replace(gguf_models.GEMMA if quantization == "F16" else gguf_models.LLAMA, qk_norm=False)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 + 0.25 if "scale" in jax.tree_util.keystr(path) else x, gguf_models.random_params(model)
    )
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    gguf.write(source, model, params, Text(chat_template="{{ messages }}"), quantization=quantization)
    done = convert(source, "gguf", out)
    assert done.returncode == 0, done.stderr
    assert tensors_of(out) == tensors_of(source)
    assert {kind for kind, _ in tensors_of(out).values()} >= {quantization, "F32"}
    names = [dict(gguf_file.open_tensors(path).metadata._values) for path in (source, out)]
    assert names[1].pop("general.name") == "out"
    assert names[0] == names[1]
    content = bytearray(source.read_bytes())
    content[-33] ^= 1
    source.write_bytes(content)
    assert tensors_of(out) != tensors_of(source)


@pytest.mark.parametrize(("dtype", "kind"), [(np.float16, "F16"), (ml_dtypes.bfloat16, "BF16"), (np.float32, "F32")])
def test_what_gguf_keeps_of_a_dtype_if_nothing_is_asked_for(dtype, kind, tmp_path):
    """The default GGUF type keeps the dtype to the bit, from either format; in process, as the command does it."""
    tree = folders.random_tree(MODEL, dtype)
    opened = opening.open_model(str(folders.write(tmp_path / "in", MODEL, tree, "llama", 5000)))
    assert gguf.lossless_quantization(opened) == kind
    gguf.write(tmp_path / "m.gguf", opened.model, opened.load(opened.stored), Text(), quantization=kind)
    again = opening.open_model(str(tmp_path / "m.gguf"))
    assert (again.quantization, gguf.lossless_quantization(again)) == (kind, kind)
    assert same(again.load(dtype), tree)


def test_blocks_that_are_not_written_are_kept_as_float32(tmp_path):
    """Q4_0 blocks are written as float32 because float16 cannot represent their values."""
    gguf.write(
        tmp_path / "in.gguf",
        gguf_models.LLAMA,
        gguf_models.random_params(gguf_models.LLAMA),
        Text(),
        quantization="F32",
    )
    name = "token_embd.weight"
    numbers = gguf_file.open_tensors(tmp_path / "in.gguf").read(name)
    blocks = quantize(numbers, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0
    path = gguf_files.rewritten(tmp_path / "in.gguf", tmp_path / "q4.gguf", tensors={name: blocks})
    opened = opening.open_model(str(path))
    assert (opened.quantization, gguf.lossless_quantization(opened)) == ("", "F32")
    wide = dequantize(*blocks)
    assert np.array_equal(opened.load(np.float32)["embed"]["tokens"], wide)
    assert not np.array_equal(wide.astype(np.float16).astype(np.float32), wide)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to=gguf", "--out=x"], "no --model given"),
        (["--model={folder}", "--to=gguf"], "no --out given"),
        (["--model={folder}", "--out=x"], "--to is None"),
        (["--model={folder}", "--to=onnx", "--out=x"], "--to is 'onnx'"),
        (["--model={folder}", "--to=gguf", "--out={folder}"], "already exists"),
        (["--model={folder}", "--to=gguf", "--out=x", "--quantization=Q3"], "--quantization is 'Q3'"),
        (["--model={folder}", "--to=safetensors", "--out=x", "--dtype=int8"], "--dtype is 'int8'"),
        (["--model={folder}", "--to=safetensors", "--out=x", "--shard_gib=0"], "--shard_gib is 0"),
        (["--model={folder}/nowhere", "--to=safetensors", "--out=x"], "not found"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, arguments, words):
    folder = folders.write(tmp_path / "in", MODEL, folders.random_tree(MODEL), "llama")
    done = runs.command("jaxllm.convert", *(argument.format(folder=folder) for argument in arguments))
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert words in line
    assert done.stdout == ""


def test_what_fails_leaves_nothing(tmp_path):
    """A failure to read weights during writing leaves no folder, complete or partial."""
    folder = folders.write(tmp_path / "in", MODEL, folders.random_tree(MODEL), "llama")
    code = f"""
from jaxllm import commandline
from jaxllm.convert import __main__ as convert
from jaxllm.errors import UserError
from jaxllm.interop import rules

save = rules.save

def fails(*arguments):
    for number, named in enumerate(save(*arguments)):
        if number == 3:
            raise UserError("planted")
        yield named

rules.save = fails
commandline.run(convert.main, ["x", "--model={folder}", "--to=safetensors", "--out={tmp_path}/out"])
"""
    done = runs.python(code)
    assert (done.returncode, done.stderr) == (2, "error: planted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_bytes_as_a_file():
    made, bytes_ = ByteTokenizer().as_json_tokenizer(), ByteTokenizer()
    text = "".join(map(chr, range(300))) + "🔥\r\n  x"
    ids = bytes_.encode(text).tolist()
    assert made.encode(text).tolist() == ids
    assert made.decode(ids) == text
    assert (made.vocab_size, made.end_ids, made.bos_id) == (257, (256,), None)
    assert made.encode("<|endoftext|>", special=True).tolist() == [256]
