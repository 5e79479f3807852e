"""Batches from several document streams, with the position in each stream as JSON-serializable state.

The endless sequence of documents is dealt round-robin to config.data.streams streams. Each stream packs and shuffles
its own rows, and a global batch concatenates the rows of the streams: stream s fills rows s·B/S to (s+1)·B/S. The
content of a batch therefore depends on the number of streams and not on the number of processes. Each process reads
only the streams that fill rows on its devices.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from jaxllm.data import Batch
from jaxllm.data.documents import Documents
from jaxllm.errors import UserError


class TrainIterator:
    """Endless iterator over the rows of some streams, with save and restore of its position.

    Args:
      datasets: {stream: Grain dataset of its rows of each batch}.
      documents: the training documents, for their names.
      identity: settings that determine the order of batches; a state can only be restored with equal values.
      rows_per_stream: rows of a batch that each stream fills.
    Attributes:
      rows: indices in the global batch of the rows of this iterator, in order.
    """

    def __init__(
        self,
        datasets: Mapping[int, grain.IterDataset],
        documents: Documents,
        identity: dict[str, Any],
        rows_per_stream: int,
    ):
        self._iterators = {stream: iter(dataset) for stream, dataset in sorted(datasets.items())}
        self._documents = documents
        self._identity = identity
        n = rows_per_stream
        self.rows = np.concatenate([np.arange(stream * n, (stream + 1) * n) for stream in self._iterators])

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        parts = [next(iterator) for iterator in self._iterators.values()]
        return parts[0] if len(parts) == 1 else {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}

    def get_state(self) -> dict[str, dict[str, Any]]:
        """Returns {stream: position of its next rows}, JSON-serializable and small for a corpus of any size."""
        # Convert through JSON, so that a state from memory restores exactly like one from a file.
        return {
            str(stream): json.loads(json.dumps({"identity": self._identity, "iterator": iterator.get_state()}))
            for stream, iterator in self._iterators.items()
        }

    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores a state from `get_state`; the following batches are identical, token for token.

        Reads at most one shuffle window of rows per stream again.

        Args:
          state: states of at least the streams of this iterator, saved by any processes.
        Raises:
          UserError: the state of a stream is missing, or the data or a setting that orders it has changed.
        """
        for stream, iterator in self._iterators.items():
            position = state.get(str(stream))
            if position is None:
                raise UserError(
                    f"the saved state has no position for data stream {stream}; restore data/{stream}.json of the "
                    "checkpoint"
                )
            saved = position["identity"]
            for name, value in self._identity.items():
                if saved.get(name) != value:
                    raise UserError(
                        f"{name} is {value} but was {saved.get(name)} when this state was saved; "
                        "resume with the same data settings, or start a new run in another --workdir"
                    )
            iterator.set_state(_tuples(position["iterator"]))

    def document_names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Returns the unique names of the documents in a `documents` field, in order of appearance; skips -1."""
        found = dict.fromkeys(int(i) for i in np.ravel(indices) if i >= 0)
        return [self._documents.name(i) for i in found]


def _tuples(state: Any) -> Any:
    """Converts lists to tuples recursively: Grain's packing compares its slices with tuples; JSON has only lists."""
    if isinstance(state, dict):
        return {key: _tuples(value) for key, value in state.items()}
    return tuple(_tuples(value) for value in state) if isinstance(state, list) else state
