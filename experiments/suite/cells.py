"""Pairwise grid of the correctness section: every value of a factor occurs with every value of each other factor."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Cell = dict[str, Any]

FLASH: dict[str, Sequence[Any]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "lengths": ((1, 129), (33, 100), (100, 33), (192, 192), (1000, 1000)),  # queries, keys
    "head_dim": (64, 80, 128, 256),
    "group": (1, 4),
    "window": (0, 37),
    "softcap": (0.0, 20.0),
    "segmented": (False, True),
    "causal": (True, False),
}
DECODE: dict[str, Sequence[Any]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "slots": (1, 127, 512, 4097),
    "head_dim": (64, 80, 128, 256),
    "group": (1, 4, 8),
    "tokens": (1, 3),
    "reach": ("all", "window", "ring"),
    "softcap": (0.0, 20.0),
    "int8": (False, True),
}
TINY = {
    "flash": {"dtype": ("bfloat16",), "lengths": ((33, 40),), "head_dim": (16,), "causal": (True,)},
    "decode": {"dtype": ("bfloat16",), "slots": (40,), "head_dim": (16,), "int8": (True,)},
}


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Returns a small, deterministic set of cells in which each pair of values of two factors occurs.

    Greedy: a cell starts with an uncovered pair and takes, for each other factor, the value that covers most new pairs.
    """
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(factors[a], factors[b])
    }
    order = sorted(missing, key=repr)
    cells = []
    for pair in order:
        if pair not in missing:
            continue
        cell = dict(pair)
        for name in names:
            if name in cell:
                continue
            cell[name] = max(
                factors[name], key=lambda x, name=name: len(missing & set(_pairs({**cell, name: x}, names)))
            )
        missing -= set(_pairs(cell, names))
        cells.append({name: cell[name] for name in names})
    return cells


def _pairs(cell: Cell, names: Sequence[str]) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    known = [(name, cell[name]) for name in names if name in cell]
    return list(itertools.combinations(known, 2))


def grid(kind: str, tiny: bool) -> list[Cell]:
    """Returns the cells of "flash" or "decode"; tiny cells use the values in TINY, else each factor's first value."""
    factors = {"flash": FLASH, "decode": DECODE}[kind]
    if tiny:
        factors = {name: TINY[kind].get(name, values[:1]) for name, values in factors.items()}
    return pairwise(factors)
