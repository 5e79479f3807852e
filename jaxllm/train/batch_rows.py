"""Assigns rows of a global batch to processes and places them on their devices."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.data import BATCH_FIELDS, Batch
from jaxllm.errors import UserError


def rows_of_processes(sharding: NamedSharding, batch_size: int) -> dict[int, frozenset[int]]:
    """Returns {process: rows of the global batch stored on its devices}.

    Processes that differ only along the `tensor` axis have the same rows.

    Args:
      sharding: sharding of the global batch [batch_size, T].
      batch_size: rows of the global batch.
    """
    rows_of: dict[int, set[int]] = {}
    indices: dict[Any, Any] = dict(sharding.devices_indices_map((batch_size, 1)))
    for device, (rows, _) in indices.items():
        rows_of.setdefault(device.process_index, set()).update(range(*rows.indices(batch_size)))
    return {process: frozenset(rows) for process, rows in sorted(rows_of.items())}


def streams_of_processes(rows: dict[int, frozenset[int]], batch_size: int, streams: int) -> dict[int, list[int]]:
    """Returns {process: streams that fill its rows}.

    Args:
      rows: the result of `rows_of_processes`.
      batch_size: rows of the global batch.
      streams: config.data.streams; must divide the batch.
    Raises:
      UserError: a stream fills rows of several processes, so that each of them would have to read the whole stream.
    """
    rows_per_stream = batch_size // streams
    found: dict[int, list[int]] = {}
    for process, needed in rows.items():
        found[process] = sorted({row // rows_per_stream for row in needed})
        if len(found[process]) * rows_per_stream != len(needed):
            parts = len(set(rows.values()))
            # The rows of a process may not be contiguous; one stream per row always works.
            fits = [n for n in range(parts, batch_size + 1, parts) if batch_size % n == 0 and n % streams == 0]
            better = fits[0] if fits else math.lcm(parts, batch_size)
            raise UserError(
                f"config.data.streams ({streams}) cannot be divided among the {parts} shards of a batch on "
                f"{len(rows)} processes without reading data twice; set --config.data.streams={better}"
            )
    return found


def owned_streams(streams: dict[int, list[int]], process: int) -> list[int]:
    """Returns the streams whose position `process` saves: those of which it is the lowest-numbered reader."""
    return [s for s in streams[process] if process == min(p for p, theirs in streams.items() if s in theirs)]


def place(batch: Batch, rows: np.ndarray, sharding: NamedSharding, batch_size: int) -> dict[str, jax.Array]:
    """Builds the global batch as sharded arrays from the rows that this process has read.

    Args:
      batch: fields of shape [local rows, T].
      rows: index in the global batch of each row of `batch`; must include all rows on this process's devices.
      sharding: sharding of the global batch [batch_size, T].
      batch_size: rows of the global batch.
    Returns:
      The fields of BATCH_FIELDS, each [batch_size, T].
    """
    where = np.full(batch_size, -1)
    where[rows] = np.arange(len(rows))

    def field(values: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            return values[where[index[0]], index[1]]

        return jax.make_array_from_callback((batch_size, values.shape[1]), sharding, shard)

    return {name: field(batch[name]) for name in BATCH_FIELDS}
