"""Chat templates: allowed and refused features, and exactly one begin token."""

import dataclasses
import json

import models as small
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxllm.engine import generator
from jaxllm.errors import UserError
from jaxllm.interop.chat import ChatTokenizer, render
from jaxllm.interop.tokenizer import ByteTokenizer, FileTokenizer

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "What is 1+1?"},
]


def say(template, messages=HELLO, prompt=True, **special):
    return render(messages, template, SPECIAL | special, add_generation_prompt=prompt)


def test_a_conversation_reads_as_its_template_says():
    assert say(CHATML) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n"
        "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert say(CHATML, prompt=False).endswith("1+1?<|im_end|>\n")


def test_what_templates_ask_for_is_there():
    assert say("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}") == "<s>Hello</s>"
    assert say("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == "user"
    assert say("{{ {'é': ['<b>', 1]} | tojson }}") == '{"é": ["<b>", 1]}'
    assert json.loads(say("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}")) == {"a": 2, "b": 1}
    assert len(say("{{ strftime_now('%Y-%m-%d') }}")) == len("2024-01-31")
    assert say("{% if tools is none and not documents %}none{% endif %}") == "none"
    assert say("a{% generation %}b{{ messages | length }}{% endgeneration %}c") == "ab3c"
    assert say("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"  # blocks leave no white space behind
    assert say("{{ messages[-1].content.split('+')[0] | trim | upper }}") == "WHAT IS 1"
    assert (
        say("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "3"
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template; omit --chat"),
        ("", "has no chat template"),
        ("{{ raise_exception('Roles must alternate') }}", "rejects this conversation: Roles must alternate"),
        ("{% for %}", "fails (TemplateSyntaxError"),
        ("{{ messages[0]['content'] + 1 }}", "fails (TypeError"),
        ("{{ undefined.field }}", "fails (UndefinedError"),
        ("{{ messages.append(1) }}", "uses something that the sandbox forbids"),
        ("{{ messages[0].update({'role': 'x'}) }}", "uses something that the sandbox forbids"),
        ("{{ ''.__class__.__mro__ }}", "uses something that the sandbox forbids"),
        ("{{ raise_exception.__globals__.keys() }}", "uses something that the sandbox forbids"),
        ("{{ range(999999999) | list }}", "fails (OverflowError"),
    ],
)
def test_a_template_that_cannot_be_had_is_one_line(template, words):
    with pytest.raises(UserError) as caught:
        say(template)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_conversation_is_left_as_it_was():
    messages = [{"role": "user", "content": "a"}]
    say("{% set m = messages[0] %}{{ m.content }}", messages)
    assert messages == [{"role": "user", "content": "a"}]


# --- one begin token


@pytest.fixture
def tokenizer(tmp_path):
    built = tokenizers.Tokenizer(
        models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    built.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    begin = built.token_to_id("<s>")
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    built.save(str(tmp_path / "tokenizer.json"))
    return FileTokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML, "{{ bos_token }}{{ bos_token }}" + CHATML])
def test_there_is_one_begin_token_whoever_writes_it(template, tokenizer):
    chat = ChatTokenizer(tokenizer)
    ids = chat.encode(say(template)).tolist()
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1
    assert ids == ChatTokenizer(tokenizer).encode(say(CHATML)).tolist()
    room = dataclasses.replace(small.ROTARY, context_length=1024, vocab_size=512)
    assert generator.encode(say(template), chat, room).tolist() == ids  # the generator adds no second begin token
    # Planted fault: a begin token from the template and another from the tokenizer.
    naive = [tokenizer.bos_id, *tokenizer.encode(say("{{ bos_token }}" + CHATML), special=True).tolist()]
    assert naive.count(tokenizer.bos_id) == 2


def test_a_tokenizer_without_a_begin_token_adds_none(tokenizer):
    tokenizer.bos_id = None
    assert ChatTokenizer(tokenizer).encode(say(CHATML))[0] != 0
    ids = ChatTokenizer(tokenizer).encode(say("{{ bos_token }}" + CHATML)).tolist()
    assert tokenizer.decode(ids[1:]) == tokenizer.decode(ids)
    assert ChatTokenizer(ByteTokenizer()).encode("ab").tolist() == [97, 98]


def test_special_tokens_of_a_template_are_read_as_such(tokenizer):
    chat = ChatTokenizer(tokenizer)
    start, end = (tokenizer.encode(name, special=True).tolist() for name in ("<|im_start|>", "<|im_end|>"))
    assert len(start) == len(end) == 1
    ids = chat.encode(say(CHATML)).tolist()
    assert ids.count(start[0]) == 5
    assert ids.count(end[0]) == 4
    assert chat.decode(ids) == say(CHATML).replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert chat.end_ids == tokenizer.end_ids
    assert chat.vocab_size == tokenizer.vocab_size
