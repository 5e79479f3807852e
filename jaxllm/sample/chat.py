"""Chat of `python -m jaxllm.sample --chat`, with turns from --prompt, a terminal or piped lines.

Every turn renders the whole conversation with the model's chat template and prefills it from the start, so the input of
the model always matches its template exactly.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm import commandline
from jaxllm.engine import generator as engine
from jaxllm.engine.generator import Generator
from jaxllm.engine.request import Result, SampleRequest, Times
from jaxllm.engine.weights import InferenceWeights
from jaxllm.errors import UserError
from jaxllm.interop import chat
from jaxllm.interop.chat import ChatTokenizer, Message
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.text import Text
from jaxllm.ledger.advice import out_of_memory
from jaxllm.ledger.runtime.sampling import SamplingBill

MAX_NEW_TOKENS = 512  # default limit of one answer
_CURSOR = "> "


class Conversation:
    """Conversation with a model: the messages so far and the generator of the answers.

    Args:
      generator: Generator of the answers.
      text: Chat template of the model.
      request: Settings of each answer.

    Attributes:
      messages: {"role", "content"} of each message.
    """

    def __init__(self, generator: Generator, text: Text, request: SampleRequest):
        self._generator, self._text, self._request = generator, text, request
        self.messages: list[Message] = []

    def send(self, text: str, on_text: Callable[[str], None]) -> tuple[Result, Times]:
        """Runs one turn: adds the user's text and generates the answer.

        Args:
          text: Message of the user.
          on_text: Callback for each new piece of the answer.

        Raises:
          UserError: The template refuses the messages, or the conversation does not fit in the context. The
            conversation is then unchanged.
        """
        messages = [*self.messages, _user(text)]
        prompt = _rendered(self._text, messages)
        (result,), times = self._generator.generate([prompt], self._request, lambda _, piece: on_text(piece))
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        return result, times


def run(
    opened: Pretrained,
    request: SampleRequest,
    prompts: Sequence[str],
    bill: Callable[[int], SamplingBill],
    dtype: jax.typing.DTypeLike,
    cache_dtype: jax.typing.DTypeLike,
    load: Callable[[], InferenceWeights],
    mesh: Mesh | None = None,
    *,
    as_json: bool,
) -> None:
    """Runs a chat over the prompts or, if there are none, over the lines of standard input.

    Args:
      opened: The model with its tokenizer and chat template.
      request: Settings of each answer.
      prompts: Messages of the user; if empty, they are read from standard input.
      bill: Function from a conversation's capacity in tokens to its memory bill. It is called before the weights are
        read and before each turn.
      dtype: Dtype of weights and computation.
      cache_dtype: Dtype of the cache.
      load: Function that loads the weights.
      mesh: Device mesh; None for one device.
      as_json: Whether to print one JSON object at the end instead of text.

    Raises:
      UserError: The model has no chat template or tokenizer, the first prompt does not fit, or a turn fails. At a
        terminal, the error of a failed turn is printed instead, and the turn is left out of the conversation.
    """
    if opened.text.tokenizer is None:
        raise UserError(f"{opened.source} has no tokenizer, which --chat needs; use a model that has one")
    tokenizer = ChatTokenizer(opened.text.tokenizer)
    tokenizer.end_ids = opened.text.end_ids or tokenizer.end_ids
    bills: list[SamplingBill] = []

    def admit(_rows: int, tokens: int) -> None:
        bills.append(bill(tokens))
        if len(bills) == 1:
            commandline.log(*bills[0].summary_lines())
        bills[-1].require_fit()

    first = engine.encode(_rendered(opened.text, [_user(prompts[0] if prompts else "Hello")]), tokenizer, opened.model)
    admit(1, engine.capacity_for(len(first), request.max_new_tokens, opened.model))
    with out_of_memory.explained(lambda error: bills[-1].oom_message("in the conversation", error)):
        options: dict[str, Any] = {"cache_dtype": cache_dtype, "admit": admit, "mesh": mesh}
        generator = Generator(opened.model, load(), tokenizer, dtype, **options)
        turns = _run_turns(Conversation(generator, opened.text, request), prompts, as_json)
    if turns:
        commandline.log(*bills[-1].reconcile(generator.live, generator.compiled_peaks()))
        commandline.log(_describe([times for _, times in turns]))


def _run_turns(conversation: Conversation, prompts: Sequence[str], as_json: bool) -> list[tuple[Result, Times]]:
    interactive = not prompts and not as_json and sys.stdin.isatty()
    turns: list[tuple[Result, Times]] = []
    for text in _lines(prompts, interactive):
        if not as_json and not interactive and len(prompts) != 1:
            print(f"{_CURSOR}{text}", flush=True)
        try:
            turns.append(conversation.send(text, (lambda _: None) if as_json else _show))
        except UserError as error:
            if not interactive:
                raise
            commandline.log(f"error: {error}")
            continue
        if not as_json:
            print(flush=True)
    if as_json:
        print(json.dumps(_as_json(conversation, turns), ensure_ascii=False), flush=True)
    return turns


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _rendered(text: Text, messages: Sequence[Message]) -> str:
    return chat.render(messages, text.chat_template, text.special, add_generation_prompt=True)


def _lines(prompts: Sequence[str], interactive: bool) -> Iterator[str]:
    """Yields the user's messages from the prompts, a terminal or piped lines; empty input lines are skipped."""
    if prompts:
        yield from prompts
    elif interactive:
        commandline.log("Ctrl-D ends the conversation.")
        while True:
            try:
                text = input(_CURSOR).strip()
            except EOFError:
                print()
                return
            if text:
                yield text
    else:
        yield from (line.strip() for line in sys.stdin if line.strip())


def _as_json(conversation: Conversation, turns: Sequence[tuple[Result, Times]]) -> dict[str, Any]:
    return {
        "messages": conversation.messages,
        "results": [dataclasses.asdict(result) for result, _ in turns],
        "times": [dataclasses.asdict(times) for _, times in turns],
    }


def _describe(times: Sequence[Times]) -> str:
    seconds, tokens = sum(t.decode for t in times), sum(t.new_tokens for t in times)
    rate = (tokens - len(times)) / seconds if seconds else 0.0
    first = sum(t.first_token for t in times) / len(times)
    turns = "1 turn" if len(times) == 1 else f"{len(times)} turns"
    return (
        f"{turns}: first token after {first:.3f} s, then {rate:.1f} tokens/s ({tokens} tokens in total), "
        f"excluding {sum(t.compile for t in times):.2f} s of compilation"
    )


def _show(text: str) -> None:
    print(text, end="", flush=True)
