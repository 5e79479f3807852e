"""Chat data for fine-tuning: conversations as documents of token ids, with the assistant's turns marked.

Each line of the JSON Lines files (plain, .gz or .zst) has one of these forms:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
    {"prompt": "…", "answer": "…"}        ("completion" or "response" also work for "answer")

Conversations are rendered with the model's chat template and tokenized (`jaxllm.data.turns`) when the source is
opened, so that invalid ones stop the run before its first step. The ids are stored in an unnamed temporary file (in
$TMPDIR) while the source is open.
"""

import array
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.data.documents import Documents, File
from jaxllm.data.records import json_lines
from jaxllm.data.turns import ASSISTANT, Message, Turns, encode
from jaxllm.errors import UserError
from jaxllm.interop.text import Text
from jaxllm.interop.tokenizer import JsonTokenizer

_ANSWER_FIELDS = ("answer", "completion", "response")
_EXPECTED = 'each line must be {"messages": [{"role": …, "content": …}, …]} or {"prompt": …, "answer": …}'


class Conversations(Documents):
    """Chat documents {"name", "tokens": int32 [n], "weights": bool [n], True for the assistant's tokens}.

    A conversation that is longer than a sequence is truncated on the right. One without any answer tokens left is
    dropped.

    Args:
      files: JSON Lines files.
      text: tokenizer and chat template of the trained model.
      sequence_length: maximum number of inputs; a document has at most one token more, its last target.
      vocab_size: vocabulary size of the model. The tokenizer may have more ids, such as image tokens.
    Raises:
      UserError: a line is invalid (names file:line and the problem), or no conversation has an answer left.
    """

    def __init__(self, files: Sequence[File], text: Text, sequence_length: int, vocab_size: int):
        self.files, self.length = files, sequence_length
        self._file_index, self._line = array.array("q"), array.array("q")
        self._start, self._count = array.array("q"), array.array("q")
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed, and so removed, with this object)
        seen = truncated = lost_answers = dropped = 0
        for n, file in enumerate(files):
            for number, line, record in json_lines(file):
                if not line.strip():
                    continue
                where = f"{file.path}:{number}"
                messages = _messages(record, where)
                try:
                    turns = encode(messages, text)
                except UserError as error:
                    raise UserError(f"{where}: {error}") from error
                _check_ids(turns.ids, vocab_size, text, where)
                (ids, answers), is_truncated, lost = _truncate(turns, sequence_length + 1)
                seen, truncated, lost_answers = seen + 1, truncated + is_truncated, lost_answers + lost
                if not answers[1:].any():
                    dropped += 1
                    continue
                self._file_index.append(n)
                self._line.append(number)
                self._start.append(self._spool.tell())
                self._count.append(len(ids))
                self._spool.write(np.where(answers, ~ids, ids).tobytes())  # ids of answers are stored as −1 − id
        self._spool.flush()  # before reads through the file descriptor
        if seen and seen == dropped:
            raise UserError(
                f"config.data.sequence_length ({sequence_length}) is too short to keep any answer in {files[0].path}; "
                "raise it"
            )
        where = ", ".join(file.path for file in files[:2]) + (", …" if len(files) > 2 else "")
        self.notes = _truncation_note(seen, truncated, lost_answers, dropped, sequence_length, where)

    def __len__(self) -> int:
        return len(self._line)

    def __getitem__(self, i: int) -> dict[str, Any]:
        # pread does not use the file position, which the reading threads share.
        stored = np.frombuffer(os.pread(self._spool.fileno(), 4 * self._count[i], self._start[i]), np.int32)
        return {"name": self.name(i), "tokens": np.where(stored < 0, ~stored, stored), "weights": stored < 0}

    def name(self, i: int) -> str:
        return f"{self.files[self._file_index[i]].name}:{self._line[i]}"


def _check_ids(ids: np.ndarray, vocab_size: int, text: Text, where: str) -> None:
    largest = int(ids.max(initial=0))
    if largest >= vocab_size:
        name = text.tokenizer.name_of(largest) if isinstance(text.tokenizer, JsonTokenizer) else None
        raise UserError(
            f"{where} has the token {name or '?'} with id {largest}, but the model's vocab_size is {vocab_size}; "
            "remove it from the conversation or the chat template"
        )


def _truncate(turns: Turns, limit: int) -> tuple[Turns, bool, int]:
    """Truncates a conversation after its last answer, and to `limit` tokens.

    Returns (remaining tokens, whether any token of an answer was removed, number of answers removed entirely).
    """
    end = int(np.flatnonzero(turns.answers)[-1:].sum()) + 1 if turns.answers.any() else 0
    ids, answers = turns.ids[: min(end, limit)], turns.answers[: min(end, limit)]
    lost_answers = int(turns.answers.max(initial=0)) - int(answers[1:].max(initial=0))
    kept = int(np.flatnonzero(answers)[-1:].sum()) + 1 if answers.any() else 0  # a trailing question has no targets
    return Turns(ids[:kept], answers[:kept]), end > limit, lost_answers


def _truncation_note(
    seen: int, truncated: int, lost_answers: int, dropped: int, length: int, where: str
) -> tuple[str, ...]:
    if not truncated and not dropped:
        return ()
    return (
        f"{truncated:,} of {seen:,} conversations in {where} are longer than config.data.sequence_length ({length:,}) "
        f"and were truncated; {lost_answers:,} answers were removed entirely, and {dropped:,} conversations had no "
        "answer left and were dropped",
    )


def _messages(record: Any, where: str) -> list[Message]:
    """Returns the validated messages of a line: {"role", "content"} of strings, at least one from the assistant.

    Raises:
      UserError: the line has another form; names `where`.
    """
    if not isinstance(record, dict):
        raise UserError(f"{where} is a {type(record).__name__}; {_EXPECTED}")
    if "messages" in record:
        messages = record["messages"]
    else:
        answer = next((name for name in _ANSWER_FIELDS if name in record), None)
        if "prompt" not in record or answer is None:
            raise UserError(f"{where} has the fields {', '.join(record) or '(none)'}; {_EXPECTED}")
        fields = (("user", "prompt"), (ASSISTANT, answer))
        messages = [{"role": role, "content": record[field]} for role, field in fields]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages must be a non-empty list; {_EXPECTED}")
    for i, message in enumerate(messages, 1):
        values = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(value, str) for value in values):
            raise UserError(f"{where}: message {i} needs a role and a content, both strings; {_EXPECTED}")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UserError(f"{where} has no message with role {ASSISTANT!r} to train on; remove the line")
    return messages
