"""Chat templates: render a conversation as the text that a model was trained on, and tokenize that text.

A template is untrusted code that comes with a model's weights. It runs in Jinja's immutable sandbox: it cannot modify
its inputs or access anything else. It has the functions that `transformers` provides (docs: "Chat templates").
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
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
        raise UserError("the model has no chat template; omit --chat, or use a model trained for chat")
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special,
        )
    except _RejectionError as error:
        raise UserError(f"the model's chat template rejects this conversation: {_first_line(error)}") from error
    except jinja2.exceptions.SecurityError as error:
        raise UserError(
            f"the model's chat template uses something that the sandbox forbids: {_first_line(error)}"
        ) from error
    except Exception as error:  # a template is untrusted code: it can raise anything
        raise UserError(f"the model's chat template fails ({type(error).__name__}: {_first_line(error)})") from error


class ChatTokenizer(Tokenizer):
    """Tokenizer for rendered templates: parses special tokens and ensures exactly one begin token.

    A template may write the begin token or leave it to the tokenizer. The ids have one in both cases, if the wrapped
    tokenizer has a begin token at all. `bos_id` is None: callers must not prepend another.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        super().__init__(tokenizer._table)
        self.end_ids = tokenizer.end_ids
        # An answer is decoded as a text of its own, so the space that begins its first word is dropped there too.
        self.drops_leading_space = tokenizer.drops_leading_space

    def encode(self, text: str, special: bool = True) -> Int32[np.ndarray, " n"]:
        ids = self._tokenizer.encode(text, special=special)
        begin = self._tokenizer.bos_id
        if begin is None:
            return ids
        first = next((i for i, token in enumerate(ids) if token != begin), len(ids))
        return np.concatenate([np.array([begin], np.int32), ids[first:]])


class _RejectionError(Exception):
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
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> None:
    raise _RejectionError(message)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
