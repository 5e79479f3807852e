"""Data sources: what each reads, how it is divided into training and validation, and every error in the data."""

import dataclasses
import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from jaxllm.config import DataConfig
from jaxllm.data import documents as documents_lib
from jaxllm.data import sources
from jaxllm.errors import UserError


def data(source, path, **fields):
    return DataConfig(source=source, path=str(path), **fields)


def everything(config, vocab_size=257):
    """Returns all documents of both parts by name."""
    parts = sources.split(config, vocab_size)
    documents = [part[i] for part in parts for i in range(len(part))]
    assert [part.name(i) for part in parts for i in range(len(part))] == [d["name"] for d in documents]
    assert len({d["name"] for d in documents}) == len(documents)
    return {d["name"]: d["text"] if "text" in d else d["tokens"] for d in documents}


def message(config, vocab_size=257):
    """Returns the one-line error message for a configuration."""
    with pytest.raises(UserError) as caught:
        sources.split(config, vocab_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_lines(path, records, opener=open):
    with opener(path, "wb") as handle:
        handle.write("".join(json.dumps(record) + "\n" for record in records).encode())
    return path


def test_python_library():
    one, two = documents_lib.PythonLibrary(), documents_lib.PythonLibrary()
    names = [one.name(i) for i in range(len(one))]
    assert names == sorted(names)
    assert names == [two.name(i) for i in range(len(two))]
    assert "json/decoder.py" in names
    assert not {"test", "tests", "site-packages", "dist-packages", "idle_test"} & {
        p for n in names for p in n.split("/")
    }
    assert "class JSONDecoder" in one[names.index("json/decoder.py")]["text"]
    assert all(os.path.getsize(file.path) for file in one.files)


def test_python_library_leaves_out_what_is_not_text(tmp_path, monkeypatch):
    for name, content in {
        "a.py": b"x = 1\n",
        "bad.py": b"# \xff\n",
        "empty.py": b"",
        "test/t.py": b"t",
        "b/c.py": b"y\r\n",
        "b/c.txt": b"z",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(documents_lib.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    found = documents_lib.PythonLibrary()
    assert [found[i] for i in range(len(found))] == [
        {"name": "a.py", "text": "x = 1\n"},
        {"name": "b/c.py", "text": "y\r\n"},
    ]


def test_lone_text_file_is_cut_at_lines_without_loss(tmp_path):
    text = "".join(f"line {n} 日本 é\n" for n in range(400)) + "x" * 3000 + "é" * 3000
    (tmp_path / "a.txt").write_bytes(text.encode())
    documents = everything(data("text", tmp_path / "a.txt", validation_fraction=0.2))
    offsets = sorted(documents, key=lambda name: int(name.split(":")[1]))
    assert offsets[0] == "a.txt:0"
    assert "".join(documents[name] for name in offsets) == text
    assert len(offsets) >= documents_lib.SINGLE_FILE_DOCUMENTS
    assert documents[offsets[0]].endswith("\n")
    parts = sources.split(data("text", tmp_path / "a.txt", validation_fraction=0.2), 257)
    assert 0 < len(parts.validation) < len(parts.training)


def test_a_long_line_is_cut_between_characters(tmp_path):
    text = "a" + "日" * 10_000
    (tmp_path / "a.txt").write_bytes(text.encode())
    documents = everything(data("text", tmp_path / "a.txt"))
    assert len(documents) >= documents_lib.SINGLE_FILE_DOCUMENTS
    assert "".join(documents[name] for name in sorted(documents, key=lambda name: int(name.split(":")[1]))) == text


def test_several_text_files_are_held_out_whole_and_pieces_are_bounded(tmp_path):
    line = "0123456789" * 10 + "\n"
    for n in range(6):
        (tmp_path / "sub").mkdir(exist_ok=True)
        (tmp_path / "sub" / f"{n}.txt").write_text(line * 2000)
    config = data("text", tmp_path / "**" / "*.txt", validation_fraction=0.4)
    train, held = sources.split(config, 257)
    files = [{part.name(i).split(":")[0] for i in range(len(part))} for part in (train, held)]
    assert files[0] | files[1] == {f"sub/{n}.txt" for n in range(6)}
    assert not files[0] & files[1]
    sizes = [len(text) for text in everything(config).values()]
    assert max(sizes) <= documents_lib.MAX_DOCUMENT_BYTES
    assert max(sizes) > documents_lib.MAX_DOCUMENT_BYTES - len(line)
    assert all(size % len(line) == 0 for size in sizes)


@pytest.mark.parametrize(
    ("suffix", "opener"), [("", open), (".gz", gzip.open), (".zst", zstandard.open)], ids=["plain", "gz", "zst"]
)
def test_jsonl(tmp_path, suffix, opener):
    records = [{"text": f"row {n} é"} for n in range(30)]
    records[4]["text"] = ""  # skipped
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl{suffix}", records, opener)
    documents = everything(data("jsonl", tmp_path / f"*.jsonl{suffix}"))
    assert len(documents) == 58
    assert documents[f"a.jsonl{suffix}:1"] == "row 0 é"
    assert documents[f"b.jsonl{suffix}:30"] == "row 29 é"
    assert f"a.jsonl{suffix}:5" not in documents


def test_jsonl_field_blank_lines_and_no_last_newline(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "three"}\n{"body": "four"}')
    documents = everything(data("jsonl", tmp_path / "a.jsonl", text_field="body"))
    assert documents == {"a.jsonl:1": "one", "a.jsonl:3": "three", "a.jsonl:4": "four"}


def test_parquet(tmp_path):
    table = pyarrow.table({"body": [f"row {n} é" for n in range(50)], "other": list(range(50))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    documents = everything(data("parquet", tmp_path / "a.parquet", text_field="body"))
    assert documents == {f"a.parquet:{n}": f"row {n} é" for n in range(50)}


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_windows_hold_every_target_once(tmp_path, dtype):
    tokens = np.arange(101, dtype=dtype)
    tokens.tofile(tmp_path / "a.bin")
    tokens[:40].tofile(tmp_path / "b.bin")
    windows = everything(data("tokens", tmp_path / "*.bin", sequence_length=16, token_dtype=dtype))
    assert list(windows["a.bin:1"]) == list(range(16, 33))
    assert windows["a.bin:1"].dtype == np.int32
    targets = sorted(int(t) for name, window in windows.items() if name.startswith("a") for t in window[1:])
    assert targets == list(range(1, 101))
    assert sum(len(window) - 1 for window in windows.values()) == 100 + 39


HELD = [f"a.jsonl:{line}" for line in (6, 7, 13, 16, 29, 42, 52, 65, 87, 89, 92, 113, 152, 172)]


def test_the_same_documents_are_held_out_on_every_machine(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": str(n)} for n in range(200)])
    config = data("jsonl", tmp_path / "a.jsonl", validation_fraction=0.05)
    held = sources.split(config, 257).validation
    assert [held.name(i) for i in range(len(held))] == HELD
    program = (
        "import sys; from jaxllm.config import DataConfig; from jaxllm.data import sources\n"
        "held = sources.split(DataConfig(source='jsonl', path=sys.argv[1]), 257).validation\n"
        "print([held.name(i) for i in range(len(held))])"
    )
    for seed in ("1", "2"):
        command = [sys.executable, "-c", program, str(tmp_path / "a.jsonl")]
        again = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert again.stdout.strip() == str(HELD)


def test_too_few_for_the_hash_still_hold_one_out(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    train, held = sources.split(data("jsonl", tmp_path / "a.jsonl", validation_fraction=1e-9), 257)
    assert (len(train), len(held)) == (1, 1)


def test_validation_path_is_used_whole_and_taken_out_of_training(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "one"}])
    write_lines(tmp_path / "val.jsonl", [{"text": "two"}])
    config = data("jsonl", tmp_path / "*.jsonl", validation_path=str(tmp_path / "val.jsonl"))
    train, held = sources.split(config, 257)
    assert [train[i]["text"] for i in range(len(train))] == ["one"]
    assert [held[i]["text"] for i in range(len(held))] == ["two"]
    alone = dataclasses.replace(config, path=config.validation_path)
    assert "no documents left for training" in message(alone)


def test_error_no_match_and_empty(tmp_path):
    assert "matches no file; check the path" in message(data("text", tmp_path / "*.txt"))
    assert "it is a folder, use" in message(data("text", tmp_path))
    (tmp_path / "a.txt").write_text("x\n" * 300)
    assert "config.data.validation_path" in message(data("text", tmp_path / "a.txt", validation_path="nowhere/*"))
    (tmp_path / "b.txt").write_text("")
    assert "b.txt is empty" in message(data("text", tmp_path / "*.txt"))


@pytest.mark.parametrize("before", [0, 10, documents_lib.CHECK_CHUNK - 1, documents_lib.CHECK_CHUNK + 5])
def test_error_text_not_utf8_names_the_byte(tmp_path, before):
    (tmp_path / "a.txt").write_bytes(b"a" * before + b"\xe6\x97" + b"tail")
    assert f"a.txt is not UTF-8 at byte {before} " in message(data("text", tmp_path / "a.txt"))


def test_error_text_that_ends_inside_a_character(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xe6\x97")
    assert "a.txt is not UTF-8 at byte 3 " in message(data("text", tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{broken", "a.jsonl:2 is not JSON"),
        (b'{"body": "x"}', "a.jsonl:2 has no field 'text' (it has body); set config.data.text_field"),
        (b"[1]", "a.jsonl:2 has no field 'text' (it is a list, not an object)"),
        (b'{"text": 3}', "a.jsonl:2 has 'text' of type int, not a string"),
        (b'{"text": "\xff"}', "a.jsonl:2 is not UTF-8 at byte 10"),
        (b'{"text": "\\ud800"}', "a.jsonl:2 has an unpaired surrogate at character 0"),
    ],
)
def test_error_jsonl(tmp_path, line, said):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    assert said in message(data("jsonl", tmp_path / "a.jsonl"))


def test_error_damaged_files(tmp_path):
    whole = gzip.compress(b'{"text": "fine"}\n' * 99)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
    assert "a.jsonl.gz cannot be read" in message(data("jsonl", tmp_path / "a.jsonl.gz"))
    (tmp_path / "a.jsonl.zst").write_bytes(b"no such thing")
    assert "a.jsonl.zst cannot be read" in message(data("jsonl", tmp_path / "a.jsonl.zst"))
    (tmp_path / "a.parquet").write_bytes(b"no such thing")
    assert "a.parquet is not a Parquet file" in message(data("parquet", tmp_path / "a.parquet"))


def test_error_parquet_column(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    said = message(data("parquet", tmp_path / "a.parquet"))
    assert "a.parquet has no column 'text' (it has body, n); set config.data.text_field" in said
    assert "a.parquet:0 has 'n' of type int" in message(data("parquet", tmp_path / "a.parquet", text_field="n"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "a.parquet")
    assert "a.parquet:1 has 'text' of type null" in message(data("parquet", tmp_path / "a.parquet"))


def test_error_tokens(tmp_path):
    tokens = np.zeros(5000, np.uint16)
    tokens[4321] = 300
    tokens.tofile(tmp_path / "a.bin")
    said = message(data("tokens", tmp_path / "a.bin"))
    assert "a.bin has token 300 at index 4321, outside the vocabulary of 257" in said
    assert sources.split(data("tokens", tmp_path / "a.bin"), 301).training
    (tmp_path / "a.bin").write_bytes(b"123")
    assert "a.bin has 3 bytes, not a multiple of 2" in message(data("tokens", tmp_path / "a.bin"))
    assert "config.data.token_dtype is 'float32'" in message(data("tokens", tmp_path / "a.bin", token_dtype="float32"))
    np.zeros(100, np.uint16).tofile(tmp_path / "a.bin")
    said = message(data("tokens", tmp_path / "a.bin", sequence_length=100))
    assert "config.data.sequence_length (100) is longer than the data (99 tokens" in said


def test_error_nothing_left(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "one"}])
    said = message(data("jsonl", tmp_path / "a.jsonl"))
    assert "no documents left for validation; set config.data.validation_path" in said
    write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    said = message(data("jsonl", tmp_path / "a.jsonl", validation_fraction=0.9999999))
    assert "no documents left for training; lower config.data.validation_fraction" in said
    write_lines(tmp_path / "val.jsonl", [{"text": ""}])
    said = message(data("jsonl", tmp_path / "a.jsonl", validation_path=str(tmp_path / "val.jsonl")))
    assert "no documents left for validation" in said
    said = message(DataConfig(source="python", validation_path="x"))
    assert "leave it empty" in said
