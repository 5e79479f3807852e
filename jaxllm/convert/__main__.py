"""Converts a model: python -m jaxllm.convert --model MODEL --to safetensors|gguf|peft --out PATH

MODEL is the workdir of a training run, a Hugging Face folder, a .gguf file, or a Hugging Face hub id. The output is a
folder that transformers loads, or a file that llama.cpp loads, with the tokenizer; it is complete or not written at
all. Weights keep their dtype, and so every bit, unless --dtype or --quantization is given. Weights in block formats
that cannot be written (Q4_K) count as float32.

Low-rank adapters of a training run are merged into its weights. With --to peft only the adapters are written, as a
folder that the PEFT library loads on top of the model that the run started from.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable

import jax
import ml_dtypes
import numpy as np
from absl import flags

from jaxllm import commandline
from jaxllm.checkpoints import open_any
from jaxllm.errors import UserError
from jaxllm.interop import peft
from jaxllm.interop import text as texts
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.huggingface import model as huggingface
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.tokenizer import ByteTokenizer, JsonTokenizer

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_KINDS = ("safetensors", "gguf", "peft")

_MODEL = flags.DEFINE_string("model", None, "Workdir, Hugging Face folder, .gguf file, or id of the hub.")
_TO = flags.DEFINE_string("to", None, "safetensors, gguf or peft.")
_OUT = flags.DEFINE_string("out", None, "Folder or file to write; it must not exist yet.")
_DTYPE = flags.DEFINE_string(
    "dtype", None, "Dtype of safetensors: float32, bfloat16 or float16; default: that of the model."
)
_QUANTIZATION = flags.DEFINE_string(
    "quantization", None, f"GGUF quantization: {', '.join(gguf.QUANTIZATIONS)}; default: the dtype of the model."
)
_SHARD_GIB = flags.DEFINE_float("shard_gib", 5.0, "Maximum GiB per safetensors file.")


def main() -> None:
    spec, kind, out = _MODEL.value, _TO.value, _OUT.value
    if not spec or not out:
        raise UserError(f"no --{'out' if spec else 'model'} given; for example --model runs/quickstart --out exported")
    if kind not in _KINDS:
        raise UserError(f"--to is {kind!r}; it must be one of {', '.join(_KINDS)}")
    if _DTYPE.value not in (None, *_DTYPES):
        raise UserError(f"--dtype is {_DTYPE.value!r}; it must be one of {', '.join(_DTYPES)}")
    if _QUANTIZATION.value not in (None, *gguf.QUANTIZATIONS):
        raise UserError(f"--quantization is {_QUANTIZATION.value!r}; it must be one of {', '.join(gguf.QUANTIZATIONS)}")
    if not _SHARD_GIB.value > 0:
        raise UserError(f"--shard_gib is {_SHARD_GIB.value}; it must be positive")
    target = pathlib.Path(out).expanduser()
    if target.exists():
        raise UserError(f"--out {out} already exists; give another path, or remove it")
    jax.config.update("jax_platforms", "cpu")  # no matmuls here, and weights may not fit in an accelerator
    write = _writer(spec, kind, target.stem)
    staging = target.with_name(f".writing-{target.name}")
    _remove(staging)  # left over from a killed run
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(staging)
        staging.rename(target)
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written ({error.strerror or error}); free disk space, or give another path"
        ) from error
    finally:
        _remove(staging)
    print(f"wrote {target}")


def _writer(spec: str, kind: str, name: str) -> Callable[[pathlib.Path], None]:
    """Opens the model, without reading its weights, and returns the function that writes it to a path."""
    if kind == "peft":
        run = open_any.open_adapters(pathlib.Path(spec).expanduser())

        def write_adapters(folder: pathlib.Path) -> None:
            folder.mkdir()
            peft.export(folder, run.model, run.lora, run.load(), run.base)

        return write_adapters
    opened = open_any.open_any(spec)
    if kind == "gguf":
        return lambda path: _write_gguf(opened, path, name)

    def write_folder(folder: pathlib.Path) -> None:
        folder.mkdir()
        _write_folder(opened, folder)

    return write_folder


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_gguf(opened: Pretrained, path: pathlib.Path, name: str) -> None:
    if opened.text.tokenizer is None:
        print(f"{opened.source} has no tokenizer: the file is written without one")
    gguf.write(
        path,
        opened.model,
        opened.load(opened.stored),
        opened.text,
        quantization=_QUANTIZATION.value or gguf.lossless_quantization(opened),
        name=name,
    )


def _write_folder(opened: Pretrained, folder: pathlib.Path) -> None:
    dtype = np.dtype(_DTYPES[_DTYPE.value]) if _DTYPE.value else opened.stored
    text = opened.text
    if isinstance(text.tokenizer, ByteTokenizer):
        text = dataclasses.replace(text, tokenizer=text.tokenizer.as_json_tokenizer())
    if opened.tokenizer_files:
        for file in opened.tokenizer_files:
            shutil.copyfile(file, folder / file.name)
    elif isinstance(text.tokenizer, JsonTokenizer):
        texts.save(text, folder)
    elif text.tokenizer is None:
        print(f"{opened.source} has no tokenizer: the folder is written without one")
    else:
        print(f"a {type(text.tokenizer).__name__} has no tokenizer.json form: the folder is written without one")
    huggingface.export(
        folder,
        opened.model,
        opened.load(dtype),
        dtype,
        shard_bytes=int(_SHARD_GIB.value * 2**30),
        family=opened.family,
        text=text,
    )


if __name__ == "__main__":
    commandline.run(main)
