"""Quantities that all closed forms of one training run need: dtypes, mesh, tokens, and the sharding of each array.

Only the configuration, the parameter specs and the mesh rules are read.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable

from jaxllm.config import Architecture, Config, validate
from jaxllm.config import attention as attention_choice
from jaxllm.config import remat as remat_policy
from jaxllm.config.attention import Attention
from jaxllm.config.precision import DTYPE_BYTES, POLICY_DTYPES
from jaxllm.config.remat import RematPolicy
from jaxllm.ledger.formula.exact.layout import NO_LORA, Lora, Quantity, layout_of
from jaxllm.ledger.formula.exact.layout import Layout as Layout
from jaxllm.ledger.formula.exact.layout import Parameter as Parameter
from jaxllm.ledger.formula.exact.shard_sizes import Count
from jaxllm.parallel import mesh as mesh_lib

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One training run: model, configuration, precision, platform, and the quantities derived from them.

    Attributes:
      policy: Precision policy: fp32 | bf16 | fp16 | bf16_pure.
      platform: cpu | gpu | tpu.
      compute_bytes, param_bytes, moment_bytes: Bytes per element of compute arrays, of stored weights and of moments.
      layout: Sharding of each array.
      remat: Remat policy: what blocks save.
      attention: Attention implementation.
    """

    model: Architecture
    config: Config
    policy: str
    platform: str
    compute_bytes: int
    param_bytes: int
    moment_bytes: int
    layout: Layout
    remat: RematPolicy
    attention: Attention

    @functools.cached_property
    def mesh(self) -> dict[str, int]:
        """Axis -> devices."""
        return self.layout.mesh

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter array of the model and of its adapters."""
        return self.layout.parameters

    @functools.cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """Parameter arrays with gradients and moments."""
        return self.layout.trained

    @property
    def lora(self) -> Lora:
        """(rank, targets) of the low-rank adapters."""
        return lora_of(self.config)

    @property
    def dtype(self) -> str:
        """Dtype of matmul inputs."""
        return POLICY_DTYPES[self.policy][0]

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @functools.cached_property
    def stage(self) -> int:
        """ZeRO stage; 0 if there is only one device along `data`."""
        return self.config.mesh.zero if self.mesh["data"] > 1 else 0

    @property
    def mixed(self) -> bool:
        return self.param_bytes != self.compute_bytes

    @property
    def accumulates(self) -> bool:
        return self.config.train.accumulate > 1

    @functools.cached_property
    def tensor(self) -> int:
        return self.mesh["tensor"]

    @functools.cached_property
    def sequences(self) -> int:
        """Sequences of one micro-batch on one device; devices along `tensor` have the same ones."""
        rows = self.config.train.accumulate * self.mesh["replica"] * self.mesh["data"]
        return self.config.train.batch_size // rows

    @functools.cached_property
    def length(self) -> int:
        return self.config.data.sequence_length

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one device."""
        return self.sequences * self.length

    @functools.cached_property
    def step_tokens(self) -> int:
        """Tokens of one step on one device."""
        return self.tokens * self.config.train.accumulate

    @functools.cached_property
    def group_size(self) -> int:
        """Repeats of the layer pattern per `sqrt` group; otherwise 1."""
        return remat_policy.group_size(self.model.repeats, self.remat)

    def total(self, quantity: Quantity, *groups: str, trained: bool = False) -> Count:
        """Returns the elements on one device of all arrays, or of those of some groups.

        Args:
          quantity: A placement of `Parameter`, or "compute".
          groups: Groups to count; all if none is given.
          trained: Count trained arrays only.
        """
        return self.layout.total(quantity, groups, trained)

    def count(self, quantity: Quantity, parameters: Iterable[Parameter]) -> Count:
        """Returns the elements on one device of the given arrays."""
        return self.layout.count(quantity, parameters)

    def select(self, *groups: str, trained: bool = False) -> list[Parameter]:
        return self.layout.select(groups, trained)


def lora_of(config: Config) -> Lora:
    """Returns (rank, targets) of a run's low-rank adapters."""
    return (config.lora.rank, config.lora.targets) if config.lora.rank else NO_LORA


def make(model: Architecture, config: Config, policy: str, platform: str) -> TrainingRun:
    """Derives a training run's quantities from its configuration.

    Args:
      policy: Resolved precision policy: fp32 | bf16 | fp16 | bf16_pure.
      platform: cpu | gpu | tpu.

    Raises:
      UserError: An array cannot be sharded as the mesh requires, or cannot be updated so (the message names it), or
        attention cannot be computed as configured.
    """
    compute_dtype, param_dtype = POLICY_DTYPES[policy]
    compute_bytes, param_bytes = DTYPE_BYTES[compute_dtype], DTYPE_BYTES[param_dtype]
    mixed, stage = param_bytes != compute_bytes, config.mesh.zero
    layout = layout_of(
        model,
        tuple(mesh_lib.axis_sizes(config.mesh).values()),
        mesh_lib.sharded("weights", stage, mixed),
        mesh_lib.sharded("moments", stage, mixed),
        stage,
        lora_of(config),
    )
    validate.check_update(config.optimizer, policy, mixed, layout.stored)
    return TrainingRun(
        model=model,
        config=config,
        policy=policy,
        platform=platform,
        compute_bytes=compute_bytes,
        param_bytes=param_bytes,
        moment_bytes=DTYPE_BYTES[config.optimizer.moment_dtype],
        layout=layout,
        remat=remat_policy.parse(config.remat.policy),
        attention=attention_choice.resolve(config, model, platform, compute_dtype),
    )
