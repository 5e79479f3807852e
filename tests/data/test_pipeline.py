"""Data pipeline: contents of a batch, coverage of an epoch, and exact resumption."""

import collections
import json
import threading

import calls
import chats
import numpy as np
import pytest

from jaxllm.config import DataConfig
from jaxllm.data import BATCH_FIELDS, pipeline, sources
from jaxllm.data import documents as documents_lib
from jaxllm.errors import UserError
from jaxllm.interop import text as texts
from jaxllm.interop.tokenizer import ByteTokenizer


class Memory(documents_lib.Documents):
    """Documents from a list of texts or token arrays."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        key = "text" if isinstance(self.items[i], str) else "tokens"
        return {"name": self.name(i), key: self.items[i]}

    def name(self, i):
        return f"document {i}"


TEXTS = [f"{n}:" + "abcdefghij"[: n % 10] * (n % 7) for n in range(40)]


ONE_STREAM = [[27, 5, 27, 27], [3, 5, 34, 24], [12, 19, 6, 10], [6, 6, 19, 19]]


def train(items, batch_size=4, only=None, **fields):
    source = "text" if isinstance(items[0], str) else "tokens"
    config = DataConfig(source=source, **{"sequence_length": 16, "shuffle_window": 8} | fields)
    split = sources.Split(Memory(items), Memory(items))
    return pipeline.train_iterator(config, batch_size, only, split=split)


def held(items, batch_size=4, limit=1000, **fields):
    config = DataConfig(source="text", **{"sequence_length": 16} | fields)
    return pipeline.validation_batches(config, batch_size, limit, split=sources.Split(Memory(items), Memory(items)))


def same(one, two):
    return one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)


def targets_of(batches):
    """Counts how often each (document, target token) pair was trained in some batches."""
    found = collections.Counter()
    for batch in batches:
        real = batch["weights"] > 0
        found.update(zip(batch["documents"][real].tolist(), batch["targets"][real].tolist(), strict=True))
    return found


def expected_targets(texts):
    return collections.Counter((i, t) for i, text in enumerate(texts) for t in [*text.encode()[1:], 256])


def test_fields_shapes_and_types():
    batch = next(train(TEXTS))
    assert set(batch) == set(BATCH_FIELDS) | {"documents"}
    for name, dtype in BATCH_FIELDS.items():
        assert batch[name].shape == (4, 16), name
        assert batch[name].dtype == dtype, name
    assert batch["documents"].dtype == np.int32


def test_rows_by_hand():
    batch = next(iter(held(["abcdef", "xy", "z"], batch_size=2, sequence_length=4)))
    end = 256
    assert batch["tokens"].tolist() == [[*b"abcd"], [*b"efxy"]]
    assert batch["targets"].tolist() == [[*b"bcde"], [*b"f", end, *b"y", end]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert batch["documents"].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert batch["weights"].tolist() == [[1.0] * 4] * 2


def test_last_validation_batch_is_padded_with_nothing():
    batches = held(["abcdef", "xy", "z"], batch_size=2, sequence_length=4)
    first, last = list(batches)
    assert last["tokens"].shape == first["tokens"].shape == (2, 4)
    assert last["tokens"].tolist() == [[ord("z"), 0, 0, 0], [0, 0, 0, 0]]
    assert last["weights"].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert last["segment_ids"].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert last["documents"].tolist() == [[2, -1, -1, -1], [-1, -1, -1, -1]]


def test_validation_is_the_same_every_time_and_whole():
    batches = held(TEXTS)
    one, two = list(batches), list(batches)
    assert len(one) == len(two) > 2
    assert all(same(a, b) for a, b in zip(one, two, strict=True))
    assert targets_of(one) == expected_targets(TEXTS)
    limited = list(held(TEXTS, limit=2))
    assert len(limited) == 2
    assert all(same(a, b) for a, b in zip(limited, one, strict=False))


def test_segments_never_mix_documents():
    iterator = train(TEXTS)
    for _ in range(20):
        batch = next(iterator)
        for segments, positions, documents in zip(
            batch["segment_ids"], batch["positions"], batch["documents"], strict=True
        ):
            starts = np.flatnonzero(np.diff(segments, prepend=0))
            assert segments[starts].tolist() == list(range(1, len(starts) + 1))
            assert positions[starts].tolist() == [0] * len(starts)
            assert (np.diff(positions)[np.diff(segments) == 0] == 1).all()
            assert all(len(set(documents[segments == s])) == 1 for s in set(segments))


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_target_once(shuffle):
    # An epoch has 40 rows of 16 targets, so epochs end at batch boundaries.
    texts = [f"{n:02d}" + "x" * 14 for n in range(40)]
    iterator = train(texts, shuffle=shuffle)
    for _ in range(3):
        assert targets_of(next(iterator) for _ in range(10)) == expected_targets(texts)


def test_each_epoch_has_an_order_of_its_own():
    texts = [f"{n:02d}" + "x" * 14 for n in range(40)]

    def epochs(**fields):
        iterator = train(texts, batch_size=40, shuffle_window=1, **fields)
        return [next(iterator)["documents"][:, 0].tolist() for _ in range(3)]

    shuffled = epochs()
    assert len({tuple(order) for order in shuffled}) == 3
    assert all(sorted(order) == list(range(40)) for order in shuffled)
    assert epochs() == shuffled
    assert epochs(seed=1)[0] not in shuffled
    assert epochs(seed=1)[0] != epochs(seed=0)[1]  # nearby seeds do not give the same order shifted by an epoch
    assert epochs(shuffle=False) == [list(range(40))] * 3


def test_packed_rows_are_mixed():
    long = ["a" * 160, "b" * 160, "c" * 160, "d" * 160]

    def kinds(**fields):
        batch = next(train(long, batch_size=8, **fields))
        return len(np.unique(batch["documents"]))

    assert kinds(shuffle_window=1) <= 2
    assert kinds(shuffle_window=40) > 2


@pytest.mark.parametrize("window", [1, 5, 10])  # divisors of an epoch, so epochs end at window boundaries
def test_ten_items_three_epochs_resumed_after_batch_seven(window):
    tokens = [np.arange(n, n + 17, dtype=np.int32) for n in range(10)]  # one row each
    iterator = train(tokens, batch_size=2, shuffle_window=window)
    before = [next(iterator)["documents"][:, 0].tolist() for _ in range(7)]
    state = json.loads(json.dumps(iterator.get_state()))
    after = [next(iterator)["documents"][:, 0].tolist() for _ in range(8)]
    fresh = train(tokens, batch_size=2, shuffle_window=window)
    fresh.set_state(state)
    assert [next(fresh)["documents"][:, 0].tolist() for _ in range(8)] == after
    assert sorted(i for pair in before + after for i in pair) == sorted(list(range(10)) * 3)


@pytest.mark.parametrize("fields", [{}, {"shuffle": False}, {"shuffle_window": 1}, {"sequence_length": 7}])
def test_resuming_anywhere_gives_the_same_batches(fields):
    iterator = train(TEXTS, batch_size=3, **fields)
    states, batches = [], []
    for _ in range(30):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    other = train(TEXTS, batch_size=3, **fields)
    for start in (0, 1, 2, 3, 5, 8, 13, 21, 29, 4):  # also backwards
        other.set_state(json.loads(states[start]))
        assert json.dumps(other.get_state()) == states[start]
        for batch in batches[start : start + 4]:
            assert same(next(other), batch), start


def test_resuming_far_on_reads_little():
    documents = Memory(TEXTS * 50)
    reads = []
    original = documents.__class__.__getitem__

    class Counted(Memory):
        def __getitem__(self, i):
            reads.append(i)
            return original(self, i)

    config = DataConfig(source="text", sequence_length=16, shuffle_window=8)
    split = sources.Split(Counted(documents.items), documents)
    iterator = pipeline.train_iterator(config, 4, split=split)
    for _ in range(150):
        next(iterator)
    state = iterator.get_state()
    assert len(json.dumps(state)) < 2000
    fresh = pipeline.train_iterator(config, 4, split=split)
    reads.clear()
    work = calls.count(lambda: fresh.set_state(state))
    assert same(next(fresh), next(iterator))
    assert work < 30_000, work  # 7,052 on Python 3.11 with Grain 0.2.18
    assert len(reads) < 150  # compared with about 1,000 up to this point


def test_a_state_of_other_data_is_refused():
    state = train(TEXTS).get_state()
    with pytest.raises(UserError, match=r"config.data.seed is 1 but was 0 when this state was saved"):
        train(TEXTS, seed=1).set_state(state)
    with pytest.raises(UserError, match="the number of training documents is 39 but was 40"):
        train(TEXTS[:-1]).set_state(state)


def joined(iterators):
    """Merges the next batches of several processes' iterators into one global batch."""
    batches = [next(iterator) for iterator in iterators]
    rows = np.concatenate([iterator.rows for iterator in iterators])
    assert sorted(rows) == list(range(len(rows)))
    return {key: np.concatenate([batch[key] for batch in batches])[np.argsort(rows)] for key in batches[0]}


