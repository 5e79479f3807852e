"""Opens the configured corpus and splits it into training and validation documents.

A document is held out if a hash of its name is below config.data.validation_fraction. With several files, the text
source hashes the file name instead, so that no file is in both parts.
"""

import glob
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.config import DataConfig
from jaxllm.data.conversations import Conversations
from jaxllm.data.documents import Documents, File, PythonLibrary, Subset, TextFiles, TokenFiles
from jaxllm.data.records import Rows
from jaxllm.errors import UserError
from jaxllm.interop import text as texts
from jaxllm.interop.text import Text


def find_files(pattern: str, field: str = "path") -> list[File]:
    """Returns the files that match a path or glob (`**` descends into folders), sorted by name.

    Args:
      pattern: path or glob as the user wrote it.
      field: configuration field that contains it, for messages.
    Raises:
      UserError: no file matches, or a file is empty.
    """
    pattern = os.path.expanduser(pattern)
    paths = (
        [pattern] if os.path.isfile(pattern) else [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]
    )
    if not paths:
        hint = f"it is a folder, use {os.path.join(pattern, '*')}" if os.path.isdir(pattern) else "check the path"
        raise UserError(f"config.data.{field} {pattern!r} matches no file; {hint}")
    root = os.path.dirname(pattern if pattern in paths else pattern.split("*")[0].split("?")[0].split("[")[0])
    for path in paths:
        if not os.path.getsize(path):
            raise UserError(f"{path} is empty; remove it, or narrow config.data.{field}")
    return sorted(File(pathlib.Path(os.path.relpath(path, root or ".")).as_posix(), path) for path in paths)


def open_documents(config: DataConfig, files: Sequence[File], vocab_size: int, text: Text | None = None) -> Documents:
    """Opens `files` with the source that `config.source` names; the python source ignores them.

    Args:
      config: data configuration.
      files: the files to read.
      vocab_size: vocabulary size of the model; ids must be below it.
      text: tokenizer and chat template for the chat source; loaded from `config.tokenizer` if None.
    """
    if config.source == "python":
        return PythonLibrary()
    if config.source == "text":
        return TextFiles(files)
    if config.source == "tokens":
        return TokenFiles(files, config, vocab_size)
    if config.source == "chat":
        text = text or texts.load(config.tokenizer, vocab_size)
        return Conversations(files, text, config.sequence_length, vocab_size)
    return Rows(files, config.text_field, parquet=config.source == "parquet")


class Split(NamedTuple):
    training: Documents
    validation: Documents

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the log about the data that was read, without duplicates."""
        return tuple(dict.fromkeys((*self.training.notes, *self.validation.notes)))


def split(config: DataConfig, vocab_size: int, text: Text | None = None) -> Split:
    """Opens the corpus and splits it into training and validation documents.

    Args:
      config: data configuration.
      vocab_size: vocabulary size of the model; ids must be below it.
      text: tokenizer and chat template for the chat source; loaded from `config.tokenizer` if None.
    Raises:
      UserError: a file is not usable, or one of the parts has no documents.
    """
    if config.source == "python":
        if config.validation_path:
            raise UserError("config.data.validation_path is unused if config.data.source is 'python'; leave it empty")
        return _split_by_hash(open_documents(config, (), vocab_size), config)
    files = find_files(config.path)
    if not config.validation_path:
        return _split_by_hash(open_documents(config, files, vocab_size, text), config)
    validation_files = find_files(config.validation_path, "validation_path")
    real = {os.path.realpath(file.path) for file in validation_files}
    files = [file for file in files if os.path.realpath(file.path) not in real]  # a glob may match both
    if not files:
        raise UserError(
            "no documents left for training: config.data.validation_path matches every file of config.data.path; "
            "narrow it"
        )
    parts = (open_documents(config, part, vocab_size, text) for part in (files, validation_files))
    return _check_nonempty(Split(*parts))


def _split_by_hash(documents: Documents, config: DataConfig) -> Split:
    scores: dict[str, float] = {}
    groups = [documents.group(i) for i in range(len(documents))]
    for group in groups:
        if group not in scores:
            digest = hashlib.blake2b(group.encode("utf-8", "surrogateescape"), digest_size=8).digest()
            scores[group] = int.from_bytes(digest, "big") / 2**64
    held_out = {group for group, score in scores.items() if score < config.validation_fraction}
    if not held_out and len(scores) > 1:
        held_out = {min(scores, key=lambda group: scores[group])}
    if len(scores) == 1:
        raise UserError(
            f"{groups[0]} is the only document: no documents left for validation; set config.data.validation_path"
        )
    training = [i for i, group in enumerate(groups) if group not in held_out]
    validation = [i for i, group in enumerate(groups) if group in held_out]
    return _check_nonempty(Split(Subset(documents, training), Subset(documents, validation)))


def _check_nonempty(parts: Split) -> Split:
    if not len(parts.training):
        raise UserError(
            "no documents left for training; lower config.data.validation_fraction, or add files to config.data.path"
        )
    if not len(parts.validation):
        raise UserError(
            "no documents left for validation; set config.data.validation_path to a file that contains text"
        )
    return parts
