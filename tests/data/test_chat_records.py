"""Conversation data: which tokens are trained on, whole-conversation packing, and behaviour common to all sources."""

import dataclasses
import json

import models
import numpy as np
import pytest
import steps
from chats import BEGIN, CHATML, END, START, byte_level, text, write

from jaxllm.config import DataConfig
from jaxllm.data import BATCH_FIELDS, conversations, pipeline, sources, turns
from jaxllm.errors import UserError
from jaxllm.interop.chat import ChatTokenizer
from jaxllm.interop.text import Text
from jaxllm.interop.tokenizer import ByteTokenizer

# Only the last answer has a thinking block, as in Qwen 3.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWO_TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "It is 2 é."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]


def ids_of(written):
    """Encodes by hand: bytes, and ids for the names of special tokens."""
    for name, i in (("<s>", BEGIN), ("<|im_start|>", START), ("<|im_end|>", END)):
        if name in written:
            left, _, right = written.partition(name)
            return [*ids_of(left), i, *ids_of(right)]
    return list(written.encode())


def trained(made):
    """Returns the trained text of each answer, with @ for the end-of-turn token."""
    found = {}
    for token, answer in zip(made.ids.tolist(), np.asarray(made.answers).tolist(), strict=True):
        if answer:
            found[answer] = found.get(answer, b"") + (b"@" if token == END else bytes([token]))
    return [run.decode() for run in found.values()]


def opened(folder, records, length=1000, of=None, vocab_size=259):
    return conversations.Conversations([write(folder, records)], of or text(), length, vocab_size)


def test_answers_and_their_ends_are_trained_and_nothing_else():
    made = turns.encode(TWO_TURNS, text())
    asked = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    answer = "It is 2 é.<|im_end|>"
    again = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    parts = [(asked, 0), (answer, 1), (again, 0), ("Yes<|im_end|>", 2), ("\n", 0)]
    assert made.ids.tolist() == [i for part, _ in parts for i in ids_of(part)]
    assert made.answers.tolist() == [which for part, which in parts for _ in ids_of(part)]
    assert trained(made) == ["It is 2 é.@", "Yes@"]


def test_weights_one_token_off_are_seen():
    made = turns.encode(TWO_TURNS, text())
    assert trained(made._replace(answers=np.roll(made.answers, 1))) != ["It is 2 é.@", "Yes@"]


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML, "{{ bos_token + bos_token }}" + CHATML])
@pytest.mark.parametrize("begins", [True, False])
def test_one_begin_as_in_a_chat(template, begins):
    like = text(template, begins)
    made = turns.encode(TWO_TURNS, like)
    if begins:
        assert made.ids.tolist().count(BEGIN) == 1
    whole = turns.chat.render(TWO_TURNS, template, like.special, add_generation_prompt=False)
    assert made.ids.tolist() == ChatTokenizer(like.tokenizer).encode(whole).tolist()
    assert trained(made) == ["It is 2 é.@", "Yes@"]


def test_a_template_that_drops_old_thoughts():
    made = turns.encode(TWO_TURNS, text(THINKING))
    assert trained(made) == ["It is 2 é.@", "<think>\n\n</think>\n\nYes@"]


def test_a_template_that_hides_where_an_answer_is(tmp_path):
    backwards = CHATML.replace("in messages", "in messages | reverse")
    with pytest.raises(UserError, match=r"c.jsonl:1: the chat template renders the text before message 2 differently"):
        opened(tmp_path, [{"prompt": "a", "answer": "b"}], of=text(backwards))
    # A whole answer changes once other messages follow, and no end token marks where it ends.
    numbered = (
        "{% for m in messages %}{{ m.content + ('!' if loop.last and m.role == 'assistant' else '') }}{% endfor %}"
    )
    with pytest.raises(UserError, match="no end token marks where it ends"):
        turns.encode(TWO_TURNS, text(numbered))


