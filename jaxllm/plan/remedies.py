"""Lists the changes that could make a run fit if the search found nothing; returns the first of each kind that does."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from jaxllm.config import validate
from jaxllm.config.inference_mesh import InferenceMesh
from jaxllm.config.optimizers import OPTIMIZERS
from jaxllm.errors import UserError
from jaxllm.hardware.detect import DEVICES, Device
from jaxllm.ledger.advice.remedies import Change, Remedy, RunT, first_fitting, largest_fitting
from jaxllm.plan import inference
from jaxllm.plan.inference import InferenceChoice, InferenceResult
from jaxllm.plan.training import TrainingResult, smallest_peak
from jaxllm.plan.training_space import FRUGAL_REMATS, TrainingSpace

Setup = tuple[Device, InferenceChoice]
MAX_DEVICES = 65_536
MIN_LENGTH = 128  # tokens per training sequence
MIN_CONTEXT = 64


def training_remedies(result: TrainingResult, margin: float, is_file: bool) -> list[Remedy]:
    """Returns the changes that make a training run fit: the smallest of each kind, if there is one.

    Considers only the choices that need least memory: the search has found that none of them fits without a change.

    Args:
      result: of a search in which nothing fits.
      margin: fraction of a larger device's memory to leave free.
      is_file: True if the run comes from a config file, False if it is built from a model's name; their flags differ.
    """
    space, base = result.space, result.space.base

    def change(description: str, flags: str, budget: int = result.budget, **fields: object) -> Change[TrainingSpace]:
        return Change(description, flags, dataclasses.replace(space, **fields), budget)  # type: ignore[arg-type]

    def more_devices() -> Iterator[Change[TrainingSpace]]:
        batch = base.train.batch_size
        rows = [rows for rows in range(1, min(batch, MAX_DEVICES) + 1) if batch % rows == 0]
        counts = {a * b for a in rows for b in space.tensors if space.count < a * b <= MAX_DEVICES}
        for count in sorted(counts):
            yield change("more devices", f"--count={count}", count=count)

    def larger_device() -> Iterator[Change[TrainingSpace]]:
        for name, device, budget in _larger_devices(result.device, margin):
            yield change(f"a larger device, {device.name}", f"--device={name}", budget, platform=device.platform)

    def shorter_sequences() -> Iterator[Change[TrainingSpace]]:
        """Yields runs with 1/2, 1/4, … of the sequence length and the same tokens per step."""
        factor = 2
        while space.length % factor == 0 and space.length // factor >= MIN_LENGTH:
            length, batch = space.length // factor, base.train.batch_size * factor
            data = dataclasses.replace(base.data, sequence_length=length)
            train = dataclasses.replace(base.train, batch_size=batch)
            flags = f"--sequence_length={length}"
            if is_file:
                flags = f"--config.data.sequence_length={length} --config.train.batch_size={batch}"
            yield change("shorter sequences", flags, base=dataclasses.replace(base, data=data, train=train))
            factor *= 2

    def smaller_moments() -> Iterator[Change[TrainingSpace]]:
        if "bfloat16" not in space.moments:
            yield change("moments in bfloat16", "--moment_dtype=bfloat16", moments=("bfloat16",))

    def smaller_weights() -> Iterator[Change[TrainingSpace]]:
        if space.platform != "cpu" and "bf16_pure" not in space.precisions:
            description = "weights in bfloat16, without float32 masters"
            yield change(description, "--precision=bf16_pure", precisions=("bf16_pure",))

    def smaller_optimizers() -> Iterator[Change[TrainingSpace]]:
        for name, record in reversed(OPTIMIZERS.items()):
            if record.small_state and name != base.optimizer.name:
                flags = f"--config.optimizer.name={name}" if is_file else f"--optimizer={name}"
                changed = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, name=name))
                yield change("an optimizer with less state", flags, base=changed)

    kinds = (more_devices, larger_device, shorter_sequences, smaller_moments, smaller_weights, smaller_optimizers)
    return _first_of_each((kind() for kind in kinds), _training_peak)


def inference_remedies(result: InferenceResult, margin: float) -> list[Remedy]:
    """Returns the changes that make the closest setup fit: the smallest of each kind, if there is one.

    Args:
      result: of a search in which nothing fits.
      margin: fraction of a larger device's memory to leave free.
    """
    assert result.closest is not None
    closest, device, budget = result.closest[0], result.device, result.budget

    def peak(setup: Setup) -> int:
        return inference.ledger_of(result.space, *setup).peak_bytes

    def changes(description: str, flag: str, values: Iterable[int | str]) -> Iterator[Change[Setup]]:
        for value in values:
            choice = dataclasses.replace(closest, **{flag: value})  # type: ignore[arg-type]
            yield Change(description, f"--{flag}={value}", (device, choice), result.budget)

    def fits(batch: int) -> bool:
        return peak((device, dataclasses.replace(closest, batch=batch))) <= result.budget

    batch = largest_fitting(fits, closest.batch - 1)
    contexts = (closest.context >> shift for shift in range(1, closest.context.bit_length()))
    kinds = (
        changes("fewer sequences at a time", "batch", [batch] if batch else []),
        changes("a shorter context", "context", (context for context in contexts if context >= MIN_CONTEXT)),
        changes("smaller weights", "weights", [f for f in inference.weight_formats(device) if f != closest.weights]),
        changes("a smaller KV cache", "cache", [f for f in inference.cache_formats(device) if f != closest.cache]),
        (
            Change("more devices", f"--count={mesh.count}", (device, dataclasses.replace(closest, mesh=mesh)), budget)
            for mesh in _larger_meshes(result)
        ),
        (
            Change(f"a larger device, {larger.name}", f"--device={name}", (larger, closest), budget)
            for name, larger, budget in _larger_devices(device, margin)
        ),
    )
    return _first_of_each(kinds, peak)


def _larger_meshes(result: InferenceResult) -> list[InferenceMesh]:
    """Returns the meshes of 2, 4, … times as many devices that shard the model over all of them."""
    assert result.closest is not None
    tensor, model = result.closest[0].mesh.tensor, result.space.model
    meshes = (InferenceMesh(tensor=tensor << shift) for shift in range(1, model.heads.bit_length()))
    return [mesh for mesh in meshes if mesh.count > result.space.count and mesh.supports(model)]


def _first_of_each(kinds: Iterable[Iterable[Change[RunT]]], peak: Callable[[RunT], int | None]) -> list[Remedy]:
    return [remedy for kind in kinds if (remedy := first_fitting(kind, peak)) is not None]


def _training_peak(space: TrainingSpace) -> int | None:
    """Returns the smallest peak of a space in bytes; None if the run is invalid or no choice is possible."""
    try:
        validate.check(space.base, space.model)
    except UserError:
        return None
    return smallest_peak(dataclasses.replace(space, remats=FRUGAL_REMATS, smallest_only=True))


def _larger_devices(device: Device, margin: float) -> list[tuple[str, Device, int]]:
    """Returns (name, device, budget in bytes) of the known devices with more memory than `device`, smallest first."""
    memory = device.memory_bytes or 0
    larger = [(size, name, other) for name, (_, other) in DEVICES.items() if (size := other.memory_bytes or 0) > memory]
    return [(name, other, int(size * (1 - margin))) for size, name, other in sorted(larger, key=lambda each: each[:2])]
