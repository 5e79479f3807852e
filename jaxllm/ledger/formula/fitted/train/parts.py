"""Exact arrays of a training step beside the state, on every platform, and helpers that the platforms have in common.

The arrays are the batch, compute copies of weights, accumulators, gradients and saved activations. The rules for other
XLA temporaries are in `gpu`, `tpu` and `cpu` of this package.
"""

from collections.abc import Iterable, Iterator

from jaxllm.ledger.formula.exact.activations import rows_between_passes
from jaxllm.ledger.formula.exact.optimizer_slots import largest_state
from jaxllm.ledger.formula.exact.run import FLOAT32, Parameter, TrainingRun
from jaxllm.ledger.formula.exact.shard_sizes import Count
from jaxllm.ledger.rows import Row, array_row
from jaxllm.model.specs import ParamSpec

# tokens, targets, segment_ids, positions: int32; weights: float32.
BATCH_BYTES_PER_TOKEN = 5 * 4


def from_host(run: TrainingRun, phase: str) -> Iterator[Row]:
    """Yields the row of the largest array's optimizer state when that state is offloaded to host memory.

    The state is copied to the device while the gradients are computed. Updates go array by array (ZeRO-Offload, Ren et
    al. 2021), so only a few arrays' states are on the device at a time.
    """
    optimizer = run.config.optimizer
    if optimizer.offload == "none":
        return
    masters = run.param_bytes if optimizer.offload == "all" else 0
    size = largest_state(optimizer.name, run.layout, run.moment_bytes, masters)
    yield Row("state of one array, from host memory", "optimizer", phase, size, f"{size:,} B")


def batch(run: TrainingRun, phase: str) -> Row:
    size = run.step_tokens * BATCH_BYTES_PER_TOKEN
    return Row("batch", "batch", phase, size, f"{run.step_tokens:,} tokens × {BATCH_BYTES_PER_TOKEN} B")


def gradient_elements(run: TrainingRun, parameters: Iterable[Parameter]) -> Count:
    """Returns the gradient elements per device while gradients are computed: sharded from ZeRO stage 2 on."""
    return run.count("sharded" if run.stage >= 2 else "compute", parameters)


def between_passes(run: TrainingRun, phase: str, copies: Iterable[Parameter], copy_bytes: int) -> Iterator[Row]:
    """Yields rows of the arrays alive from the forward pass to the end of the backward pass.

    Args:
      copies: parameters whose compute-dtype copies are alive. Frozen ones have none: they are stored in that dtype.
      copy_bytes: bytes per element of these copies on the platform.
    """
    yield batch(run, phase)
    if run.mixed:
        shares = run.stage == 3
        count = run.count("weight" if shares else "compute", [p for p in copies if p.trained])
        name = "compute copy of weights, shard" if shares else "compute copy of weights"
        yield array_row(name, "weights", phase, count, copy_bytes)
    elif run.layout.frozen:  # every B is multiplied by alpha / rank
        count = gradient_elements(run, [p for p in run.trained if p.name.endswith(".b")])
        yield array_row("adapters, scaled", "weights", phase, count, run.compute_bytes)
    if run.accumulates:
        count = gradient_elements(run, run.trained)
        yield array_row("accumulated gradients", "gradient accumulator", phase, count, FLOAT32)
    yield from rows_between_passes(run, phase)


def one_layer(run: TrainingRun, trained: bool = True) -> int:
    """Returns the weight elements of one layer in the compute layout; of frozen weights only if `trained` is False."""
    arrays = run.select("layers") or run.select("tail")
    arrays = [p for p in arrays if trained or not p.trained]
    layers = len(run.model.pattern if run.model.repeats else run.model.tail)
    return sum(of_one_layer(run, parameter) for parameter in arrays) // layers


def of_one_layer(run: TrainingRun, parameter: Parameter) -> int:
    """Returns the elements of an array, or of one layer of a stacked array, in the compute layout."""
    return parameter.compute_elements // (run.model.repeats if parameter.group == "layers" else 1)


def gram_elements(spec: ParamSpec) -> int:
    """Returns the elements of the Gram matrices that Muon's Newton–Schulz steps form, over the shorter sides."""
    count, inputs, outputs = spec.matrices
    return count * min(inputs, outputs) ** 2
