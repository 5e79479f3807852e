"""Memory rules for the optimizer's update on XLA's CPU backend."""

from collections.abc import Iterator

from jaxllm.config.optimizers import OPTIMIZERS
from jaxllm.ledger.formula.exact.activations import head_table
from jaxllm.ledger.formula.exact.run import FLOAT32, TrainingRun
from jaxllm.ledger.formula.fitted.train.cpu_stacks import Held, arrays, with_copies
from jaxllm.ledger.formula.fitted.train.parts import batch, between_passes, from_host, gram_elements
from jaxllm.ledger.rows import UPDATE, Row


def update_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the optimizer's update: its start, or Muon's Newton–Schulz steps if they need more."""
    parts = _beginning(run)
    if OPTIMIZERS[run.config.optimizer.name].orthogonalizes:
        parts = max(parts, _orthogonalized(run), key=lambda parts: sum(row.bytes_per_device for row, _ in parts))
    yield batch(run, UPDATE)
    yield from from_host(run, UPDATE)
    yield from with_copies(run, UPDATE, parts)


def _summed_over_devices(run: TrainingRun) -> bool:
    """Returns True if the update starts with an all-reduce of gradients, whose results are separate arrays."""
    return run.mesh["replica"] > 1 or (run.stage == 0 and run.mesh["data"] > 1)


def _beginning(run: TrainingRun) -> list[Held]:
    """Returns the arrays alive at the start of the update.

    One operation all-reduces all gradients; the lookup's gradient is added to the head's.
    """
    shares = [parameter.moment.elements_per_device for parameter in run.trained]
    parts = [arrays("gradients", "gradients", UPDATE, shares, FLOAT32)]
    if _summed_over_devices(run):
        parts.append(arrays("gradients, summed over devices", "gradients", UPDATE, shares, FLOAT32))
    elif run.model.tied_embeddings and not run.layout.frozen:
        table = head_table(run).moment.elements_per_device
        parts.append(arrays("gradient of the lookup", "gradients", UPDATE, [table], FLOAT32))
        if run.stage == 0 and not run.accumulates:
            # It is placed above the head's gradient, and that above the saved activations, whose buffer leaves a hole.
            kept = (row for row in between_passes(run, UPDATE, (), 0) if row.kind == "activations")
            parts += [(row, []) for row in kept]
    optimizer = OPTIMIZERS[run.config.optimizer.name]
    copies = optimizer.directions.get("cpu", 0)
    if copies:
        if run.devices == 1 and optimizer.array_statistics:
            copies += 1
        parts.append(arrays("directions", "optimizer", UPDATE, [max(shares)] * copies, FLOAT32))
    return parts


def _orthogonalized(run: TrainingRun) -> list[Held]:
    """Returns the arrays alive in Muon's Newton–Schulz steps, which run for all matrices concurrently.

    Each matrix is alive unscaled and divided by its norm. Without ZeRO and `tensor`, XLA adds attention matrices in
    the layout of matmuls, and either Gram matrices with their squares, or half of them with the largest matmul output.
    With ZeRO the directions are all-gathered.
    """
    matrices = [p for p in run.trained if p.spec.role == "matrix"]
    shares = [p.moment.elements_per_device for p in matrices]
    parts = [arrays("directions", "optimizer", UPDATE, [*shares, *shares], FLOAT32)]
    if run.stage:
        whole = [p.compute_elements for p in matrices]
        parts.append(arrays("all-gathered directions", "optimizer", UPDATE, [*whole, max(whole)], FLOAT32))
    elif run.tensor == 1:
        of_attention = [p.moment.elements_per_device for p in matrices if ".attn." in p.name]
        parts.append(arrays("attention directions, in another layout", "optimizer", UPDATE, of_attention, FLOAT32))
        grams = sum(gram_elements(p.spec) for p in matrices)
        products = max(2 * grams, max(shares) + 3 * grams // 2)
        parts.append(arrays("Gram matrices and matmul outputs", "optimizer", UPDATE, [products], FLOAT32))
    return parts
