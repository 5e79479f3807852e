"""A model from the world, opened: what every format gives, and what sampling, training and conversion ask of it."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxllm.config import Architecture
from jaxllm.interop.tokenizer import Tokenizer

# (dtype of the arrays, a tree of shardings as in `Pretrained.load` or None) -> the parameter tree.
Loader = Callable[[jax.typing.DTypeLike, Any], Any]


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model whose weights are not read yet; `jaxllm.interop.opening.open_model` makes one.

    Attributes:
      source: what it was opened as, for messages.
      model: its architecture.
      loader: reads the weights.
      stored: the dtype that the weights have where they are, the widest if there are several; what is in blocks of its
        own kind counts as float32.
      family: the name that its format has for its kind ("llama", "qwen3_moe"); "" where there is none.
      quantization: of a GGUF file, what all of its matrices are in, if we write it; "" where there is no such thing.
      tokenizer: None where it comes with none. Its `bos_id` is what a document begins with, None for nothing.
      chat_template: Jinja source; None where there is none.
      special: the template's names of special tokens and how they are written: {"bos_token": "<s>", …}.
      end_ids: tokens after which nothing more is said; the first ends a document.
      tokenizer_files: that an export takes along as they are.
    """

    source: str
    model: Architecture
    loader: Loader
    stored: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    family: str = ""
    quantization: str = ""
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    end_ids: tuple[int, ...] = ()
    tokenizer_files: tuple[pathlib.Path, ...] = ()

    def load(self, dtype: jax.typing.DTypeLike, shardings: Any = None) -> Any:
        """The parameter tree of `specs.param_specs(self.model)`, straight in its dtype and where it is to lie.

        Args:
          dtype: of the arrays.
          shardings: a tree of shardings like the parameters, or of `jax.ShapeDtypeStruct`s with shardings, to whose
            shapes arrays are padded with zeros; None is the default device.
        Raises:
          UserError: the weights do not belong to the configuration.
        """
        return self.loader(dtype, shardings)
