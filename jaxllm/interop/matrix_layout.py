"""Layout of matrices in checkpoints, which are [outputs, inputs]; ours have separate dimensions for heads.

On load, views are returned (transposes and reshapes) unless rows are permuted; elements are copied only once, into
their destination.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxllm.interop.rules import TensorMapping, Tensors


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """Conversion between our matrix [*inputs, *outputs] and a checkpoint's [outputs, inputs]; for a bias, no inputs.

    Attributes:
      inputs: input dimensions in our layout; empty for a bias.
      outputs: output dimensions in our layout.
      permuted: outputs are [heads, H], and the two elements of a rotary pair are adjacent in the file.
      lead: number of experts, the leading dimension in both layouts; 0 if there is none.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    permuted: bool = False
    lead: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.outputs)

    def load(self, tensor: np.ndarray) -> np.ndarray:
        lead = (self.lead,) if self.lead else ()
        if self.permuted:
            heads, H = self.outputs
            pairs = tensor.reshape(heads, H // 2, 2, *tensor.shape[1:])
            tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
        if self.inputs:
            tensor = tensor.reshape(*lead, self.count, math.prod(self.inputs)).swapaxes(-1, -2)
        return tensor.reshape(*lead, *self.inputs, *self.outputs)

    def save(self, array: np.ndarray) -> np.ndarray:
        lead = (self.lead,) if self.lead else ()
        rows = array.reshape(*lead, *([math.prod(self.inputs)] if self.inputs else []), self.count)
        if self.inputs:
            rows = rows.swapaxes(-1, -2)
        if self.permuted:
            heads, H = self.outputs
            rows = rows.reshape(heads, 2, H // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        return rows


def matrix_rule(
    name: str, paths: tuple[str, ...], parts: Sequence[MatrixLayout], layer: int, expert: int | None = None
) -> TensorMapping:
    """Returns the rule of a tensor with the rows of one array, or the concatenated rows of several."""
    axis = 1 if parts[0].lead else 0
    cuts = np.cumsum([part.count for part in parts])

    def load(tensors: Tensors) -> Tensors:
        if tensors[0].shape[axis] != cuts[-1]:
            raise ValueError(f"{cuts[-1]} rows expected")
        pieces = np.split(tensors[0], cuts[:-1], axis) if len(parts) > 1 else [tensors[0]]
        return [part.load(piece) for part, piece in zip(parts, pieces, strict=True)]

    def save(arrays: Tensors) -> Tensors:
        pieces = [part.save(array) for part, array in zip(parts, arrays, strict=True)]
        return [np.concatenate(pieces, axis) if len(pieces) > 1 else pieces[0]]

    return TensorMapping((name,), paths, layer, load, save, expert)
