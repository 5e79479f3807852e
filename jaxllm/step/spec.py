"""What a training step needs beside its state and batch, all of it fixed for a run."""

import dataclasses

import optax

from jaxllm.config import Architecture
from jaxllm.config.attention import Attention
from jaxllm.config.remat import RematPolicy
from jaxllm.step.optimizers import Schedule
from jaxllm.step.precision import Policy


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Attributes:
    model: its architecture.
    optimizer, schedule: direction of an update, and its learning rate.
    policy: dtypes.
    attention: what computes it.
    remat: what blocks keep for the backward pass.
    clip_norm: global gradient norm; 0 is off.
    accumulate: micro-batches a step.
    loss_chunk: tokens of a device whose logits exist at one time.
    attention_chunk: queries of a sequence whose scores exist at one time; 0 is all.
    adapter_scale: of what low-rank adapters add, alpha / rank; 0 where there are none.
    scale_growth: finite steps after which the loss scale of fp16 doubles.
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