def test_without_a_template_all_is_put_end_to_end():
    made = turns.encode(TWO_TURNS, Text(ByteTokenizer(), end_ids=(256,)))
    assert bytes(i for i in made.ids.tolist() if i < 256).decode() == "1+1?It is 2 é.Sure?Yes"
    size = len("It is 2 é.".encode())
    assert made.answers.tolist() == [0] * 4 + [1] * (size + 1) + [0] * 5 + [2] * 4
    assert made.ids[[4 + size, -1]].tolist() == [256, 256]
    assert turns.encode(TWO_TURNS, Text(byte_level(True), end_ids=(END,))).ids.tolist()[0] == BEGIN


SYSTEM = {"role": "system", "content": "Be brief."}
# A separate system turn, and a default one that the template adds when there is none (Qwen 2.5).
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML
)
# Folded into the first question. The template ends each answer itself, with no mark before it (Llama 2, Mistral).
FOLDED = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize(
    ("template", "want"),
    [
        (CHATML, ["It is 2 é.@", "Yes@"]),
        (DEFAULT_SYSTEM, ["It is 2 é.@", "Yes@"]),
        (FOLDED, [" It is 2 é.@", " Yes@"]),
    ],
)
def test_system_turns_are_read_and_not_trained(template, want, begins):
    like = text(template, begins)
    for messages in (TWO_TURNS, [SYSTEM, *TWO_TURNS]):
        made = turns.encode(messages, like)
        assert trained(made) == want
        said = bytes(i for i in made.ids.tolist() if i < 256).decode()
        assert ("Be brief." in said) == (messages[0] is SYSTEM)
        kept, is_truncated, lost = conversations._truncate(made, int(np.flatnonzero(made.answers == 2)[0]) + 1)
        assert trained(kept) == [want[0], want[1][:1]]
        assert (is_truncated, lost) == (True, 0)
        kept, _, lost = conversations._truncate(made, int(np.flatnonzero(made.answers == 2)[0]))
        assert trained(kept) == want[:1]
        assert lost == 1
        assert len(kept.ids) == np.flatnonzero(made.answers == 1)[-1] + 1  # drops the unanswered question


def test_a_template_that_refuses_system_turns_is_reported_with_the_line(tmp_path):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    with pytest.raises(UserError, match=r"c.jsonl:2: the model's chat template rejects this conversation: no system"):
        opened(tmp_path, [{"messages": TWO_TURNS}, {"messages": [SYSTEM, *TWO_TURNS]}], of=text(template))


def test_ids_beyond_the_vocabulary_stop_the_run_before_its_first_step(tmp_path):
    """<|im_end|> is 258: the tokenizer has the id but the model has no row for it, and a lookup would clamp it."""
    assert len(opened(tmp_path, [{"messages": TWO_TURNS}])) == 1
    with pytest.raises(UserError, match=r"c.jsonl:1 has the token <\|im_end\|> with id 258, but .* vocab_size is 258"):
        opened(tmp_path, [{"messages": TWO_TURNS}], vocab_size=258)
    plain = Text(byte_level(False), end_ids=(END,))  # no template: the end id is appended without appearing in the text
    with pytest.raises(UserError, match=r"id 258"):
        opened(tmp_path, [{"prompt": "a", "answer": "b"}], of=plain, vocab_size=258)
    config = DataConfig(source="chat", path=str(tmp_path / "*.jsonl"), sequence_length=32)
    with pytest.raises(UserError, match=r"with id 256, but the model's vocab_size is 200"):
        sources.split(config, 200)


def test_a_date_in_a_template_stands_still():
    dated = text("{{ strftime_now('%d %b %Y') }}" + CHATML)
    assert bytes(turns.encode(TWO_TURNS, dated).ids[:11].tolist()) == b"26 Jul 2024"


