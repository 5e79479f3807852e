"""Search space of the training planner, and the overrides and config file of a choice.

The space spans meshes, ZeRO stages, remat policies, micro-batches, chunks and offloading.

Choices that change numerics (precision, moment dtype) are searched only on request. The run itself (model, data,
optimizer, sequences per step) is never changed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jaxllm.config import Architecture, Config
from jaxllm.config import attention as attention_choice
from jaxllm.config.overrides import field_paths
from jaxllm.errors import UserError
from jaxllm.step.precision import policy_for

# Tensor parallelism exchanges activations in every layer, so it stays within a host of 8 devices.
MAX_TENSOR = 8
# Tags of a block's saved activations, from the most to the least expensive to recompute.
_ATTENTION = "attn_context"
_PROJECTIONS = "attn_qkv,attn_context,resid_mid"
_MLP = "mlp_up,mlp_gate"
REMATS = (
    "none",
    "dots",
    f"names:{_PROJECTIONS},{_MLP}",
    f"names:{_MLP}",
    f"names:{_PROJECTIONS}",
    f"names:attn_context,{_MLP}",
    "names:attn_qkv,attn_context",
    f"names:{_ATTENTION}",
    "sqrt",
    "full",
)
FRUGAL_REMATS = ("full", "sqrt")  # policies that save least
OFFLOADED_REMATS = (f"offload:{_PROJECTIONS},{_MLP}", f"offload:{_PROJECTIONS}", f"offload:{_ATTENTION}")
OFFLOADS = ("none", "moments", "all")
# (tokens per chunk of logits, queries per chunk of scores): the configuration's default, then smaller ones.
CHUNKS = ((4096, 512), (1024, 128))
MIN_CHUNK = 32  # queries; smaller chunks leave a device idle
# Fields that define a run of a published model, besides those that a choice sets.
_RUN = ("model.name", "data.sequence_length", "train.batch_size", "optimizer.name")


@dataclasses.dataclass(frozen=True)
class TrainingChoice:
    """Values of the configuration fields that the training planner sets, named after those of `jaxllm.config`."""

    replica: int
    data: int
    tensor: int
    zero: int
    accumulate: int
    remat: str
    attention_chunk: int
    loss_chunk: int
    offload: str
    moment_dtype: str
    precision: str

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sort key: smaller is simpler, and the first element that differs decides."""
        offloaded = OFFLOADS.index(self.offload) + self.remat.startswith("offload")
        smaller = (self.precision == "bf16_pure") + (self.moment_dtype != "float32")
        return (offloaded, self.zero, self.tensor, smaller, self.replica, CHUNKS[0][0] != self.loss_chunk)

    @property
    def summary(self) -> str:
        """Describes the choice in one line."""
        mesh = f"replica {self.replica} × data {self.data} × tensor {self.tensor}, ZeRO {self.zero}"
        chunks = f"chunks {self.attention_chunk or 'all'}/{self.loss_chunk}"
        state = f"offload {self.offload}, moments {self.moment_dtype}, {self.precision}"
        return f"{mesh}, remat {self.remat}, {self.accumulate} micro-batches, {chunks}, {state}"

    @property
    def fields(self) -> dict[str, Any]:
        """Maps dotted configuration paths to the values of the choice."""
        return {
            "precision.policy": self.precision,
            "mesh.replica": self.replica,
            "mesh.data": self.data,
            "mesh.tensor": self.tensor,
            "mesh.zero": self.zero,
            "train.accumulate": self.accumulate,
            "remat.policy": self.remat,
            "train.attention_chunk": self.attention_chunk,
            "train.loss_chunk": self.loss_chunk,
            "optimizer.moment_dtype": self.moment_dtype,
            "optimizer.offload": self.offload,
        }


