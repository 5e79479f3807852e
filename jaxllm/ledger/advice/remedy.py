"""One change to a training run that would make it fit, found by the closed forms.

Changes are tried in the order of what they cost:

| change | what it costs |
|---|---|
| smaller `loss_chunk`, `attention_chunk` | a longer loop over the same products |
| smaller micro-batches, more of them | products of fewer rows, and a float32 sum of gradients |
| remat `dots`, then `full` | attention again; then the whole forward pass: 4/3 of the FLOPs (Chen et al. 2016) |
| a higher ZeRO stage | to stage 2 nothing but latency, at 3 half as much traffic again (Rajbhandari et al. 2020) |
| moments in bfloat16 | precision of the moments |
| moments, then all state in host memory | the link to the host, twice a step (ZeRO-Offload, Ren et al. 2021) |

None of them changes the global batch or needs another checkpoint: a run goes on with it where it stood.
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

_SHORTEST_CHUNK = 128  # tokens: products of fewer rows leave a device idle
# Field of the configuration -> its value.
Change = dict[str, int | str]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change that fits.

    Attributes:
      overrides: `--config.a.b=value` for a command line.
      peak_bytes: of one device, with it.
    """

    overrides: tuple[str, ...]
    peak_bytes: int

    def __str__(self) -> str:
        return f"{' '.join(self.overrides)} (needs {format_bytes(self.peak_bytes)})"


def remedy(config: Config, model: Architecture, device: Device, available_bytes: int) -> Remedy | None:
    """The first single change, or else the first two together, whose peak is within `available_bytes`.

    None where the formulas know of none: a larger device, more of them or a smaller model are needed.
    """
    families = [list(family) for family in _families(config, model, device)]
    singles = (change for family in families for change in family)
    pairs = (
        {**one, **other}
        for a, b in itertools.combinations(families, 2)
        # Together they are tried at their strongest first: that settles whether the pair can do it at all.
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
    """All pairs of two families, or none where even their last two do not fit."""
    if a and b:
        peak = _peak(config, model, device, {**a[-1], **b[-1]})
        if peak is not None and peak <= available:
            yield from itertools.product(a, b)


def _families(config: Config, model: Architecture, device: Device) -> Iterator[Iterator[Change]]:
    """The kinds of change, cheapest first; in each, the smallest first."""
    yield _loss_chunks(config)
    # Where kernels compute attention, there are no scores to cut.
    yield _attention_chunks(config) if _has_scores(config, model, device) else iter(())
    yield _micro_batches(config)
    kept = ("none", "dots", "full")
    policy = config.remat.policy
    weaker = kept.index(policy) if policy in kept else len(kept) - 2  # what names tags keeps more than `full`
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
    while (chunk := _half(chunk)) >= _SHORTEST_CHUNK:
        yield {"train.loss_chunk": chunk}


def _half(chunk: int) -> int:
    """The largest power of two that is smaller."""
    return 1 << (chunk - 1).bit_length() - 1 if chunk > 1 else 0


def _has_scores(config: Config, model: Architecture, device: Device) -> bool:
    dtype = policy_for(config.precision.policy, device.platform).compute.name
    return attention_choice.resolve(config, model, device.platform, dtype).implementation == "xla"


def _attention_chunks(config: Config) -> Iterator[Change]:
    length = config.data.sequence_length
    chunk = config.train.attention_chunk or length
    while (chunk := _half(chunk)) >= _SHORTEST_CHUNK:
        if length % chunk == 0:
            yield {"train.attention_chunk": chunk}


def _micro_batches(config: Config) -> Iterator[Change]:
    accumulate, rows = config.train.accumulate, config.mesh.replica * config.mesh.data
    while config.train.batch_size % ((accumulate := 2 * accumulate) * rows) == 0:
        yield {"train.accumulate": accumulate}


def _peak(config: Config, model: Architecture, device: Device, change: Change) -> int | None:
    """Bytes of one device with a change; None where it is not possible."""
    if device.platform == "cpu" and "optimizer.offload" in change:
        return None  # a CPU's memory is its host's
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
