"""How a model reads and writes: its tokenizer, and how it puts a conversation. What is beside its numbers."""

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
    """Attributes:
    tokenizer: between text and ids.
    chat_template: Jinja source; None where there is none.
    special: the template's names of special tokens and how they are written.
    end_ids: tokens after which a turn has nothing more.
    """

    tokenizer: Tokenizer
    chat_template: str | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    end_ids: tuple[int, ...] = ()

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """All tokens that end a turn; the likeliest first."""
        return tuple(dict.fromkeys((*self.end_ids, *self.tokenizer.end_ids)))


def load(spec: str, vocab_size: int = sys.maxsize) -> Text:
    """What `config.data.tokenizer` names.

    Args:
      spec: "bytes", the path of a tokenizer.json, or of a folder that has one and perhaps a chat template.
      vocab_size: of the model, where it is known: marks that the tokenizer has beyond it are left out of its count.
    Raises:
      UserError: there is none.
    """
    folder = pathlib.Path(spec).expanduser()
    if spec == "bytes" or not (folder / "tokenizer.json").is_file():
        tokenizer = tokenizers.load(spec)
        return Text(tokenizer, end_ids=tokenizer.end_ids)
    found = folder_tokenizer.read(folder, {}, vocab_size)
    return Text(found["tokenizer"], found["chat_template"], found["special"], found["end_ids"])


def of(pretrained: Pretrained) -> Text | None:
    """A model's own; None where it comes with no tokenizer."""
    if pretrained.tokenizer is None:
        return None
    return Text(pretrained.tokenizer, pretrained.chat_template, pretrained.special, pretrained.end_ids)


def save(text: Text, folder: pathlib.Path) -> None:
    """Writes files that `load` reads the same from, in the layout of a Hugging Face folder.

    Raises:
      UserError: a tokenizer that is no tokenizer.json.
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
