"""One conversation as ids, and which of them are the assistant's.

With a chat template, the ids are those of the whole text that the template makes, read as the model reads it in a
chat: names of special tokens stand for these, and there is one begin token, if there is any. The assistant's are the
ids of what the template adds to the text when the answer is there, up to and with the token that ends the turn; one
that reaches over from what stands before is the assistant's too.

Without one, what is said is put end to end with nothing between, and the end token after each of the assistant's turns:

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

# Templates that write the day are told the same one each time, so that a run reads the same ids whenever it goes on:
# the day that the template of Llama 3.1 takes where it is told none.
_TODAY = {"strftime_now": lambda form: "26 Jul 2024"}


class Turns(NamedTuple):
    """Attributes:
    ids: of the whole conversation.
    answers: of each id the assistant's turn that it belongs to, from 1; 0 where it belongs to none.
    """

    ids: Int32[np.ndarray, " n"]
    answers: Int32[np.ndarray, " n"]


def encode(messages: Sequence[Message], text: Text) -> Turns:
    """A conversation of user, assistant and perhaps others.

    Raises:
      UserError: the template refuses it, or writes it in a way that does not tell where an answer begins and ends.
    """
    if text.chat_template is None:
        return _joined(messages, text.tokenizer)
    return _templated(messages, text, text.chat_template)


def _templated(messages: Sequence[Message], text: Text, template: str) -> Turns:
    values: dict[str, Any] = {**text.special, **_TODAY}

    def render(count: int, begun: bool) -> str:
        return chat.render(messages[:count], template, values, add_generation_prompt=begun)

    whole = render(len(messages), False)
    ids, spans = text.tokenizer.encode_with_spans(whole, special=True)
    ids, spans = _with_one_begin(ids, spans, text.tokenizer.bos_id)
    ends = np.isin(ids, text.turn_ends)
    answers = np.zeros(len(ids), np.int32)
    for i, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = render(i, True), render(i + 1, False)
        if not whole.startswith(before):
            raise UserError(
                f"the chat template writes what stands before message {i + 1} otherwise once that is there, so that "
                "the answer cannot be told apart; use another template, or give the answer alone in a conversation"
            )
        mine = spans[:, 1] > len(before)
        if whole.startswith(after):
            mine &= spans[:, 0] < len(after)
            last = np.flatnonzero(mine & ends)[-1:]
        else:  # the template writes a turn otherwise once others follow, as those do that drop old thoughts
            last = np.flatnonzero(mine & ends)[:1]
            if not last.size:
                raise UserError(
                    f"the chat template writes message {i + 1} otherwise once others follow, and no end token tells "
                    "where it ends; use another template, or give its answer alone in a conversation"
                )
        mine[last[0] + 1 if last.size else len(ids) :] = False  # what follows the end is the template's, never said
        answers[mine & (answers == 0)] = 1 + answers.max()
    return Turns(ids, answers)


def _with_one_begin(
    ids: Int32[np.ndarray, " n"], spans: Int32[np.ndarray, "n 2"], begin: int | None
) -> tuple[Int32[np.ndarray, " m"], Int32[np.ndarray, "m 2"]]:
    """What `chat.ChatTokenizer` makes of them."""
    if begin is None:
        return ids, spans
    first = next((i for i, token in enumerate(ids) if token != begin), len(ids))
    return (
        np.concatenate([np.array([begin], np.int32), ids[first:]]),
        np.concatenate([np.zeros((1, 2), np.int32), spans[first:]]),
    )


def _joined(messages: Sequence[Message], tokenizer: Tokenizer) -> Turns:
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids, answers = [np.array(begin, np.int32)], [np.zeros(len(begin), np.int32)]
    asked, count = "", 0
    for message in messages:
        if message["role"] != ASSISTANT:
            asked += message["content"]
            continue
        count += 1
        pieces, mine = _question_and_answer(asked, message["content"], tokenizer)
        ids += [pieces, np.array(tokenizer.end_ids[:1], np.int32)]
        answers += [count * mine, np.full(len(tokenizer.end_ids[:1]), count, np.int32)]
        asked = ""
    return Turns(np.concatenate(ids), np.concatenate(answers).astype(np.int32))


def _question_and_answer(
    question: str, answer: str, tokenizer: Tokenizer
) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """(ids, 1 where they are the answer's). Read apart, as a prompt is before the model goes on from it."""
    if tokenizer.drops_leading_space:  # read apart, the answer would begin with a space that is not there
        ids, spans = tokenizer.encode_with_spans(question + answer)
        return ids, (spans[:, 1] > len(question)).astype(np.int32)
    parts = tokenizer.encode(question), tokenizer.encode(answer)
    return np.concatenate(parts), np.repeat(np.array([0, 1], np.int32), [len(part) for part in parts])
