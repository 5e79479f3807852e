"""Format-independent handle of a pretrained model, used by sampling, training and conversion."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxllm.config import Architecture
from jaxllm.interop.text import Text

# (dtype of the arrays, tree of shardings as in `Pretrained.load`, or None) -> parameter tree.
Loader = Callable[[jax.typing.DTypeLike, Any], Any]


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Pretrained model whose weights are not read yet; created by `jaxllm.interop.opening.open_model`.

    Attributes:
      source: the path or id that it was opened from, for messages.
      model: its architecture.
      loader: reads the weights.
      stored: dtype of the weights in the files, the widest if there are several; block-quantized weights count as
        float32.
      family: name of the model family in its format ("llama", "qwen3_moe"); "" if there is none.
      quantization: for a GGUF file, the supported quantization of all of its matrices; "" if there is none.
      text: its tokenizer, chat template, special and end tokens, as far as the source has them.
      tokenizer_files: files that an export copies unchanged.
    """

    source: str
    model: Architecture
    loader: Loader
    stored: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    family: str = ""
    quantization: str = ""
    text: Text = dataclasses.field(default_factory=Text)
    tokenizer_files: tuple[pathlib.Path, ...] = ()

    def load(self, dtype: jax.typing.DTypeLike, shardings: Any = None) -> Any:
        """Loads the parameter tree of `specs.param_specs(self.model)`, directly in its dtype and sharding.

        Args:
          dtype: dtype of the arrays.
          shardings: tree of shardings with the structure of the parameters, or of `jax.ShapeDtypeStruct`s with
            shardings, to whose shapes the arrays are zero-padded. None is the default device.
        Returns:
          The parameter tree.
        Raises:
          UserError: the weights do not match the configuration.
        """
        return self.loader(dtype, shardings)
