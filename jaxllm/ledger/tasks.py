"""Which programs a bill is of: the same objects that the trainer and the decoder run."""

import dataclasses

from jax.sharding import AbstractMesh, Mesh

from jaxllm import programs
from jaxllm.config import Architecture, Config
from jaxllm.programs import Program
from jaxllm.train.precision import policy_for


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Inference on one device.

    Attributes:
      batch: sequences at a time.
      context: tokens of prompt and text a sequence may have.
      chunk: prompt tokens of each sequence that one prefill takes.
      steps: tokens of each that one decode call makes at most.
    """

    batch: int
    context: int
    chunk: int
    steps: int


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
    return {
        "prefill": programs.prefill(model, sampling.batch, sampling.chunk, sampling.context, dtype),
        "decode": programs.decode(model, sampling.batch, sampling.steps, sampling.context, dtype),
    }
