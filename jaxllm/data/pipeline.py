"""Data pipeline from documents to batches: shuffle, tokenize, pack and batch, with exact resumption.

One row of a batch is sequence_length tokens of consecutive documents. Nothing is dropped: a document that does not fit
continues in a later row. Every document is [begin] text [end], with the tokenizer's begin and end ids if it has them.
Its inputs are all tokens but the last, its targets all tokens but the first, so an epoch contains every target once.
Shuffling rows (config.data.shuffle_window) can move the last rows of an epoch among the first rows of the next.

Conversations (the chat source) are not cut: each is packed whole into the first open row with enough room, and the
rest of a row is padding. An answer therefore always follows its question in the same row.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import grain
import numpy as np
from grain import experimental
from jaxtyping import Float32, Int32

from jaxllm.config import DataConfig, validate
from jaxllm.data import Batch, sources
from jaxllm.data.documents import Documents, too_short
from jaxllm.data.streams import TrainIterator
from jaxllm.errors import UserError
from jaxllm.interop import text as texts
from jaxllm.interop.text import Text
from jaxllm.interop.tokenizer import Tokenizer

_PACKING_BINS = 16  # candidate rows for a conversation; more rows mean less padding and more mixing of epochs
_READING_THREADS = 8  # per process, for any number of streams


def _read_options(streams: int) -> grain.ReadOptions:
    """Returns the read-ahead of each stream, for a process that reads `streams` streams.

    Two threads per stream hide disk latency and leave little to read again on resuming. With more streams than
    threads, documents are read on demand.
    """
    threads = min(2, _READING_THREADS // streams)
    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=8 * threads)


class Examples:
    """Random-access Grain source of tokenized documents.

    Args:
      documents: source of the documents.
      tokenizer: encodes texts; None if documents are token ids already.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer | None):
        self.documents, self.tokenizer = documents, tokenizer

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, i: int) -> dict[str, Int32[np.ndarray, " n"] | Float32[np.ndarray, " n"]]:
        document = self.documents[i]
        ids = document["tokens"] if self.tokenizer is None else self._encode(document["text"], self.tokenizer)
        weights = document["weights"] if "weights" in document else np.ones(len(ids))
        return {
            "tokens": ids[:-1],
            "targets": ids[1:],
            "weights": weights[1:].astype(np.float32),  # the weight of a target, which is the next token
            "documents": np.full(len(ids) - 1, i, np.int32),
        }

    @staticmethod
    def _encode(text: str, tokenizer: Tokenizer) -> Int32[np.ndarray, " n"]:
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = np.concatenate([begin, tokenizer.encode(text), tokenizer.end_ids[:1]])
        return ids.astype(np.int32)


def train_iterator(
    config: DataConfig,
    batch_size: int,
    streams: Iterable[int] | None = None,
    *,
    vocab_size: int | None = None,
    split: sources.Split | None = None,
    text: Text | None = None,
) -> TrainIterator:
    """Creates an endless iterator over batches of training documents, in a new order each epoch if shuffled.

    Args:
      config: data configuration; its `streams` must divide the batch.
      batch_size: rows of a step over all processes.
      streams: streams whose rows this process needs; all by default.
      vocab_size: vocabulary size of the model; the tokenizer's if None.
      split: the opened corpus, if the caller already has it.
      text: tokenizer and chat template of the model; loaded from `config.tokenizer` if None.
    Returns:
      An iterator over batches with batch_size // config.streams rows per stream.
    Raises:
      UserError: the data is not usable, does not fill one sequence, or has fewer documents than streams.
    """
    count = config.streams
    validate.check_streams(batch_size, count)
    chosen = sorted(range(count) if streams is None else streams)
    examples, documents = _open(config, vocab_size, split, text, validation=False)
    if config.source != "chat":
        _check_length(examples, config.sequence_length)
    if len(documents) < count:
        raise UserError(
            f"config.data.streams ({count}) exceeds the number of training documents ({len(documents)}), so streams "
            f"would repeat documents; set --config.data.streams to {len(documents)} or less"
        )
    order = grain.MapDataset.source(examples)
    if config.shuffle:
        order = order.shuffle(seed=_seed(config.seed, "documents"))
    order = order.repeat()
    rows_per_stream = batch_size // count
    datasets = {}
    for stream in chosen:
        rows = _pack(order[stream::count], config, _read_options(len(chosen)))
        if config.shuffle:
            # Stream 0 has the seed of a single-stream run; the others need different seeds to shuffle differently.
            seed = _seed(config.seed, f"rows {stream}" if stream else "rows")
            rows = experimental.WindowShuffleIterDataset(rows, window_size=config.shuffle_window, seed=seed)
        datasets[stream] = rows.batch(rows_per_stream).map(_to_batch)
    identity = {
        "config.data.sequence_length": config.sequence_length,
        "config.data.shuffle": config.shuffle,
        "config.data.shuffle_window": config.shuffle_window,
        "config.data.seed": config.seed,
        "config.data.streams": count,
        "the number of training documents": len(documents),
    }
    return TrainIterator(datasets, documents, identity, rows_per_stream)


