"""Safetensors files: read as views, written one tensor at a time, and refused if incomplete."""

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxllm.errors import UserError
from jaxllm.interop.huggingface.safetensors_files import INDEX, SINGLE_FILE, open_tensors, write_checkpoint

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2, 2), "none": (0, 3)}
TENSORS = {name: np.random.default_rng(len(name)).standard_normal(shape) for name, shape in SHAPES.items()}


def made(folder, dtype=np.float32, shard_bytes=1 << 30):
    write_checkpoint(
        folder, SHAPES, np.dtype(dtype), ((name, x.astype(dtype)) for name, x in TENSORS.items()), shard_bytes
    )
    return folder


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shard_bytes", [1, 40, 1 << 30])
def test_what_is_written_is_read(tmp_path, dtype, shard_bytes):
    files = open_tensors(made(tmp_path, dtype, shard_bytes))
    assert (tmp_path / INDEX).is_file() == (shard_bytes < 1 << 30)
    assert files.entries.keys() == SHAPES.keys()
    assert files.dtype() == dtype
    for name, x in TENSORS.items():
        found = files.read(name)
        assert found.dtype == dtype
        assert np.array_equal(found.view(f"u{found.itemsize}"), x.astype(dtype).view(f"u{found.itemsize}"))


def test_the_formats_own_library_agrees(tmp_path):
    """The safetensors library reads files written by jaxllm, and the reverse."""
    made(tmp_path)
    with safetensors.safe_open(tmp_path / SINGLE_FILE, "np") as file:
        assert file.metadata() == {"format": "pt"}
        for name, x in TENSORS.items():
            assert np.array_equal(file.get_tensor(name), x.astype(np.float32))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    safetensors.numpy.save_file({name: x.astype(np.float16) for name, x in TENSORS.items()}, theirs / SINGLE_FILE)
    files = open_tensors(theirs)
    assert all(np.array_equal(files.read(name), x.astype(np.float16)) for name, x in TENSORS.items())


def by_hand(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("count", [2, 1 << 19])
def test_bfloat16_from_bytes(tmp_path, count):
    """Decodes bfloat16 without a float32 copy: 0x3F80 is 1 and 0xC040 is −3 (CASES E6), in small and large arrays."""
    data = np.tile(np.array([0x3F80, 0xC040], "<u2"), count // 2).tobytes()
    by_hand(tmp_path / SINGLE_FILE, {"x": {"dtype": "BF16", "shape": [count], "data_offsets": [0, len(data)]}}, data)
    tracemalloc.start()
    found = open_tensors(tmp_path).read("x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.dtype == ml_dtypes.bfloat16
    assert found[:2].astype(float).tolist() == [1.0, -3.0]
    assert found[-1] == -3.0
    assert peak < 200_000  # a view of the file


def test_a_file_cut_off_names_the_tensor(tmp_path):
    path = made(tmp_path) / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated: c ends at byte .* download it again"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("left", [0, 5, 8, 20])
def test_a_header_cut_off(tmp_path, left):
    path = made(tmp_path) / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UserError, match=r"model\.safetensors has a truncated header"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "x F32.3. has 8 bytes instead of 12"),
        ({"dtype": "F32", "shape": [2]}, "an invalid safetensors header"),
        ({"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}, "x has the unsupported dtype F8_E4M3"),
        ({"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, "x has the unsupported dtype I64"),
    ],
)
def test_entries_that_cannot_be(tmp_path, entry, words):
    by_hand(tmp_path / SINGLE_FILE, {"x": entry}, bytes(8))
    with pytest.raises(UserError, match=words):
        open_tensors(tmp_path).read("x")


def test_a_missing_shard_names_file_and_tensor(tmp_path):
    made(tmp_path, shard_bytes=40)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003\.safetensors not found.*1 tensors in it, including b"):
        open_tensors(tmp_path)


def test_a_stale_index_names_file_and_tensors(tmp_path):
    made(tmp_path, shard_bytes=40)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["gone"] = index["weight_map"].pop("b")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"00002.*: gone not found, although listed in .*; b not listed in"):
        open_tensors(tmp_path)


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"no model\.safetensors.*it has pytorch_model\.bin"):
        open_tensors(tmp_path)


def test_an_index_that_is_none(tmp_path):
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(UserError, match="is not a valid index"):
        open_tensors(tmp_path)
