"""Static specification of a training step: everything except its state and batch, fixed for a run."""

import dataclasses

import optax

from jaxllm.config import Architecture
from jaxllm.config.attention import Attention
from jaxllm.config.remat import RematPolicy
from jaxllm.step.optimizers import Schedule
from jaxllm.step.precision import Policy


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Static specification of a training step.

    Attributes:
      model: Architecture of the model.
      optimizer: Optimizer that returns the direction of an update.
      schedule: Learning rate as a function of the step.
      policy: Precision policy.
      attention: Attention implementation.
      remat: Remat policy.
      clip_norm: Maximum global gradient norm; 0 is off.
      accumulate: Micro-batches per step.
      loss_chunk: Number of tokens per device whose logits are materialized at once.
      attention_chunk: Number of queries per sequence whose scores are materialized at once; 0 means all.
      adapter_scale: Factor on the output of low-rank adapters, alpha / rank; 0 if there are none.
      scale_growth: Consecutive finite steps after which the loss scale of fp16 doubles.
    """

    model: Architecture
    optimizer: optax.GradientTransformation
    schedule: Schedule
    policy: Policy
    attention: Attention
    remat: RematPolicy
    clip_norm: float
    accumulate: int
    loss_chunk: int
    attention_chunk: int
    adapter_scale: float
    scale_growth: int
