"""The numbers that all closed forms of one training run share: dtypes, mesh, tokens, and where each array lies.

Only the configuration, the specs and the mesh's rules are read.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable

from jaxllm.config import Architecture, Config, validate
from jaxllm.config import attention as attention_choice
from jaxllm.config import remat as remat_policy
from jaxllm.config.attention import Attention
from jaxllm.config.remat import RematPolicy
from jaxllm.ledger.formula.exact.layout import NO_LORA, Lora, Of, layout_of
from jaxllm.ledger.formula.exact.layout import Layout as Layout
from jaxllm.ledger.formula.exact.layout import Parameter as Parameter
from jaxllm.ledger.formula.exact.shard_sizes import Count
from jaxllm.model.specs import param_specs
from jaxllm.parallel import mesh as mesh_lib
from jaxllm.parallel.mesh import Placement

FLOAT32 = 4
# Policy -> bytes of a number that computes, and of a stored weight.
_ITEMSIZES = {"fp32": (4, 4), "bf16": (2, 4), "fp16": (2, 4), "bf16_pure": (2, 2)}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "bf16_pure": "bfloat16"}
_MOMENT_ITEMSIZES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One training run.

    Attributes:
      policy: fp32 | bf16 | fp16 | bf16_pure.
      platform: cpu | gpu | tpu.
      compute, store, moment: bytes of a number that computes, of a stored weight, of a moment.
      layout: where each array lies.
      remat: what blocks keep.
      attention: what computes it.
    """

    model: Architecture
    config: Config
    policy: str
    platform: str
    compute: int
    store: int
    moment: int
    layout: Layout
    remat: RematPolicy
    attention: Attention

    @functools.cached_property
    def mesh(self) -> dict[str, int]:
        """Axis -> devices."""
        return self.layout.mesh

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every array of them."""
        return self.layout.parameters

    @functools.cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """Those with gradients and moments."""
        return self.layout.trained

    @property
    def lora(self) -> Lora:
        """(rank, targets) of the low-rank adapters."""
        return lora_of(self.config)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @functools.cached_property
    def stage(self) -> int:
        """Of ZeRO; 0 where there is no `data` to split over."""
        return self.config.mesh.zero if self.mesh["data"] > 1 else 0

    @property
    def mixed(self) -> bool:
        return self.store != self.compute

    @property
    def accumulates(self) -> bool:
        return self.config.train.accumulate > 1

    @functools.cached_property
    def tensor(self) -> int:
        return self.mesh["tensor"]

    @functools.cached_property
    def sequences(self) -> int:
        """Of one micro-batch on one device; those along `tensor` have the same."""
        rows = self.config.train.accumulate * self.mesh["replica"] * self.mesh["data"]
        return self.config.train.batch_size // rows

    @functools.cached_property
    def length(self) -> int:
        return self.config.data.sequence_length

    @functools.cached_property
    def tokens(self) -> int:
        """Of one micro-batch on one device."""
        return self.sequences * self.length

    @functools.cached_property
    def step_tokens(self) -> int:
        """Of one step on one device."""
        return self.tokens * self.config.train.accumulate

    @functools.cached_property
    def group_size(self) -> int:
        """Repeats of the layer pattern in a group of `sqrt`: the divisor of them nearest to their root; 1 otherwise."""
        repeats = self.model.repeats
        if self.remat.kind != "sqrt" or not repeats:
            return 1
        divisors = (size for size in range(1, repeats + 1) if repeats % size == 0)
        return min(divisors, key=lambda size: abs(math.log(size / math.sqrt(repeats))))

    def computing(self, parameter: Parameter) -> int:
        """Numbers of a weight on a device while it computes: split over `tensor` only, and cut to the array's size."""
        return self.layout.computing(parameter)

    def per_device(self, placement: Placement) -> int:
        return self.layout.per_device(placement)

    def total(self, of: Of, *groups: str, trained: bool = False) -> Count:
        """Numbers on a device of all arrays, or of those of some groups.

        Args:
          of: a placement of Parameter, or "computing".
          trained: count only what is.
        """
        return self.layout.total(of, groups, trained)

    def count(self, of: Of, parameters: Iterable[Parameter]) -> Count:
        """The same of these arrays."""
        return self.layout.count(of, parameters)

    def select(self, *groups: str, trained: bool = False) -> list[Parameter]:
        return self.layout.select(groups, trained)


def lora_of(config: Config) -> Lora:
    """(rank, targets) of the low-rank adapters of a run."""
    return (config.lora.rank, config.lora.targets) if config.lora.rank else NO_LORA


def make(model: Architecture, config: Config, policy: str, platform: str) -> TrainingRun:
    """The setting of a run.

    Args:
      policy: of precision, resolved: fp32 | bf16 | fp16 | bf16_pure.
    Raises:
      UserError: an array cannot be split as the mesh wants it, or not be updated so; names it. Or attention cannot be
        computed as the configuration says.
    """
    compute, store = _ITEMSIZES[policy]
    mixed, stage = store != compute, config.mesh.zero
    layout = layout_of(
        param_specs,
        mesh_lib.placements,
        model,
        tuple(mesh_lib.sizes(config.mesh).values()),
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
        compute=compute,
        store=store,
        moment=_MOMENT_ITEMSIZES[config.optimizer.moment_dtype],
        layout=layout,
        remat=remat_policy.parse(config.remat.policy),
        attention=attention_choice.resolve(config, model, platform, _DTYPES[policy]),
    )
