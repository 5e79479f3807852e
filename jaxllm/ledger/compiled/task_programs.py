"""Which programs a bill is of: the same objects that the trainer and the decoder run."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxllm import programs
from jaxllm.config import Architecture, Config
from jaxllm.ledger.formula.exact.formats import AUTO, INT8
from jaxllm.programs import Program
from jaxllm.step.precision import policy_for


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Inference on one device.

    Attributes:
      batch: sequences at a time.
      context: tokens of prompt and text a sequence may have.
      chunk: prompt tokens of each sequence that one prefill takes.
      steps: tokens of each that one decode call makes at most.
      cache: format of keys and values: int8, or what programs compute with.
    """

    batch: int
    context: int
    chunk: int
    steps: int
    cache: str = AUTO


def programs_of(
    config: Config, model: Architecture, platform: str, over: Mesh | AbstractMesh, sampling: Sampling | None
) -> dict[str, Program]:
    """By name: `train_step`; or `prefill` and `decode`.

    Args:
      platform: that they are to run on: cpu | gpu | tpu.
      over: the mesh of a training run.
      sampling: None for training.
    """
    if sampling is None:
        recipe = programs.make_recipe(config, model, platform)
        return {"train_step": programs.train_step(config, recipe, over)}  # type: ignore[arg-type]
    dtype = policy_for("auto", platform).compute
    how = (sampling.context, dtype, cache_dtype(sampling.cache, dtype), platform == "tpu")
    return {
        "prefill": programs.prefill(model, sampling.batch, sampling.chunk, *how),
        "decode": programs.decode(model, sampling.batch, sampling.steps, *how),
    }


def cache_dtype(name: str, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """Of keys and values in a format: int8, or any other for what programs compute with."""
    return jnp.int8 if name == INT8 else dtype
