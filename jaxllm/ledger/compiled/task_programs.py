"""Selects the programs of a task, the same objects that the trainer and the decoder run."""

import dataclasses

from jax.sharding import AbstractMesh, Mesh

from jaxllm import programs
from jaxllm.config import Architecture, Config
from jaxllm.decode import cache as cache_lib
from jaxllm.ledger.formula.exact.formats import AUTO
from jaxllm.programs import Program
from jaxllm.step.precision import policy_for


@dataclasses.dataclass(frozen=True)
class SamplingSpec:
    """Sizes and cache format of inference on one device.

    Attributes:
      batch: Number of sequences decoded together.
      context: Maximum tokens per sequence, prompt included.
      chunk: Prompt tokens per sequence that one prefill call processes.
      steps: Maximum tokens per sequence that one decode call generates.
      cache: Format of keys and values: int8, or any other for the compute dtype.
    """

    batch: int
    context: int
    chunk: int
    steps: int
    cache: str = AUTO


def programs_of(
    config: Config, model: Architecture, platform: str, over: Mesh | AbstractMesh, sampling: SamplingSpec | None
) -> dict[str, Program]:
    """Returns the programs of a task by name: `train_step` for training, `prefill` and `decode` for sampling.

    Args:
      config: Configuration of the run.
      model: Architecture of the model.
      platform: Platform that the programs run on: cpu | gpu | tpu.
      over: Mesh of a training run; not used for sampling.
      sampling: Sizes of a sampling run; None for training.
    """
    if sampling is None:
        step_spec = programs.make_step_spec(config, model, platform)
        return {"train_step": programs.train_step(config, step_spec, over)}  # type: ignore[arg-type]
    dtype = policy_for("auto", platform).compute_dtype
    how = (sampling.context, dtype, cache_lib.dtype_of(sampling.cache, dtype), platform == "tpu")
    return {
        "prefill": programs.prefill(model, sampling.batch, sampling.chunk, *how),
        "decode": programs.decode(model, sampling.batch, sampling.steps, *how),
    }
