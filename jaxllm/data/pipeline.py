"""Documents to batches: shuffle, tokenize, pack, batch; and the exact place to resume from.

One row of a batch is sequence_length tokens of consecutive documents, cut without loss: a document that does
not fit goes on in a later row. Every document is [begin] text [end] with the tokenizer's own ids, if it has
them; its inputs are all tokens but the last, its targets all but the first. An epoch so holds every target once;
mixing the rows (config.data.shuffle_window) can put its last ones among the first of the next.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np
from grain import experimental
from jaxtyping import Float32, Int32

from jaxllm.config import DataConfig
from jaxllm.data import sources
from jaxllm.errors import UserError
from jaxllm.interop import tokenizer as tokenizers

Batch = dict[str, np.ndarray]  # the fields below and "documents", each [batch, sequence_length]

# What goes to the device. `documents` (int32, index of each token's document, -1 on padding) stays on the host.
BATCH_FIELDS: dict[str, type] = {
    "tokens": np.int32,
    "targets": np.int32,
    "segment_ids": np.int32,  # from 1 in each row; 0 is padding; attention stays within one
    "positions": np.int32,  # from 0 in each document, and again in each row that it goes on in
    "weights": np.float32,  # 1 where the target counts, 0 on padding
}

# Two threads read ahead: enough to hide a disk, and little to read again on resuming.
_READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)


class Examples:
    """Tokenized documents at random access, for Grain.

    Args:
      documents: where the texts come from.
      tokenizer: None where documents are tokens already.
    """

    def __init__(self, documents: sources.Documents, tokenizer: tokenizers.Tokenizer | None):
        self.documents, self.tokenizer = documents, tokenizer

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, i: int) -> dict[str, Int32[np.ndarray, " n"]]:
        document = self.documents[i]
        ids = document["tokens"] if self.tokenizer is None else self._encode(document["text"], self.tokenizer)
        return {"tokens": ids[:-1], "targets": ids[1:], "documents": np.full(len(ids) - 1, i, np.int32)}

    @staticmethod
    def _encode(text: str, tokenizer: tokenizers.Tokenizer) -> Int32[np.ndarray, " n"]:
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = np.concatenate([begin, tokenizer.encode(text), tokenizer.end_ids[:1]])
        return ids.astype(np.int32)


class TrainIterator:
    """Endless batches, and the place in them as plain data.

    Args:
      dataset: the Grain dataset of batches.
      documents: the training documents, to name them.
      identity: the numbers that fix the order of batches; a state is good only for the same ones.
    """

    def __init__(self, dataset: grain.IterDataset, documents: sources.Documents, identity: dict[str, Any]):
        self._iterator = iter(dataset)
        self._documents = documents
        self._identity = identity

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Where the next batch begins, as JSON can hold it; a small dictionary whatever the corpus."""
        # Through JSON at once, so that a state from memory and one from a file restore alike.
        return json.loads(json.dumps({"identity": self._identity, "iterator": self._iterator.get_state()}))

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a place that `get_state` gave: the batches after it are the same ones, to the token.

        Reads again at most one shuffle window of rows.

        Raises:
          UserError: the data, or a setting that orders it, is not what it was.
        """
        for name, value in self._identity.items():
            if state["identity"].get(name) != value:
                raise UserError(
                    f"{name} is {value} but was {state['identity'].get(name)} when this state was saved; "
                    "resume with the same data settings, or start a new run"
                )
        self._iterator.set_state(_tuples(state["iterator"]))

    def document_names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Names of the documents in a `documents` field, each once, in order of first appearance; -1 is skipped."""
        found = dict.fromkeys(int(i) for i in np.ravel(indices) if i >= 0)
        return [self._documents.name(i) for i in found]


def _tuples(state: Any) -> Any:
    """Lists to tuples throughout: Grain's packing compares its slices with tuples, and JSON has only lists."""
    if isinstance(state, dict):
        return {key: _tuples(value) for key, value in state.items()}
    return tuple(_tuples(value) for value in state) if isinstance(state, list) else state