def shares(processes, streams=4):
    return [range(p * streams // processes, (p + 1) * streams // processes) for p in range(processes)]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_batches_do_not_depend_on_the_number_of_processes(processes):
    whole = train(TEXTS, 8, streams=4)
    parts = [train(TEXTS, 8, share, streams=4) for share in shares(processes)]
    for _ in range(25):
        assert same(joined(parts), next(whole))
    other = train(TEXTS, 8, streams=2)
    assert not same(next(other), next(train(TEXTS, 8, streams=4)))  # batches do depend on the number of streams


def test_a_process_reads_only_the_documents_of_its_streams():
    reads = set()

    class Counted(Memory):
        def __getitem__(self, i):
            reads.add(i)
            return super().__getitem__(i)

    config = DataConfig(source="text", sequence_length=16, streams=4, shuffle=False, shuffle_window=1)
    iterator = pipeline.train_iterator(config, 8, [1], split=sources.Split(Counted(TEXTS), Memory(TEXTS)))
    reads.clear()  # drop the reads of the length check
    for _ in range(10):
        next(iterator)
    assert reads
    assert all(i % 4 == 1 for i in reads)


def test_resuming_with_another_number_of_processes_goes_on_with_the_same_batches():
    """Uses sixteen streams: one process reads them without threads, four processes with threads."""
    whole = train(TEXTS, 16, streams=16)
    parts = [train(TEXTS, 16, share, streams=16) for share in shares(2, 16)]
    for _ in range(5):
        joined(parts)
        next(whole)
    state = {}
    for part in parts:
        state |= part.get_state()
    state = json.loads(json.dumps(state))
    want = [next(whole) for _ in range(6)]
    for processes in (1, 4, 2):
        resumed = [train(TEXTS, 16, share, streams=16) for share in shares(processes, 16)]
        for part in resumed:
            part.set_state(state)
        assert all(same(joined(resumed), batch) for batch in want), processes
    del state["3"]
    with pytest.raises(UserError, match="no position for data stream 3"):
        resumed[0].set_state(state)


def test_streams_share_an_epoch_and_hold_every_target_once():
    texts = [f"{n:02d}" + "x" * 14 for n in range(40)]
    parts = [train(texts, 4, share, streams=2, shuffle_window=5) for share in shares(2, 2)]
    for _ in range(2):  # epochs
        batches = [[next(part) for _ in range(10)] for part in parts]
        assert batches[0][0]["tokens"].shape == (2, 16)
        held = [{int(i) for batch in share for i in batch["documents"].ravel()} for share in batches]
        assert not held[0] & held[1]
        assert held[0] | held[1] == set(range(40))
        assert targets_of(batches[0] + batches[1]) == expected_targets(texts)


def test_one_stream_is_what_it_always_was():
    """Batches equal those recorded before streams existed, so a run from that time resumes unchanged."""
    documents = [next(it)["documents"][:, 0].tolist() for it in [train(TEXTS)] for _ in range(4)]
    assert documents == ONE_STREAM


def test_streams_that_cannot_be_filled_are_refused():
    with pytest.raises(
        UserError, match=r"batch_size \(5\) is not a multiple of config.data.streams \(2\).*next multiple is 6"
    ):
        train(TEXTS, 5, streams=2)
    with pytest.raises(UserError, match=r"streams \(8\) exceeds the number of training documents \(5\)"):
        train([text * 20 for text in TEXTS[5:10]], 8, streams=8)


def test_threads_are_bounded():
    before = threading.active_count()
    iterator = train(TEXTS * 4, 64, streams=64)
    next(iterator)
    assert threading.active_count() - before <= 2 * pipeline._READING_THREADS


def test_documents_can_be_named():
    iterator = train(TEXTS)
    documents = next(iterator)["documents"]
    names = iterator.document_names(documents)
    assert set(names) == {f"document {i}" for i in np.unique(documents)}
    assert len(set(names)) == len(names)
    assert iterator.document_names(np.array([[3, -1], [3, 1]])) == ["document 3", "document 1"]


def test_begin_and_end_ids_frame_each_document():
    tokenizer = ByteTokenizer()
    tokenizer.bos_id = 7
    example = pipeline.Examples(Memory(["ab"]), tokenizer)[0]
    assert example["tokens"].tolist() == [7, *b"ab"]
    assert example["targets"].tolist() == [*b"ab", 256]
    tokenizer.end_ids = ()
    assert pipeline.Examples(Memory(["ab"]), tokenizer)[0]["targets"].tolist() == [*b"ab"]


def test_one_token_documents_leave_no_hole():
    tokens = [np.array([5], np.int32), np.arange(9, dtype=np.int32)] * 4
    batch = next(train(tokens, sequence_length=8, batch_size=4))
    assert batch["segment_ids"].tolist() == [[1] * 8] * 4


def test_errors():
    said = r"config.data.sequence_length \(64\) is longer than the data \(6 tokens to train on\)"
    with pytest.raises(UserError, match=said):
        train(["abc", "def"], sequence_length=64)
    config = DataConfig(source="text")
    split = sources.Split(Memory(TEXTS), Memory(TEXTS))
    with pytest.raises(UserError, match=r"'bytes' has 257 ids, more than config.model.vocab_size \(256\)"):
        pipeline.train_iterator(config, 4, vocab_size=256, split=split)
    with pytest.raises(UserError, match=r"matches no file"):
        pipeline.train_iterator(DataConfig(source="text", path="nowhere/*.txt"), 4)


def test_an_error_in_a_document_reaches_the_caller():
    class Broken(Memory):
        def __getitem__(self, i):
            if i == 7:
                raise UserError("document 7 has gone")
            return super().__getitem__(i)

    config = DataConfig(source="text", sequence_length=16)
    iterator = pipeline.train_iterator(config, 4, split=sources.Split(Broken(TEXTS), Memory(TEXTS)))
    with pytest.raises(UserError, match="document 7 has gone"):
        collections.deque(iterator, maxlen=0)  # endless except for the error


def test_from_files_end_to_end(tmp_path):
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    config = DataConfig(source="tokens", path=str(tmp_path / "a.bin"), sequence_length=16, tokenizer="nowhere")
    batch = next(pipeline.train_iterator(config, 4, vocab_size=2000))
    assert (batch["targets"] == batch["tokens"] + 1).all()
    batches = list(pipeline.validation_batches(config, 4, 3, vocab_size=2000))
    assert 0 < len(batches) <= 3
    iterator = pipeline.train_iterator(DataConfig(sequence_length=64), 4)  # the Python source
    batch = next(iterator)
    assert batch["tokens"].max() <= 256
    assert all(name.endswith(".py") for name in iterator.document_names(batch["documents"]))


def test_ends_of_documents_beyond_the_vocabulary_are_refused(tmp_path):
    """End ids that the pipeline inserts must be in the vocabulary (lookups clamp); names without text need not be."""
    texts.save(chats.text(begins=True), tmp_path / "made")
    (tmp_path / "a.txt").write_text("some words\n" * 200)
    config = DataConfig(
        source="text", path=str(tmp_path / "*.txt"), tokenizer=str(tmp_path / "made"), sequence_length=8
    )
    assert next(pipeline.train_iterator(config, 1, vocab_size=chats.END + 1))["tokens"].max() <= chats.END
    with pytest.raises(UserError, match=rf"begins or ends documents with id {chats.END}, but .*vocab_size is 258"):
        pipeline.train_iterator(config, 1, vocab_size=chats.END)
    with pytest.raises(UserError, match=rf"with id {chats.BEGIN}, but .*vocab_size is 256"):
        pipeline.train_iterator(config, 1, vocab_size=256)
    with pytest.raises(UserError, match=r"has 259 ids, more than config.model.vocab_size \(200\)"):
        pipeline.train_iterator(config, 1, vocab_size=200)
