"""Text settings of a model: tokenizer, chat template, special tokens and end tokens, and their files in a folder."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import UserError
from jaxllm.interop.huggingface.config_fields import read_json
from jaxllm.interop.tokenizer import ByteTokenizer, FileTokenizer, JsonTokenizer, Tokenizer

GENERATION = "generation_config.json"
# Files that an export copies. Configuration and weights are not among them.
FOLDER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokenizer and chat settings of a model.

    Attributes:
      tokenizer: converts between text and ids; None if the model's files have none. Its `bos_id` begins every document.
      chat_template: Jinja source; None if there is none.
      special: special tokens by their names in the template: {"bos_token": "<s>", …}.
      end_ids: tokens that end generation; the first ends a document.
    """

    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    end_ids: tuple[int, ...] = ()

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Returns all tokens that end a turn, most likely first."""
        return tuple(dict.fromkeys((*self.end_ids, *(self.tokenizer.end_ids if self.tokenizer else ()))))


def load(spec: str, vocab_size: int = sys.maxsize) -> Text:
    """Loads the tokenizer and chat settings that `config.data.tokenizer` names.

    Args:
      spec: "bytes", the path of a tokenizer.json, or of a folder that has one and optionally a chat template.
      vocab_size: vocabulary size of the model, if known: the tokenizer's special tokens beyond it are not counted.
    Raises:
      UserError: the file is not found, or is not a tokenizer.
    """
    path = pathlib.Path(spec).expanduser()
    if spec != "bytes" and (path / "tokenizer.json").is_file():
        return load_folder(path, {}, vocab_size)
    if spec != "bytes" and not path.is_file():
        path = path / "tokenizer.json" if path.is_dir() else path
        raise UserError(f"tokenizer {spec!r} not found at {path}; give 'bytes' or the path of a tokenizer.json")
    tokenizer = ByteTokenizer() if spec == "bytes" else FileTokenizer(path)
    return Text(tokenizer, end_ids=tokenizer.end_ids)


def load_folder(folder: pathlib.Path, config: Mapping[str, Any], vocab_size: int) -> Text:
    """Loads the text settings of a Hugging Face folder.

    Args:
      folder: the model folder.
      config: content of the model's config.json.
      vocab_size: vocabulary size of the model.
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
    end_ids = _end_ids(folder, config, tokenizer, special, vocab_size)
    return Text(tokenizer, _template(folder, settings), special, end_ids)


def save(text: Text, folder: pathlib.Path) -> None:
    """Writes the settings in the layout of a Hugging Face folder; `load` reads back the same settings.

    Args:
      text: the settings.
      folder: destination, created if missing.
    Raises:
      UserError: the tokenizer has no tokenizer.json form.
    """
    tokenizer = text.tokenizer
    if not isinstance(tokenizer, JsonTokenizer):
        raise UserError(
            f"a {type(tokenizer).__name__} cannot be written as a tokenizer.json; set config.data.tokenizer"
        )
    settings: dict[str, object] = {**text.special, "add_bos_token": tokenizer.bos_id is not None}
    if tokenizer.end_ids:
        settings.setdefault("eos_token", tokenizer.name_of(tokenizer.end_ids[0]))
    if tokenizer.bos_id is not None:
        settings.setdefault("bos_token", tokenizer.name_of(tokenizer.bos_id))
    contents = {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(settings, indent=1, ensure_ascii=False) + "\n",
        GENERATION: json.dumps({"eos_token_id": list(text.end_ids)}) + "\n",
    }
    if text.chat_template is not None:
        contents["chat_template.jinja"] = text.chat_template
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content, "utf-8")


def _table(path: pathlib.Path) -> dict[str, Any]:
    """Reads the JSON object of an optional file. An unreadable file is an error: ignoring it would alter the text."""
    return read_json(path) if path.is_file() else {}


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
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read as text ({error}); download it again") from error
    found = settings.get("chat_template") or _table(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    if isinstance(found, dict):
        if "default" not in found:
            raise UserError(
                f"{folder} has the chat templates {', '.join(map(str, found))}, and none is called default; write the "
                f"right one to {path}"
            )
        found = found["default"]
    if found is not None and not isinstance(found, str):
        raise UserError(f"{folder}: chat_template is {found!r:.60}, not a string; write the template to {path}")
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
    sources = (_table(folder / GENERATION), config, text if isinstance(text, dict) else {})
    named: Any = next((ids for ids in (source.get("eos_token_id") for source in sources) if ids is not None), [])
    ids = list(named) if isinstance(named, list) else [named]
    if any(type(i) is not int for i in ids):
        raise UserError(f"{folder}: eos_token_id is {named!r:.60}; it must be an id or a list of ids")
    if tokenizer is not None:
        ids.append(_id_of(tokenizer, special.get("eos_token")))
        ids += [] if any(i is not None for i in ids) else tokenizer.end_ids
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab_size))
