"""Batches drawn from several streams of documents at once, and the place in each as plain data.

The common endless order of documents is dealt to config.data.streams streams; each packs and mixes its own rows,
and a global batch is its streams' shares one after another: stream s fills rows s·B/S to (s+1)·B/S. What a batch
holds so depends on the number of streams and not on the number of processes, each of which reads only the streams
whose rows its devices take.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from jaxllm.data.documents import Documents
from jaxllm.errors import UserError

Batch = dict[str, np.ndarray]


class TrainIterator:
    """Endless batches of some streams' rows.

    Args:
      datasets: stream -> the Grain dataset of its share of each batch.
      documents: the training documents, to name them.
      identity: the numbers that fix the order of batches; a state is good only for the same ones.
      share: rows of a batch that each stream fills.
    Attributes:
      rows: which rows of the global batch those of this iterator are, in the same order.
    """

    def __init__(
        self,
        datasets: Mapping[int, grain.IterDataset],
        documents: Documents,
        identity: dict[str, Any],
        share: int,
    ):
        self._iterators = {stream: iter(dataset) for stream, dataset in sorted(datasets.items())}
        self._documents = documents
        self._identity = identity
        self.rows = np.concatenate([np.arange(stream * share, (stream + 1) * share) for stream in self._iterators])

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        shares = [next(iterator) for iterator in self._iterators.values()]
        return shares[0] if len(shares) == 1 else {k: np.concatenate([share[k] for share in shares]) for k in shares[0]}

    def get_state(self) -> dict[str, dict[str, Any]]:
        """Stream -> where its next rows begin, as JSON can hold it; small whatever the corpus."""
        # Through JSON at once, so that a state from memory and one from a file restore alike.
        return {
            str(stream): json.loads(json.dumps({"identity": self._identity, "iterator": iterator.get_state()}))
            for stream, iterator in self._iterators.items()
        }

    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Goes to a place that `get_state` gave: the batches after it are the same ones, to the token.

        Reads again at most one shuffle window of rows a stream.

        Args:
          state: of at least the streams of this iterator, whichever processes had them then.
        Raises:
          UserError: the data, or a setting that orders it, is not what it was.
        """
        for stream, iterator in self._iterators.items():
            place = state.get(str(stream))
            if place is None:
                raise UserError(f"there is no saved place in stream {stream} of the data; bring back its file")
            saved = place["identity"]
            for name, value in self._identity.items():
                if saved.get(name) != value:
                    raise UserError(
                        f"{name} is {value} but was {saved.get(name)} when this state was saved; "
                        "resume with the same data settings, or start a new run"
                    )
            iterator.set_state(_tuples(place["iterator"]))

    def document_names(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Names of the documents in a `documents` field, each once, in order of first appearance; -1 is skipped."""
        found = dict.fromkeys(int(i) for i in np.ravel(indices) if i >= 0)
        return [self._documents.name(i) for i in found]


def _tuples(state: Any) -> Any:
    """Lists to tuples throughout: Grain's packing compares its slices with tuples, and JSON has only lists."""
    if isinstance(state, dict):
        return {key: _tuples(value) for key, value in state.items()}
    return tuple(_tuples(value) for value in state) if isinstance(state, list) else state
