"""What a plan of training chooses among: meshes, ZeRO stages, remat policies, micro-batches, chunks, offloading.

What changes the numbers that are learned (precision, dtype of the moments) is chosen only where it is asked for; what
the run is (model, data, optimizer, sequences a step) never.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from jaxllm.config import Architecture, Config
from jaxllm.config import attention as attention_choice
from jaxllm.errors import UserError
from jaxllm.step.precision import policy_for

# Tensor parallelism exchanges activations in every layer, so it stays within a host: 8 devices.
LARGEST_TENSOR = 8
# Of the values that a block's backward pass reads, from those that are dear to make again to those that are cheap.
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
FRUGAL_REMATS = ("full", "sqrt")  # those that keep least
OFFLOADED_REMATS = (f"offload:{_PROJECTIONS},{_MLP}", f"offload:{_PROJECTIONS}", f"offload:{_ATTENTION}")
OFFLOADS = ("none", "moments", "all")
# (tokens whose logits exist at one time, queries whose scores do): the configuration's own default, and smaller.
CHUNKS = ((4096, 512), (1024, 128))
LEAST_CHUNK = 32  # queries: fewer leave a device idle
SECTIONS = ("precision", "mesh", "remat", "train", "optimizer")  # that a choice changes


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fields of a configuration that a plan sets; by the names of `jaxllm.config`."""

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
    def moving_parts(self) -> tuple[int, ...]:
        """Smaller is simpler; the first that differs decides."""
        offloaded = OFFLOADS.index(self.offload) + self.remat.startswith("offload")
        smaller = (self.precision == "bf16_pure") + (self.moment_dtype != "float32")
        return (offloaded, self.zero, self.tensor, smaller, self.replica, CHUNKS[0][0] != self.loss_chunk)

    @property
    def told(self) -> str:
        """In one line."""
        mesh = f"replica {self.replica} × data {self.data} × tensor {self.tensor}, ZeRO {self.zero}"
        chunks = f"chunks {self.attention_chunk or 'all'}/{self.loss_chunk}"
        held = f"offload {self.offload}, moments {self.moment_dtype}, {self.precision}"
        return f"{mesh}, remat {self.remat}, {self.accumulate} micro-batches, {chunks}, {held}"

    @property
    def fields(self) -> dict[str, Any]:
        """Dotted path -> value."""
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
class Space:
    """Everything a plan may choose.

    Attributes:
      base: the run; what a `Choice` does not set holds.
      model: its model.
      count: devices.
      platform: of them: cpu | gpu | tpu. A CPU is its own host: nothing is offloaded there.
      precisions, moments: policies and dtypes of moments to choose among.
      remats: policies.
      smallest_only: only micro-batches of the smallest size.
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
        """Sizes of the `tensor` axis that everything split over it divides over."""
        model = self.model
        along = (model.heads, model.kv_heads, model.mlp_width, self.length)
        return [size for size in range(1, LARGEST_TENSOR + 1) if not any(whole % size for whole in along)]

    def meshes(self) -> Iterator[tuple[int, int, int, int]]:
        """(replica, data, tensor, zero). Stages need a `data` axis to split over, and replicas are for stages."""
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
        """Whether attention has scores that could be cut into chunks: not where kernels compute it."""
        plain = self.configured(
            Choice(1, 1, 1, 0, 1, "full", 0, CHUNKS[0][0], "none", *self.moments[:1], *self.precisions[:1])
        )
        dtype = policy_for(self.precisions[0], self.platform).compute.name
        try:
            return attention_choice.resolve(plain, self.model, self.platform, dtype).implementation == "xla"
        except UserError:  # the implementation cannot run: no choice will do
            return True

    @property
    def policies(self) -> list[str]:
        """Of remat. What waits of a kernel beside its output are its log sums: one without the other saves no work."""
        policies = [policy for policy in self.remats if self.platform != "cpu" or not policy.startswith("offload")]
        if self.has_scores:
            return policies
        return [policy.replace("attn_context", "attn_context,attn_lse") for policy in policies]

    def families(self) -> Iterator[Iterator[Choice]]:
        """Choices in families that differ only in what saves memory and no time; in each the simplest first.

        Chunks of logits and scores can be smaller for nothing but a longer loop, and offloading takes time on the
        host's link. So the first choice of a family that fits is the best of the family.
        """
        attentions = (False, True) if self.has_scores and self._chunk(CHUNKS[0][1]) else (False,)
        for mesh in self.meshes():
            rows = self.base.train.batch_size // (mesh[0] * mesh[1])
            accumulations = _divisors(rows)[-1:] if self.smallest_only else _divisors(rows)
            others = itertools.product(accumulations, self.policies, attentions, self.moments, self.precisions)
            yield from (self._family(mesh, *other) for other in others)

    def _family(
        self, mesh: tuple[int, int, int, int], accumulate: int, remat: str, chunked: bool, moment: str, precision: str
    ) -> Iterator[Choice]:
        for offload in OFFLOADS if self.platform != "cpu" else OFFLOADS[:1]:
            for loss, attention in CHUNKS:
                queries = self._chunk(attention) if chunked else 0
                yield Choice(*mesh, accumulate, remat, queries, loss, offload, moment, precision)

    def _chunk(self, size: int) -> int:
        """Queries of a chunk of about this size: a divisor of the sequence; 0 where no chunk is worth its loop."""
        if size not in self._chunks:
            fitting = [divisor for divisor in _divisors(self.length) if divisor <= size]
            worth = self.length > size and fitting[-1] >= LEAST_CHUNK
            self._chunks[size] = fitting[-1] if worth else 0
        return self._chunks[size]

    def configured(self, choice: Choice) -> Config:
        """The run with a choice. Its sections are shared with other runs: to be read, not written."""
        held = {name: section for name, section in vars(self.base).items() if name not in SECTIONS}
        made = {
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
        return Config(**held, **made)

    def _section(self, name: str, **fields: Any) -> Any:
        key = (name, *fields.values())
        if key not in self._sections:
            self._sections[key] = dataclasses.replace(getattr(self.base, name), **fields)
        return self._sections[key]


@functools.cache
def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