@dataclasses.dataclass(frozen=True)
class TrainingSpace:
    """Training runs among which the planner chooses.

    Attributes:
      base: the run; fields that a `TrainingChoice` does not set keep its values.
      model: its model.
      count: number of devices.
      platform: of the devices: cpu | gpu | tpu. A CPU has no separate host memory, so nothing is offloaded there.
      precisions, moments: precision policies and moment dtypes to choose among.
      remats: remat policies to choose among.
      smallest_only: True to consider micro-batches of the smallest size only.
    """

    base: Config
    model: Architecture
    count: int
    platform: str
    precisions: tuple[str, ...]
    moments: tuple[str, ...]
    remats: tuple[str, ...] = REMATS + OFFLOADED_REMATS
    smallest_only: bool = False
    _sections: dict[tuple[Any, ...], Any] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _chunks: dict[int, int] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def length(self) -> int:
        return self.base.data.sequence_length

    @property
    def tensors(self) -> list[int]:
        """Sizes of the `tensor` axis that divide every dimension sharded over it."""
        model = self.model
        sharded = (model.heads, model.kv_heads, model.mlp_width, self.length)
        return [size for size in range(1, MAX_TENSOR + 1) if not any(dim % size for dim in sharded)]

    def meshes(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields (replica, data, tensor, zero).

        ZeRO stages 1 to 3 need `data` > 1 to shard over; `replica` > 1 occurs only with such a stage.
        """
        for tensor in self.tensors:
            rows = self.count // tensor
            if self.count % tensor or self.base.train.batch_size % rows:
                continue
            yield 1, rows, tensor, 0
            for data in _divisors(rows):
                if data > 1:
                    yield from ((rows // data, data, tensor, zero) for zero in (1, 2, 3))

    @functools.cached_property
    def has_scores(self) -> bool:
        """True if attention materializes scores, which can be chunked; False if kernels compute it."""
        config = self.configured(
            TrainingChoice(1, 1, 1, 0, 1, "full", 0, CHUNKS[0][0], "none", *self.moments[:1], *self.precisions[:1])
        )
        dtype = policy_for(self.precisions[0], self.platform).compute_dtype.name
        try:
            return attention_choice.resolve(config, self.model, self.platform, dtype).implementation == "xla"
        except UserError:  # the implementation is not supported: no choice is possible
            return True

    @property
    def policies(self) -> list[str]:
        """Remat policies for the platform and the attention implementation.

        With attention kernels, `attn_lse` (log-sum-exp) is kept with `attn_context`: one alone saves no recomputation.
        """
        policies = [policy for policy in self.remats if self.platform != "cpu" or not policy.startswith("offload")]
        if self.has_scores:
            return policies
        return [policy.replace("attn_context", "attn_context,attn_lse") for policy in policies]

    def families(self) -> Iterator[Iterator[TrainingChoice]]:
        """Yields families of choices that differ only in what saves memory but no time, the simplest choice first.

        Smaller chunks of logits and scores only lengthen a loop, and offloading takes time on the host link. The first
        choice of a family that fits is therefore the best of the family.
        """
        attentions = (False, True) if self.has_scores and self._chunk(CHUNKS[0][1]) else (False,)
        for mesh in self.meshes():
            rows = self.base.train.batch_size // (mesh[0] * mesh[1])
            accumulations = _divisors(rows)[-1:] if self.smallest_only else _divisors(rows)
            others = itertools.product(accumulations, self.policies, attentions, self.moments, self.precisions)
            yield from (self._family(mesh, *other) for other in others)

    def _family(
        self, mesh: tuple[int, int, int, int], accumulate: int, remat: str, chunked: bool, moment: str, precision: str
    ) -> Iterator[TrainingChoice]:
        for offload in OFFLOADS if self.platform != "cpu" else OFFLOADS[:1]:
            for loss, attention in CHUNKS:
                queries = self._chunk(attention) if chunked else 0
                yield TrainingChoice(*mesh, accumulate, remat, queries, loss, offload, moment, precision)

    def _chunk(self, size: int) -> int:
        """Returns the largest divisor of the sequence length up to `size`; 0 if chunking is not worthwhile."""
        if size not in self._chunks:
            fitting = [divisor for divisor in _divisors(self.length) if divisor <= size]
            worth = self.length > size and fitting[-1] >= MIN_CHUNK
            self._chunks[size] = fitting[-1] if worth else 0
        return self._chunks[size]

    def configured(self, choice: TrainingChoice) -> Config:
        """Returns the configuration of a choice. Configurations share sections: do not modify them."""
        sections = {
            "precision": self._section("precision", policy=choice.precision),
            "mesh": self._section(
                "mesh", replica=choice.replica, data=choice.data, tensor=choice.tensor, zero=choice.zero
            ),
            "remat": self._section("remat", policy=choice.remat),
            "train": self._section(
                "train",
                accumulate=choice.accumulate,
                attention_chunk=choice.attention_chunk,
                loss_chunk=choice.loss_chunk,
            ),
            "optimizer": self._section("optimizer", moment_dtype=choice.moment_dtype, offload=choice.offload),
        }
        return Config(**{**vars(self.base), **sections})

    def overrides(self, choice: TrainingChoice, typed: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the overrides, dotted path -> value, that turn a run into the planned one.

        Args:
          typed: overrides of the config file from the command line, which are kept unless the choice sets the same
            field. None if there is no file: the fields that define the run are then included.
        """
        before = field_paths(self.base)
        if typed is None:
            return {path: before[path] for path in _RUN} | choice.fields
        return {**typed, **{path: value for path, value in choice.fields.items() if before[path] != value}}

    def config_file(self, choice: TrainingChoice, title: str) -> str:
        """Returns the text of a file for `--config` with every field of a choice's run that is not at its default.

        Args:
          title: first line of the file's docstring.
        """
        default = field_paths(Config())
        changed = {
            path: value for path, value in field_paths(self.configured(choice)).items() if value != default[path]
        }
        lines = [f'"""{title}"""', "", "from jaxllm.config import Config", "", "", "def get_config() -> Config:"]
        lines += ["    config = Config()", *(f"    config.{path} = {value!r}" for path, value in changed.items())]
        return "\n".join([*lines, "    return config", ""])

    def _section(self, name: str, **fields: Any) -> Any:
        key = (name, *fields.values())
        if key not in self._sections:
            self._sections[key] = dataclasses.replace(getattr(self.base, name), **fields)
        return self._sections[key]


def override_flags(overrides: Mapping[str, Any]) -> list[str]:
    """Returns overrides as command-line flags."""
    return [f"--config.{path}={value}" for path, value in overrides.items()]


@functools.cache
def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
