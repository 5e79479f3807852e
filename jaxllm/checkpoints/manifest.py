"""Integrity manifest of a folder (file sizes and checksums), and durable writes."""

import json
import os
import pathlib
import zlib

MANIFEST = "manifest.json"
DAMAGED = ".damaged"


def fingerprints(folder: pathlib.Path, part: int = 0, parts: int = 1) -> dict[str, list[int]]:
    """Returns {relative path: [bytes, CRC-32]} for every `parts`-th file below `folder`, starting at `part`.

    With `part` and `parts`, the processes of a job divide the files among themselves.
    """
    return {str(path.relative_to(folder)): fingerprint(path) for path in _files_below(folder)[part::parts]}


def write(folder: pathlib.Path, files: dict[str, list[int]]) -> None:
    """Writes `files`, {relative path: [bytes, CRC-32]}, as the manifest of `folder`; durable when this returns."""
    _write_durably(folder / MANIFEST, json.dumps({"files": files}))


def _files_below(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns every file at any depth, except the manifest, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def fingerprint(path: pathlib.Path) -> list[int]:
    """Returns [bytes, CRC-32] of a file, after an fsync of it."""
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        os.fsync(file.fileno())
    return [size, crc]


def find_damage(path: pathlib.Path) -> str | None:
    """Checks a folder against its manifest; returns a description of the first damage, or None if it is intact."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return f"{MANIFEST} is missing or unreadable"
    for name, (size, crc) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        found_size, found_crc = fingerprint(file)
        if found_size != size:
            return f"{name} has {found_size} bytes instead of {size}"
        if found_crc != crc:
            return f"{name} is corrupt (CRC-32 differs)"
    return None


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Renames a damaged folder to free its name; returns the new path."""
    target, n = path.with_name(path.name + DAMAGED), 1
    while target.exists():
        n += 1
        target = path.with_name(f"{path.name}{DAMAGED}-{n}")
    return path.rename(target)


def _write_durably(path: pathlib.Path, text: str) -> None:
    """Writes a file; the file and its directory entry are durable when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def sync(folder: pathlib.Path) -> None:
    """Makes the entries of a folder durable; a rename is not durable until its folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
