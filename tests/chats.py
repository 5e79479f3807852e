"""Conversations, tokenizers and chat templates for the tests of chat training data."""

import json

from jaxllm.data import documents
from jaxllm.interop.byte_level import byte_alphabet
from jaxllm.interop.text import Text
from jaxllm.interop.tokenizer import JsonTokenizer

BEGIN, START, END = 256, 257, 258
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(begins: bool) -> JsonTokenizer:
    """Byte-level tokenizer: ids 0 to 255 are bytes, followed by <s>, <|im_start|> and <|im_end|>."""
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    vocabulary = byte_alphabet()
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] if begins else []
    pieces += [{"Sequence": {"id": "A", "type_id": 0}}]
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 256 + i, "content": name, **plain} for i, name in enumerate(special)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return JsonTokenizer(json.dumps(content), "made here")


def text(template=CHATML, begins=False):
    tokenizer = byte_level(begins)
    return Text(tokenizer, template, {"bos_token": "<s>", "eos_token": "<|im_end|>"}, (END,))


def write(folder, records, name="c.jsonl"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return documents.File(name, str(folder / name))
