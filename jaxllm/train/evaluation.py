"""Loss on the held-out documents."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np


class Evaluation(NamedTuple):
    """Attributes:
    loss: nats a token.
    bits_per_byte: of the text behind the tokens; None where that is not known (a tokens source).
    tokens: trained targets evaluated.
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
    """Sums over batches of unequal fill, so that every token weighs the same.

    Args:
      eval_step: (weights, batch) -> {"nll", "tokens"} sums.
      place: puts a host batch on the devices.
      byte_lengths: [V] bytes of text that each token stands for.
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
