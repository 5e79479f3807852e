"""GGUF files of small random models: written by jaxllm, and modified by the `gguf` package alone."""

import gguf_models
import jax
import numpy as np
from gguf import GGUFWriter

from jaxllm.interop.gguf import file as gguf_file
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.text import Text


def write(path, model, params=None, quantization="F32", tokenizer=None, chat_template=None, **changes):
    params = gguf_models.random_params(model) if params is None else params
    gguf.write(path, model, params, Text(tokenizer, chat_template), quantization=quantization, **changes)
    return params


def rewritten(source, path, keys=None, tensors=None, arch=None):
    """Copies a GGUF file with changed keys (None removes a key) and tensors, using the `gguf` package alone."""
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


def write_plain(folder):
    write(folder / "plain.gguf", gguf_models.LLAMA)
    return folder / "plain.gguf"
