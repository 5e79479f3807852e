"""Loading of a pretrained model's weights in the layout of inference."""

import dataclasses
from typing import Any

import jax

from jaxllm.decode import weights
from jaxllm.interop.pretrained import Pretrained


@dataclasses.dataclass(frozen=True)
class InferenceWeights:
    """Weights in the layout of inference on this machine."""

    tree: Any


def load_weights(opened: Pretrained, dtype: jax.typing.DTypeLike) -> InferenceWeights:
    """Loads a model's weights in the layout of inference on this machine, with at most one array in memory twice.

    Raises:
      UserError: The weights do not match the configuration.
    """
    layout = weights.layout_for(jax.default_backend())
    return InferenceWeights(weights.arrange(opened.load(dtype), opened.model, layout, release=True))