def train_iterator(
    config: DataConfig,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    *,
    vocab_size: int | None = None,
    split: sources.Split | None = None,
) -> TrainIterator:
    """Batches of the training documents without end, in a new order each epoch.

    Args:
      config: what to read.
      batch_size: rows of a step over all hosts.
      process_index: this host.
      process_count: hosts; each takes every process_count-th document of one common order.
      vocab_size: ids that the model knows; None takes the tokenizer's.
      split: the opened corpus, where the caller has it already.
    Returns:
      An iterator of batches of batch_size // process_count rows.
    Raises:
      UserError: data that cannot be used, or that does not fill one sequence.
    """
    if batch_size % process_count:
        raise UserError(
            f"config.train.batch_size ({batch_size}) is not a multiple of the number of hosts ({process_count}); "
            f"the next that is: {-(-batch_size // process_count) * process_count}"
        )
    examples, documents = _open(config, vocab_size, split, validation=False)
    _check_length(examples, config.sequence_length)
    order = grain.MapDataset.source(examples)
    if config.shuffle:
        order = order.shuffle(seed=_seed(config.seed, "documents"))
    order = order.repeat()[process_index::process_count]
    rows = _packed(order, config.sequence_length)
    if config.shuffle:
        seed = _seed(config.seed, "rows")
        rows = experimental.WindowShuffleIterDataset(rows, window_size=config.shuffle_window, seed=seed)
    identity = {
        "config.data.sequence_length": config.sequence_length,
        "config.data.shuffle": config.shuffle,
        "config.data.shuffle_window": config.shuffle_window,
        "config.data.seed": config.seed,
        "the number of training documents": len(documents),
        "the number of hosts": process_count,
        "the index of this host": process_index,
    }
    return TrainIterator(rows.batch(batch_size // process_count).map(_finished), documents, identity)


class ValidationBatches:
    """The same batches at every iteration. Each pass reads and tokenizes anew, so that none is kept in memory."""

    def __init__(self, dataset: grain.IterDataset, limit: int):
        self._dataset, self._limit = dataset, limit

    def __iter__(self) -> Iterator[Batch]:
        for _, batch in zip(range(self._limit), self._dataset, strict=False):
            yield batch


def validation_batches(
    config: DataConfig,
    batch_size: int,
    limit: int,
    *,
    vocab_size: int | None = None,
    split: sources.Split | None = None,
) -> ValidationBatches:
    """The held-out documents in order, once.

    Args:
      config: what to read.
      batch_size: rows of every batch; the last is filled up with rows of zero weight, so that one shape serves.
      limit: batches at most.
      vocab_size: ids that the model knows; None takes the tokenizer's.
      split: the opened corpus, where the caller has it already.
    Raises:
      UserError: data that cannot be used.
    """
    examples, _ = _open(config, vocab_size, split, validation=True)
    rows = _packed(grain.MapDataset.source(examples), config.sequence_length)
    batches = rows.batch(batch_size, batch_fn=_padded_to(batch_size))
    return ValidationBatches(batches.map(_finished), limit)


def _open(
    config: DataConfig, vocab_size: int | None, split: sources.Split | None, validation: bool
) -> tuple[Examples, sources.Documents]:
    """One part of the corpus with its tokenizer, after checking that the model knows the ids."""
    tokenizer = None
    if config.source != "tokens" or vocab_size is None:
        tokenizer = tokenizers.load(config.tokenizer)
        vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        if tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"config.data.tokenizer {config.tokenizer!r} has {tokenizer.vocab_size} ids, more than "
                f"config.model.vocab_size ({vocab_size}); raise the second to {tokenizer.vocab_size}"
            )
    parts = sources.split(config, vocab_size) if split is None else split
    documents = parts.validation if validation else parts.training
    return Examples(documents, None if config.source == "tokens" else tokenizer), documents


def _check_length(examples: Examples, sequence_length: int) -> None:
    targets = 0
    for i in range(len(examples)):  # seldom beyond the first few
        targets += len(examples[i]["targets"])
        if targets >= sequence_length:
            return
    raise sources.too_short(sequence_length, targets)


def _packed(order: grain.MapDataset, sequence_length: int) -> grain.IterDataset:
    # A document of one token has no target, and would leave a hole in the numbering of segments.
    examples = order.filter(lambda example: len(example["targets"]) > 0).to_iter_dataset(_READ_OPTIONS)
    lengths = dict.fromkeys(("tokens", "targets", "documents"), sequence_length)
    return experimental.ConcatThenSplitIterDataset(examples, length_struct=lengths)


def _padded_to(batch_size: int) -> Callable[[Sequence[dict[str, np.ndarray]]], dict[str, np.ndarray]]:
    return lambda rows: experimental.batch_and_pad(rows, batch_size=batch_size)


def _finished(
    packed: dict[str, Int32[np.ndarray, "B T"]],
) -> dict[str, Int32[np.ndarray, "B T"] | Float32[np.ndarray, "B T"]]:
    """The fields of a batch from what packing gives; padding there is all zeros."""
    segments = packed["targets_segment_ids"]
    return {
        "tokens": packed["tokens"],
        "targets": packed["targets"],
        "segment_ids": segments,
        "positions": packed["targets_positions"],
        "weights": (segments > 0).astype(np.float32),
        "documents": np.where(segments > 0, packed["documents"], -1).astype(np.int32),
    }


def _seed(seed: int, use: str) -> int:
    """A seed of its own for each use. Grain adds the epoch to it, so that near seeds would share their orders."""
    return int(np.random.SeedSequence([seed % 2**32, *use.encode()]).generate_state(1)[0] >> 1)