def test_documents_are_what_was_put(tmp_path):
    records = [{"messages": TWO_TURNS}, {"prompt": "p", "completion": "q"}, {"prompt": "p", "response": "q"}]
    found = opened(tmp_path, records)
    assert [found.name(i) for i in range(3)] == ["c.jsonl:1", "c.jsonl:2", "c.jsonl:3"]
    made = turns.encode(TWO_TURNS, text())
    assert found[0]["tokens"].tolist() == made.ids.tolist()[:-1]  # tokens after the last answer have no target
    assert found[0]["weights"].tolist() == (made.answers > 0).tolist()[:-1]
    assert found[1]["tokens"].tolist() == found[2]["tokens"].tolist()
    assert found.notes == ()
    assert found[0]["tokens"].dtype == np.int32


def test_long_ones_are_cut_and_reported(tmp_path):
    question, head = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n", len("It is")
    length = len(ids_of(question)) + head - 1
    records = [{"messages": TWO_TURNS}, {"prompt": "x" * 200, "answer": "y"}, {"prompt": "1", "answer": "2"}]
    found = opened(tmp_path, records, length)
    assert len(found) == 2  # the second conversation has no answer tokens left
    assert found[0]["tokens"].tolist() == ids_of(question + "It is")
    assert found[0]["weights"].sum() == head
    (note,) = found.notes
    assert "2 of 3 conversations" in note
    assert f"longer than config.data.sequence_length ({length})" in note
    assert "2 answers were removed entirely, and 1 conversations had no answer left" in note
    with pytest.raises(UserError, match=r"sequence_length \(8\) is too short to keep any answer"):
        opened(tmp_path, records, 8)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([1], r"c.jsonl:1 is a list; each line must be \{\"messages\""),
        ({"prompt": "a"}, "c.jsonl:1 has the fields prompt; each line must be"),
        ({"question": "a", "answer": "b"}, "c.jsonl:1 has the fields question, answer; each line must be"),
        ({"messages": []}, "c.jsonl:1: messages must be a non-empty list"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "c.jsonl:1: message 1 needs a role and a content"),
        ({"prompt": "a", "answer": None}, "c.jsonl:1: message 2 needs a role and a content"),
        ({"messages": [{"role": "user", "content": "a"}]}, "c.jsonl:1 has no message with role 'assistant'"),
    ],
)
def test_lines_that_are_no_conversation(tmp_path, record, said):
    with pytest.raises(UserError, match=said):
        opened(tmp_path, [record])


RECORDS = [{"prompt": "q" * (n % 7), "answer": f"{n}:" + "a" * (3 * n % 11)} for n in range(40)]


def train(folder, batch_size=4, only=None, **fields):
    config = DataConfig(source="chat", **{"sequence_length": 48, "shuffle_window": 8} | fields)
    made = conversations.Conversations([write(folder, RECORDS)], text(), config.sequence_length, 259)
    return made, pipeline.train_iterator(config, batch_size, only, split=sources.Split(made, made), text=text())


def same(one, two):
    return one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)


def whole(batch, made):
    """Asserts that every segment of every row is one complete conversation with its weights."""
    for row in range(len(batch["tokens"])):
        segments = batch["segment_ids"][row]
        for s in range(1, segments.max() + 1):
            at = segments == s
            document = made[int(batch["documents"][row][at][0])]
            tokens, weights = document["tokens"], document["weights"]
            if batch["tokens"][row][at].tolist() != tokens[:-1].tolist():
                return False
            if batch["targets"][row][at].tolist() != tokens[1:].tolist():
                return False
            if batch["weights"][row][at].tolist() != weights[1:].astype(float).tolist():
                return False
            if batch["positions"][row][at].tolist() != list(range(at.sum())):
                return False
        if batch["weights"][row][segments == 0].any() or (batch["documents"][row][segments == 0] != -1).any():
            return False
    return True


def test_conversations_are_packed_whole_with_their_weights(tmp_path):
    made, iterator = train(tmp_path)
    batches = [next(iterator) for _ in range(12)]
    assert all(whole(batch, made) for batch in batches)
    assert any(batch["segment_ids"].max() > 1 for batch in batches)
    assert np.mean([(batch["segment_ids"] > 0).mean() for batch in batches]) > 0.6
    for name, dtype in BATCH_FIELDS.items():
        assert batches[0][name].dtype == dtype
    batches[0]["weights"] = np.roll(batches[0]["weights"], 1, axis=1)
    assert not whole(batches[0], made)


