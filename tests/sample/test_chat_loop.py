"""Chat loop: turns rendered with the model's template, from a pipe, from prompts and at a terminal."""

import dataclasses
import json
import subprocess
import sys

import gguf_models
import jax.numpy as jnp
import pytest
import runs

from jaxllm.engine.request import Result, SampleRequest, Times
from jaxllm.errors import UserError
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.text import Text
from jaxllm.interop.tokenizer import ByteTokenizer
from jaxllm.sample import chat

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MODEL = dataclasses.replace(gguf_models.LLAMA, vocab_size=264, context_length=256)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "tiny.gguf"
    params = gguf_models.random_params(MODEL, scale=0.3)
    gguf.write(path, MODEL, params, Text(ByteTokenizer(), TEMPLATE), quantization="F32")
    return path


class Fake:
    """Fake generator that returns the number of prompts so far and the last prompt."""

    def __init__(self):
        self.prompts = []

    def generate(self, prompts, request, on_text):
        if "too long" in prompts[0]:
            raise UserError("--prompt has 300 tokens")
        self.prompts += prompts
        answer = f"answer {len(self.prompts)}"
        for piece in (answer[:3], answer[3:]):
            on_text(0, piece)
        return [Result(prompts[0], answer, [1, 2], "end")], Times(0.0, 0.1, 0.1, 3, 2, 10.0)


def test_every_turn_takes_in_the_whole_conversation(file):
    fake, received = Fake(), []
    conversation = chat.Conversation(fake, gguf.open_file(file).text, SampleRequest())
    conversation.send("one", received.append)
    conversation.send("two", received.append)
    assert fake.prompts == ["[user]one\n[assistant]", "[user]one\n[assistant]answer 1\n[user]two\n[assistant]"]
    assert "".join(received) == "answer 1answer 2"
    before = list(conversation.messages)
    for refused, words in (("bad", "rejects this conversation: no bad words"), ("too long", "300 tokens")):
        with pytest.raises(UserError, match=words):
            conversation.send(refused, received.append)
        assert conversation.messages == before  # as if the message had not been sent
    conversation.send("three", received.append)
    assert [m["content"] for m in conversation.messages] == ["one", "answer 1", "two", "answer 2", "three", "answer 3"]


def test_at_a_terminal_a_turn_that_fails_is_reported_and_the_next_one_is_heard(file, monkeypatch, capsys):
    typed = iter(["one", "  ", "bad", "two"])

    def ask(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    conversation = chat.Conversation(Fake(), gguf.open_file(file).text, SampleRequest())
    turns = chat._run_turns(conversation, [], as_json=False)
    printed = capsys.readouterr()
    assert len(turns) == 2
    assert printed.out == "answer 1\nanswer 2\n\n"
    assert "Ctrl-D ends" in printed.err
    assert "error: the model's chat template rejects this conversation: no bad words" in printed.err
    with pytest.raises(UserError, match="no bad words"):  # given as a prompt, the error ends the command
        chat._run_turns(conversation, ["bad"], as_json=False)


def test_a_model_without_a_template_or_a_tokenizer_is_refused_before_its_weights_are_read(tmp_path):
    params = gguf_models.random_params(MODEL)

    def run(opened):
        rest = (jnp.float32, jnp.float32, lambda: pytest.fail("loaded"))
        chat.run(opened, SampleRequest(), ["hi"], lambda tokens: pytest.fail("billed"), *rest, as_json=False)

    for tokenizer, words in ((None, "has no tokenizer"), (ByteTokenizer(), "has no chat template")):
        gguf.write(tmp_path / "m.gguf", MODEL, params, Text(tokenizer), quantization="F32")
        opened = gguf.open_file(tmp_path / "m.gguf")
        opened = dataclasses.replace(opened, loader=lambda *_: pytest.fail("read"))
        with pytest.raises(UserError, match=words):
            run(opened)


@pytest.mark.slow
def test_lines_down_a_pipe_are_turns_and_so_are_prompts(file):
    """A conversation gives equal results from piped lines and from prompts, as text and as JSON."""
    command = [
        sys.executable,
        "-m",
        "jaxllm.sample",
        f"--model={file}",
        "--chat",
        "--max_new_tokens=5",
        "--temperature=0",
    ]
    kinds = {"env": runs.environment(), "capture_output": True, "text": True, "cwd": runs.ROOT}
    piped = subprocess.run(command, input="first\n\nsecond\n", **kinds)
    assert piped.returncode == 0, piped.stderr
    printed = subprocess.run([*command, "--json", "--prompt=first", "--prompt=second"], **kinds)
    assert printed.returncode == 0, printed.stderr
    found = json.loads(printed.stdout)
    assert [m["role"] for m in found["messages"]] == ["user", "assistant"] * 2
    answers = [result["text"] for result in found["results"]]
    assert piped.stdout == f"> first\n{answers[0]}\n> second\n{answers[1]}\n"
    assert found["results"][1]["prompt"] == f"[user]first\n[assistant]{answers[0]}\n[user]second\n[assistant]"
    assert len(found["times"]) == 2
    assert "fits: needs" in piped.stderr
    assert "2 turns: first token after" in piped.stderr
    assert found["times"][1]["prompt_tokens"] == len(found["results"][1]["prompt"].encode())


def test_a_bad_prompt_is_one_line_and_exit_2(file):
    done = runs.command("jaxllm.sample", f"--model={file}", "--chat", "--prompt=bad")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line == "error: the model's chat template rejects this conversation: no bad words"
    assert done.stdout == ""
