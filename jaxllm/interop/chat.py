"""Chat templates: render a conversation as the text that a model was trained on, and tokenize that text.

A template is untrusted code that comes with a model's weights. It runs in Jinja's immutable sandbox: it cannot modify
its inputs or access anything else. It has the functions that `transformers` provides (docs: "Chat templates").
"""

import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
from jaxtyping import Int32

from jaxllm.errors import UserError
from jaxllm.interop.tokenizer import Tokenizer

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant" | …, "content": text, …}


def render(
    messages: Sequence[Message], template: str | None, special: Mapping[str, str], *, add_generation_prompt: bool
) -> str:
    """Renders a conversation as text.

    Args:
      messages: messages in order, each {"role", "content"}.
      template: Jinja source; None if the model has none.
      special: special tokens by name: {"bos_token": "<s>", "eos_token": "</s>"}.
      add_generation_prompt: append the header of the assistant's answer.
    Raises:
      UserError: there is no template, or the template is broken or rejects the conversation.
    """
    if not template:
        raise UserError("the model comes with no chat template; leave --chat out, or use a model tuned for chats")
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special,
        )
    except _RefusalError as error:
        raise UserError(f"the model's chat template refuses this conversation: {_line(error)}") from error
    except jinja2.exceptions.SecurityError as error:
        raise UserError(f"the model's chat template wants what it may not have: {_line(error)}") from error
    except Exception as error:  # a template is untrusted code: it can raise anything
        raise UserError(f"the model's chat template fails ({type(error).__name__}: {_line(error)})") from error


class ChatTokenizer(Tokenizer):
    """Tokenizer for rendered templates: parses special tokens and ensures exactly one begin token.

    A template may write the begin token or leave it to the tokenizer. The ids have one in both cases, if the wrapped
    tokenizer has a begin token at all. `bos_id` is None: callers must not prepend another.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        super().__init__(tokenizer._table)
        self.end_ids = tokenizer.end_ids
        # A turn follows other text, so a space at its start belongs to the turn.
        self.drops_leading_space = tokenizer.drops_leading_space

    def encode(self, text: str, special: bool = True) -> Int32[np.ndarray, " n"]:
        ids = self._tokenizer.encode(text, special=special)
        begin = self._tokenizer.bos_id
        if begin is None:
            return ids
        first = next((i for i, token in enumerate(ids) if token != begin), len(ids))
        return np.concatenate([np.array([begin], np.int32), ids[first:]])


class _RefusalError(Exception):
    """Raised by `raise_exception` in a template."""


class _Generation(jinja2.ext.Extension):
    """Jinja extension that accepts {% generation %} … {% endgeneration %} marks and renders only their content."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Json(jinja2.ext.Extension):
    """Jinja extension with `tojson` as templates expect it: unescaped Unicode and no HTML escapes."""

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        environment.filters["tojson"] = _to_json


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=16)  # compilation takes milliseconds, and a data set has many conversations
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation, _Json]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _refuse(message: str) -> None:
    raise _RefusalError(message)


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def turns(texts: Iterable[str]) -> list[Message]:
    """Converts texts to messages of alternating roles, the user first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