def test_validation_has_every_answer_once(tmp_path):
    made, _ = train(tmp_path)
    config = DataConfig(source="chat", sequence_length=48)
    held = pipeline.validation_batches(config, 4, 1000, split=sources.Split(made, made), text=text())
    batches = list(held)
    assert all(whole(batch, made) for batch in batches)
    want = sum(float(made[i]["weights"].sum()) for i in range(len(made)))
    assert sum(float(batch["weights"].sum()) for batch in batches) == want


@pytest.mark.parametrize("fields", [{}, {"shuffle": False}, {"shuffle_window": 1}])
def test_resuming_anywhere_gives_the_same_batches(tmp_path, fields):
    _, iterator = train(tmp_path, **fields)
    states, batches = [], []
    for _ in range(16):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    _, other = train(tmp_path, **fields)
    for start in (0, 1, 5, 13, 4):  # also backwards
        other.set_state(json.loads(states[start]))
        for batch in batches[start : start + 3]:
            assert same(next(other), batch), start


@pytest.mark.parametrize("processes", [2, 4])
def test_batches_do_not_depend_on_the_number_of_processes(tmp_path, processes):
    _, one = train(tmp_path, 8, streams=4)
    share = 4 // processes
    parts = [train(tmp_path, 8, range(p * share, (p + 1) * share), streams=4)[1] for p in range(processes)]
    for _ in range(6):
        batches = [next(part) for part in parts]
        joined = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
        assert same(joined, next(one))


def test_from_the_configuration(tmp_path):
    write(tmp_path, RECORDS)
    config = DataConfig(source="chat", path=str(tmp_path / "*.jsonl"), sequence_length=32)
    parts = sources.split(config, 257)
    assert len(parts.training) + len(parts.validation) == len(RECORDS)
    batch = next(pipeline.train_iterator(config, 4, vocab_size=257))
    assert 0 < batch["weights"].sum() < (batch["segment_ids"] > 0).sum()


def test_every_answer_token_weighs_the_same(tmp_path):
    """Answers of 10 and 100 trained tokens, in one micro-batch or two: each token has weight 1/110."""
    records = [{"prompt": "q" * 30, "answer": "a" * 9}, {"prompt": "q", "answer": "b" * 99}]
    made = conversations.Conversations([write(tmp_path, records)], Text(ByteTokenizer(), end_ids=(256,)), 160, 257)
    config = steps.config(train_batch_size=2, data_sequence_length=160, optimizer_name="sgd", optimizer_clip_norm=0.0)
    rows = pipeline.validation_batches(
        DataConfig(source="chat", sequence_length=160), 2, 1, split=sources.Split(made, made)
    )
    (batch,) = [{name: batch[name] for name in BATCH_FIELDS} for batch in rows]
    # When packed they share a row; here each has its own row.
    split = {name: np.zeros_like(values) for name, values in batch.items()}
    for row, s in enumerate((1, 2)):
        at = batch["segment_ids"][0] == s
        for name, values in batch.items():
            split[name][row, : at.sum()] = values[0][at]
        split["segment_ids"][row, : at.sum()] = 1
    assert split["weights"].sum(1).tolist() == [10, 100]
    run = steps.Run(config, dataclasses.replace(models.ROTARY, vocab_size=257))
    want, expected_metrics = run.updated(split)
    assert float(expected_metrics["tokens"]) == 110
    for values, fields in ((split, {"accumulate": 2}), (batch, {})):
        got, metrics = run.updated(values, **fields)
        steps.assert_close(got, want, 1e-6)
        np.testing.assert_allclose(float(metrics["loss"]), float(expected_metrics["loss"]), rtol=1e-5)
    uneven = dict(split, weights=split["weights"] * np.array([[10.0], [1.0]], np.float32))  # a mean of means
    wrong, _ = run.updated(uneven)
    with pytest.raises(AssertionError):
        steps.assert_close(wrong, want, 1e-6)
