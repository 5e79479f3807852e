"""Searches for one or two configuration changes that make a training run fit, using the closed-form peak.

Changes are tried in order of their cost:

| change | cost |
|---|---|
| smaller `loss_chunk`, `attention_chunk` | a longer loop over the same matmuls |
| smaller micro-batches, more of them | matmuls with fewer rows, and a float32 gradient accumulator |
| remat `dots`, then `full` | recomputes attention; then the whole forward pass: 4/3 of the FLOPs (Chen et al. 2016) |
| a higher ZeRO stage | only latency up to stage 2; 1.5 times the traffic at stage 3 (Rajbhandari et al. 2020) |
| moments in bfloat16 | precision of the moments |
| moments, then all state in host memory | host link traffic, twice per step (ZeRO-Offload, Ren et al. 2021) |

No change alters the global batch or invalidates a checkpoint, so a run can resume with it.
"""

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxllm.config import Architecture, Config, validate
from jaxllm.config import attention as attention_choice
from jaxllm.config.overrides import field_paths
from jaxllm.errors import UserError
from jaxllm.hardware.detect import Device
from jaxllm.ledger.formula import training_memory
from jaxllm.ledger.rows import format_bytes
from jaxllm.step.precision import policy_for

_MIN_CHUNK = 128  # tokens; matmuls with fewer rows underuse the device
# Configuration field -> new value.
Change = dict[str, int | str]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Configuration change with which a run fits.

    Attributes:
      overrides: Command-line flags, `--config.a.b=value`.
      peak_bytes: Peak bytes on one device with the change.
    """

    overrides: tuple[str, ...]
    peak_bytes: int

    def __str__(self) -> str:
        return f"{' '.join(self.overrides)} (needs {format_bytes(self.peak_bytes)})"


def remedy(config: Config, model: Architecture, device: Device, available_bytes: int) -> Remedy | None:
    """Returns the first single change, else the first pair of changes, with a peak within `available_bytes`.

    Returns None if there is none: the run needs larger devices, more devices or a smaller model.
    """
    families = [list(family) for family in _families(config, model, device)]
    singles = (change for family in families for change in family)
    pairs = (
        {**one, **other}
        for a, b in itertools.combinations(families, 2)
        # `_weakest_first` yields no pairs if even the strongest two changes together do not fit.
        for one, other in _weakest_first(a, b, config, model, device, available_bytes)
    )
    for change in itertools.chain(singles, pairs):
        peak = _peak(config, model, device, change)
        if peak is not None and peak <= available_bytes:
            return Remedy(tuple(f"--config.{path}={value}" for path, value in change.items()), peak)
    return None


def _weakest_first(
    a: Sequence[Change], b: Sequence[Change], config: Config, model: Architecture, device: Device, available: int
) -> Iterator[tuple[Change, Change]]:
    """Yields all pairs of changes from two families, or none if even the last (strongest) pair does not fit."""
    if a and b:
        peak = _peak(config, model, device, {**a[-1], **b[-1]})
        if peak is not None and peak <= available:
            yield from itertools.product(a, b)


def _families(config: Config, model: Architecture, device: Device) -> Iterator[Iterator[Change]]:
    """Yields the families of changes, cheapest first; each yields its smallest change first."""
    yield _loss_chunks(config)
    # Attention kernels do not materialize scores, so there is nothing to chunk.
    yield _attention_chunks(config) if _has_scores(config, model, device) else iter(())
    yield _micro_batches(config)
    kept = ("none", "dots", "full")
    policy = config.remat.policy
    weaker = kept.index(policy) if policy in kept else len(kept) - 2  # a policy that lists tags saves more than `full`
    yield ({"remat.policy": name} for name in kept[weaker + 1 :])
    stages = range(config.mesh.zero + 1, 4) if config.mesh.data > 1 else ()
    yield ({"mesh.zero": stage} for stage in stages)
    if config.optimizer.moment_dtype != "bfloat16":
        yield iter([{"optimizer.moment_dtype": "bfloat16"}])
    places = ("none", "moments", "all")
    yield ({"optimizer.offload": place} for place in places[places.index(config.optimizer.offload) + 1 :])


def _loss_chunks(config: Config) -> Iterator[Change]:
    tokens = config.train.batch_size * config.data.sequence_length
    tokens //= config.train.accumulate * config.mesh.replica * config.mesh.data
    chunk = min(config.train.loss_chunk, tokens)
    while (chunk := _half(chunk)) >= _MIN_CHUNK:
        yield {"train.loss_chunk": chunk}


def _half(chunk: int) -> int:
    """Returns the largest power of two below `chunk`; 0 if there is none."""
    return 1 << (chunk - 1).bit_length() - 1 if chunk > 1 else 0


def _has_scores(config: Config, model: Architecture, device: Device) -> bool:
    dtype = policy_for(config.precision.policy, device.platform).compute_dtype.name
    return attention_choice.resolve(config, model, device.platform, dtype).implementation == "xla"


def _attention_chunks(config: Config) -> Iterator[Change]:
    length = config.data.sequence_length
    chunk = config.train.attention_chunk or length
    while (chunk := _half(chunk)) >= _MIN_CHUNK:
        if length % chunk == 0:
            yield {"train.attention_chunk": chunk}


def _micro_batches(config: Config) -> Iterator[Change]:
    accumulate, rows = config.train.accumulate, config.mesh.replica * config.mesh.data
    while config.train.batch_size % ((accumulate := 2 * accumulate) * rows) == 0:
        yield {"train.accumulate": accumulate}


def _peak(config: Config, model: Architecture, device: Device, change: Change) -> int | None:
    """Returns the peak bytes on one device with a change; None if the change is not valid."""
    if device.platform == "cpu" and "optimizer.offload" in change:
        return None  # on a CPU, device memory is host memory
    changed = copy.deepcopy(config)
    for path, value in change.items():
        section, name = path.split(".")
        assert path in field_paths(config), path
        setattr(getattr(changed, section), name, value)
    try:
        validate.check(changed, model)
        policy = policy_for(changed.precision.policy, device.platform)
        return training_memory.training(model, changed, policy.name, device.platform).peak_bytes
    except UserError:
        return None
