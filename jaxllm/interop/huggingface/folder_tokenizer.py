"""Text settings of a Hugging Face folder: tokenizer, chat template, begin token and end tokens."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import UserError
from jaxllm.interop.tokenizer import FileTokenizer, Tokenizer

# Files that an export copies. Configuration and weights are not among them.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


def read(folder: pathlib.Path, config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Reads the text-related fields of `Pretrained`.

    Args:
      folder: the model folder.
      config: content of the model's config.json.
      vocab_size: vocabulary size of the model.
    Returns:
      The fields by name.
    Raises:
      UserError: a file has invalid content, or there are several chat templates and none is called default.
    """
    settings = _table(folder / "tokenizer_config.json")
    special = _special(_table(folder / "special_tokens_map.json") | settings)
    path = folder / "tokenizer.json"
    tokenizer = FileTokenizer(path) if path.is_file() else None
    if tokenizer is not None:
        _set_bos(tokenizer, settings, special)
        if not tokenizer.byte_lengths()[vocab_size:].any():  # image tokens, in a model without images
            tokenizer.vocab_size = min(tokenizer.vocab_size, vocab_size)
    return {
        "tokenizer": tokenizer,
        "chat_template": _template(folder, settings),
        "special": special,
        "end_ids": _end_ids(folder, config, tokenizer, special, vocab_size),
        "tokenizer_files": tuple(folder / name for name in FILES if (folder / name).is_file()),
    }


def _table(path: pathlib.Path) -> dict[str, Any]:
    """Reads the JSON object of an optional file. An unreadable file is an error: ignoring it would alter the text."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is no table; download it again")
    return value


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error}); download it again") from error


def _special(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that templates refer to by name: {"bos_token": "<s>", …}."""
    found = {}
    for name, value in values.items():
        written = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(written, str):
            found[name] = written
    return found


def _set_bos(tokenizer: FileTokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Applies `add_bos_token` of the settings to the tokenizer; if it is missing, tokenizer.json decides."""
    adds = settings.get("add_bos_token")
    if adds is False:
        tokenizer.bos_id = None
    elif adds is True and tokenizer.bos_id is None:
        tokenizer.bos_id = _id_of(tokenizer, special.get("bos_token"))


def _id_of(tokenizer: Tokenizer, written: str | None) -> int | None:
    """Returns the id of a special token; None if the text is not exactly one token."""
    ids = tokenizer.encode(written, special=True).tolist() if written else []
    return ids[0] if len(ids) == 1 else None


def _template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read(path)
    found = settings.get("chat_template") or _table(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    if isinstance(found, dict):
        if "default" not in found:
            raise UserError(
                f"{folder} has the chat templates {', '.join(map(str, found))}, and none is called default; put the "
                f"one that is meant into {path}"
            )
        found = found["default"]
    if found is not None and not isinstance(found, str):
        raise UserError(f"{folder}: chat_template is {found!r:.60}, no text; put the template into {path}")
    return found


def _end_ids(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    special: Mapping[str, str],
    vocab_size: int,
) -> tuple[int, ...]:
    """Returns the end tokens of generation_config.json, or else of config.json, then those of the tokenizer."""
    text = config.get("text_config") or {}
    sources = (_table(folder / "generation_config.json"), config, text if isinstance(text, dict) else {})
    named: Any = next((ids for ids in (source.get("eos_token_id") for source in sources) if ids is not None), [])
    ids = list(named) if isinstance(named, list) else [named]
    if any(type(i) is not int for i in ids):
        raise UserError(f"{folder}: eos_token_id is {named!r:.60}; it must be an id, or a list of ids")
    if tokenizer is not None:
        ids.append(_id_of(tokenizer, special.get("eos_token")))
        ids += [] if any(i is not None for i in ids) else tokenizer.end_ids
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab_size))
