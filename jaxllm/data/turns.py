"""Tokenizes a conversation and marks the tokens of the assistant's turns.

With a chat template, the text rendered from the whole conversation is tokenized as in a chat: names of special tokens
become those tokens, and there is exactly one begin token if the tokenizer has one. An answer is the text that the
template adds when its message is appended, up to and including the token that ends the turn. A token that straddles
the start of an answer belongs to the answer.

Without a chat template, messages are concatenated without a separator, and an end token follows each assistant turn:

    [begin] prompt answer [end] prompt answer [end]
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxllm.errors import UserError
from jaxllm.interop import chat
from jaxllm.interop.text import Text
from jaxllm.interop.tokenizer import Tokenizer

Message = Mapping[str, str]  # {"role", "content"}
ASSISTANT = "assistant"

# Templates that print the date always get this one, so that a resumed run reads the same ids. It is the default date
# of the Llama 3.1 template.
_TODAY = {"strftime_now": lambda form: "26 Jul 2024"}


class Turns(NamedTuple):
    """Tokenized conversation.

    Attributes:
      ids: token ids of the whole conversation.
      answers: number of the assistant turn that each token belongs to, from 1; 0 outside the assistant's turns.
    """

    ids: Int32[np.ndarray, " n"]
    answers: Int32[np.ndarray, " n"]


def encode(messages: Sequence[Message], text: Text) -> Turns:
    """Tokenizes a conversation between user, assistant and possibly other roles.

    Raises:
      UserError: the chat template rejects it, or renders it so that the bounds of an answer are ambiguous.
    """
    assert text.tokenizer is not None
    if text.chat_template is None:
        return _encode_without_template(messages, text.tokenizer)
    return _encode_with_template(messages, text, text.tokenizer, text.chat_template)


def _encode_with_template(messages: Sequence[Message], text: Text, tokenizer: Tokenizer, template: str) -> Turns:
    values: dict[str, Any] = {**text.special, **_TODAY}

    def render(count: int, add_generation_prompt: bool) -> str:
        return chat.render(messages[:count], template, values, add_generation_prompt=add_generation_prompt)

    full_text = render(len(messages), False)
    ids, spans = tokenizer.encode_with_spans(full_text, special=True)
    ids, spans = _with_one_begin(ids, spans, tokenizer.bos_id)
    ends = np.isin(ids, text.turn_ends)
    answers = np.zeros(len(ids), np.int32)
    for i, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = render(i, True), render(i + 1, False)
        if not full_text.startswith(before):
            raise UserError(
                f"the chat template renders the text before message {i + 1} differently once that message is added, so "
                "the answer cannot be located; use another template, or conversations with one answer each"
            )
        is_answer = spans[:, 1] > len(before)
        if full_text.startswith(after):
            is_answer &= spans[:, 0] < len(after)
            last = np.flatnonzero(is_answer & ends)[-1:]
        else:  # the template renders earlier turns differently, as those that drop reasoning do
            last = np.flatnonzero(is_answer & ends)[:1]
            if not last.size:
                raise UserError(
                    f"the chat template renders message {i + 1} differently once others follow, and no end token marks "
                    "where it ends; use another template, or conversations with one answer each"
                )
        is_answer[last[0] + 1 if last.size else len(ids) :] = False  # text after the end token is not generated
        answers[is_answer & (answers == 0)] = 1 + answers.max()
    return Turns(ids, answers)


def _with_one_begin(
    ids: Int32[np.ndarray, " n"], spans: Int32[np.ndarray, "n 2"], begin: int | None
) -> tuple[Int32[np.ndarray, " m"], Int32[np.ndarray, "m 2"]]:
    """Replaces any leading begin tokens by exactly one, as `chat.ChatTokenizer` does; no change if `begin` is None."""
    if begin is None:
        return ids, spans
    first = next((i for i, token in enumerate(ids) if token != begin), len(ids))
    return (
        np.concatenate([np.array([begin], np.int32), ids[first:]]),
        np.concatenate([np.zeros((1, 2), np.int32), spans[first:]]),
    )


def _encode_without_template(messages: Sequence[Message], tokenizer: Tokenizer) -> Turns:
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids, answers = [np.array(begin, np.int32)], [np.zeros(len(begin), np.int32)]
    asked, count = "", 0
    for message in messages:
        if message["role"] != ASSISTANT:
            asked += message["content"]
            continue
        count += 1
        pieces, is_answer = _question_and_answer(asked, message["content"], tokenizer)
        ids += [pieces, np.array(tokenizer.end_ids[:1], np.int32)]
        answers += [count * is_answer, np.full(len(tokenizer.end_ids[:1]), count, np.int32)]
        asked = ""
    return Turns(np.concatenate(ids), np.concatenate(answers).astype(np.int32))


def _question_and_answer(
    question: str, answer: str, tokenizer: Tokenizer
) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """Returns (ids, 1 for each token of the answer and 0 otherwise).

    Question and answer are tokenized separately, as a prompt is before the model continues it.
    """
    if tokenizer.drops_leading_space:  # tokenized separately, the answer would begin with a spurious space
        ids, spans = tokenizer.encode_with_spans(question + answer)
        return ids, (spans[:, 1] > len(question)).astype(np.int32)
    parts = tokenizer.encode(question), tokenizer.encode(answer)
    return np.concatenate(parts), np.repeat(np.array([0, 1], np.int32), [len(part) for part in parts])
