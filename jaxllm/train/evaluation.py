"""Evaluation loss and bits per byte on the held-out documents."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np


class Evaluation(NamedTuple):
    """Result of an evaluation.

    Attributes:
      loss: nats per token.
      bits_per_byte: bits per byte of the original text; None if its length is unknown (a tokens source).
      tokens: number of targets with nonzero weight.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int


def evaluate(
    eval_step: Callable[[Any, dict[str, Any]], dict[str, Any]],
    weights: Any,
    batches: Iterable[dict[str, np.ndarray]],
    place: Callable[[dict[str, np.ndarray]], dict[str, Any]],
    byte_lengths: np.ndarray | None,
) -> Evaluation:
    """Computes the mean loss per token over all batches.

    Sums are divided once at the end, so that every token has the same weight although batches differ in padding.

    Args:
      eval_step: (weights, batch) -> {"nll", "tokens"}, sums over the batch; nll in nats.
      weights: first argument of `eval_step`.
      batches: host batches.
      place: puts a host batch on the devices.
      byte_lengths: [V] bytes of text per token id; None skips bits per byte.
    """
    nll = tokens = text_bytes = 0.0
    for batch in batches:
        sums = eval_step(weights, place(batch))
        if byte_lengths is not None:
            text_bytes += float((byte_lengths[batch["targets"]] * (batch["weights"] > 0)).sum())
        nll += float(sums["nll"])
        tokens += float(sums["tokens"])
    bits = nll / math.log(2) / text_bytes if text_bytes else None
    return Evaluation(nll / max(tokens, 1.0), bits, int(tokens))
