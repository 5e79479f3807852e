"""The numbers that all closed forms of one training run share: dtypes, mesh, tokens, and where each array lies.

Only the configuration, the specs and the mesh's rules are read.
"""

import dataclasses
import functools
import math

import jax

from jaxllm import mesh as mesh_lib
from jaxllm import remat_policy
from jaxllm.config import Architecture, Config
from jaxllm.mesh import Placement
from jaxllm.model.specs import ParamSpec, is_spec, param_specs
from jaxllm.remat_policy import RematPolicy

FLOAT32 = 4
# Policy -> bytes of a number that computes, and of a stored weight.
_ITEMSIZES = {"fp32": (4, 4), "bf16": (2, 4), "fp16": (2, 4), "bf16_pure": (2, 2)}
_MOMENT_ITEMSIZES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of parameters and its places on the devices.

    Attributes:
      name: its path, `layers.0.attn.q`.
      weight, moment, share: placements of the stored weights, of what the optimizer keeps, and of arrays that are
        split over `data` at any stage.
    """

    name: str
    spec: ParamSpec
    weight: Placement
    moment: Placement
    share: Placement

    @property
    def group(self) -> str:
        """embed | layers | tail | final_norm | head."""
        return self.name.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training run.

    Attributes:
      policy: fp32 | bf16 | fp16 | bf16_pure.
      platform: cpu | gpu | tpu.
      compute, store, moment: bytes of a number that computes, of a stored weight, of a moment.
      mesh: axis -> devices.
      parameters: every array of them.
      remat: what blocks keep.
    """

    model: Architecture
    config: Config
    policy: str
    platform: str
    compute: int
    store: int
    moment: int
    mesh: dict[str, int]
    parameters: tuple[Parameter, ...]
    remat: RematPolicy

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def stage(self) -> int:
        """Of ZeRO; 0 where there is no `data` to split over."""
        return self.config.mesh.zero if self.mesh["data"] > 1 else 0

    @property
    def mixed(self) -> bool:
        return self.store != self.compute

    @property
    def accumulates(self) -> bool:
        return self.config.train.accumulate > 1

    @property
    def tensor(self) -> int:
        return self.mesh["tensor"]

    @property
    def sequences(self) -> int:
        """Of one micro-batch on one device; those along `tensor` have the same."""
        rows = self.config.train.accumulate * self.mesh["replica"] * self.mesh["data"]
        return self.config.train.batch_size // rows

    @property
    def length(self) -> int:
        return self.config.data.sequence_length

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one device."""
        return self.sequences * self.length

    @property
    def step_tokens(self) -> int:
        """Of one step on one device."""
        return self.tokens * self.config.train.accumulate

    @property
    def group_size(self) -> int:
        """Repeats of the layer pattern in a group of `sqrt`: the divisor of them nearest to their root; 1 otherwise."""
        repeats = self.model.repeats
        if self.remat.kind != "sqrt" or not repeats:
            return 1
        divisors = (size for size in range(1, repeats + 1) if repeats % size == 0)
        return min(divisors, key=lambda size: abs(math.log(size / math.sqrt(repeats))))

    def computing(self, parameter: Parameter) -> int:
        """Numbers of a weight on a device while it computes: split over `tensor` only, and cut to the array's size."""
        share = parameter.share
        if share.zero_dim is None:
            return self.per_device(share)
        local = share.shape[share.zero_dim] // math.prod(self.mesh[axis] for axis in share.axes[share.zero_dim])
        return self.per_device(share) // local * share.gathered

    def per_device(self, placement: Placement) -> int:
        return placement.numbers_per_device(self.mesh)

    def select(self, *groups: str) -> list[Parameter]:
        return [p for p in self.parameters if p.group in groups]


def make(model: Architecture, config: Config, policy: str, platform: str) -> Setting:
    """The setting of a run.

    Args:
      policy: of precision, resolved: fp32 | bf16 | fp16 | bf16_pure.
    Raises:
      UserError: an array cannot be split as the mesh wants it; names it.
    """
    compute, store = _ITEMSIZES[policy]
    specs, mixed = param_specs(model), store != compute
    stage = config.mesh.zero

    @functools.cache
    def placed(split: bool) -> list[Placement]:
        tree = mesh_lib.placements(specs, dataclasses.replace(config.mesh, zero=3 if split else 0), "weights", mixed)
        return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Placement))

    weights = placed(mesh_lib.sharded("weights", stage, mixed))
    moments = placed(mesh_lib.sharded("moments", stage, mixed))
    paths = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    parameters = tuple(
        Parameter(mesh_lib.path_name(path), spec, *places)
        for (path, spec), *places in zip(paths, weights, moments, placed(True), strict=True)
    )
    return Setting(
        model=model,
        config=config,
        policy=policy,
        platform=platform,
        compute=compute,
        store=store,
        moment=_MOMENT_ITEMSIZES[config.optimizer.moment_dtype],
        mesh=mesh_lib.sizes(config.mesh),
        parameters=parameters,
        remat=remat_policy.parse(config.remat.policy),
    )
