"""Text settings of a model besides its weights: tokenizer, chat template, special tokens and end tokens."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping

from jaxllm.errors import UserError
from jaxllm.interop import tokenizer as tokenizers
from jaxllm.interop.huggingface import folder_tokenizer
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.tokenizer import JsonTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokenizer and chat settings of a model.

    Attributes:
      tokenizer: converts between text and ids.
      chat_template: Jinja source; None if there is none.
      special: special tokens by their names in the template.
      end_ids: tokens that end a turn.
    """

    tokenizer: Tokenizer
    chat_template: str | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    end_ids: tuple[int, ...] = ()

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Returns all tokens that end a turn, most likely first."""
        return tuple(dict.fromkeys((*self.end_ids, *self.tokenizer.end_ids)))


def load(spec: str, vocab_size: int = sys.maxsize) -> Text:
    """Loads the tokenizer and chat settings that `config.data.tokenizer` names.

    Args:
      spec: "bytes", the path of a tokenizer.json, or of a folder that has one and optionally a chat template.
      vocab_size: vocabulary size of the model, if known: the tokenizer's special tokens beyond it are not counted.
    Raises:
      UserError: there is no such tokenizer.
    """
    folder = pathlib.Path(spec).expanduser()
    if spec == "bytes" or not (folder / "tokenizer.json").is_file():
        tokenizer = tokenizers.load(spec)
        return Text(tokenizer, end_ids=tokenizer.end_ids)
    found = folder_tokenizer.read(folder, {}, vocab_size)
    return Text(found["tokenizer"], found["chat_template"], found["special"], found["end_ids"])


def of(pretrained: Pretrained) -> Text | None:
    """Returns the text settings of a pretrained model; None if it has no tokenizer."""
    if pretrained.tokenizer is None:
        return None
    return Text(pretrained.tokenizer, pretrained.chat_template, pretrained.special, pretrained.end_ids)


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
        "generation_config.json": json.dumps({"eos_token_id": list(text.end_ids)}) + "\n",
    }
    if text.chat_template is not None:
        contents["chat_template.jinja"] = text.chat_template
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content, "utf-8")