class ValidationBatches:
    """Re-iterable validation batches, the same each time; every pass reads and tokenizes again to save memory."""

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
    text: Text | None = None,
) -> ValidationBatches:
    """Returns batches of the held-out documents, in order and each document once.

    Args:
      config: data configuration.
      batch_size: rows of every batch; the last batch is padded with rows of zero weight, so all have one shape.
      limit: maximum number of batches.
      vocab_size: vocabulary size of the model; the tokenizer's if None.
      split: the opened corpus, if the caller already has it.
      text: tokenizer and chat template of the model; loaded from `config.tokenizer` if None.
    Raises:
      UserError: the data is not usable.
    """
    examples, _ = _open(config, vocab_size, split, text, validation=True)
    rows = _pack(grain.MapDataset.source(examples), config, _read_options(1))
    batches = rows.batch(batch_size, batch_fn=_pad_to(batch_size))
    return ValidationBatches(batches.map(_to_batch), limit)


def _open(
    config: DataConfig, vocab_size: int | None, split: sources.Split | None, text: Text | None, validation: bool
) -> tuple[Examples, Documents]:
    """Opens the training or validation part with its tokenizer.

    Raises:
      UserError: the tokenizer has ids outside the model's vocabulary, or the data is not usable.
    """
    tokenizer = None
    if config.source != "tokens" or vocab_size is None:
        text = text or texts.load(config.tokenizer, vocab_size or sys.maxsize)
        tokenizer = text.tokenizer
        assert tokenizer is not None
        vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        if tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"config.data.tokenizer {config.tokenizer!r} has {tokenizer.vocab_size} ids, more than "
                f"config.model.vocab_size ({vocab_size}); set config.model.vocab_size to {tokenizer.vocab_size}, or "
                "use the model's own tokenizer"
            )
        for special_id in (tokenizer.bos_id, *tokenizer.end_ids[:1]) if config.source != "chat" else ():
            if special_id is not None and special_id >= vocab_size:
                raise UserError(
                    f"config.data.tokenizer {config.tokenizer!r} begins or ends documents with id {special_id}, but "
                    f"config.model.vocab_size is {vocab_size}; set it to {special_id + 1}, or use the model's own "
                    "tokenizer"
                )
    parts = sources.split(config, vocab_size, text) if split is None else split
    documents = parts.validation if validation else parts.training
    return Examples(documents, None if config.source in ("tokens", "chat") else tokenizer), documents


def _check_length(examples: Examples, sequence_length: int) -> None:
    targets = 0
    for i in range(len(examples)):  # usually stops after a few documents
        targets += len(examples[i]["targets"])
        if targets >= sequence_length:
            return
    raise too_short(sequence_length, targets)


def _pack(order: grain.MapDataset, config: DataConfig, reading: grain.ReadOptions) -> grain.IterDataset:
    # A document of one token has no target, and would leave a gap in the segment ids.
    examples = order.filter(lambda example: len(example["targets"]) > 0).to_iter_dataset(reading)
    lengths = dict.fromkeys(("tokens", "targets", "weights", "documents"), config.sequence_length)
    if config.source == "chat":
        return experimental.FirstFitPackIterDataset(
            examples, length_struct=lengths, num_packing_bins=_PACKING_BINS, shuffle_bins=False
        )
    return experimental.ConcatThenSplitIterDataset(examples, length_struct=lengths)


def _pad_to(batch_size: int) -> Callable[[Sequence[dict[str, np.ndarray]]], dict[str, np.ndarray]]:
    return lambda rows: experimental.batch_and_pad(rows, batch_size=batch_size)


def _to_batch(
    packed: dict[str, Int32[np.ndarray, "B T"] | Float32[np.ndarray, "B T"]],
) -> dict[str, Int32[np.ndarray, "B T"] | Float32[np.ndarray, "B T"]]:
    """Converts the output of Grain's packing, padded with zeros, to the fields of a batch."""
    segments = packed["targets_segment_ids"]
    return {
        "tokens": packed["tokens"],
        "targets": packed["targets"],
        "segment_ids": segments,
        "positions": packed["targets_positions"],
        "weights": packed["weights"],
        "documents": np.where(segments > 0, packed["documents"], -1).astype(np.int32),
    }


def _seed(seed: int, use: str) -> int:
    """Derives an independent seed per use. Grain adds the epoch to it, so nearby seeds would repeat orders."""
    return int(np.random.SeedSequence([seed % 2**32, *use.encode()]).generate_state(1)[0] >> 1)
