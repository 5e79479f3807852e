"""What XLA's CPU backend makes of the optimizer's step."""

from collections.abc import Iterator

from jaxllm.ledger.formula.exact.activations import head_table
from jaxllm.ledger.formula.exact.run import FLOAT32, Setting
from jaxllm.ledger.formula.fitted.train.cpu_stacks import Held, arrays, with_copies
from jaxllm.ledger.formula.fitted.train.parts import batch, between_passes, from_host, gram_numbers
from jaxllm.ledger.rows import UPDATE, Row


def update_rows(setting: Setting) -> Iterator[Row]:
    """The optimizer's step: its beginning, or Muon's Newton–Schulz steps where they take more."""
    parts = _beginning(setting)
    if setting.config.optimizer.name == "muon":
        parts = max(parts, _orthogonalized(setting), key=lambda parts: sum(row.bytes_per_device for row, _ in parts))
    yield batch(setting, UPDATE)
    yield from from_host(setting, UPDATE)
    yield from with_copies(setting, UPDATE, parts)


def _summed_over_devices(setting: Setting) -> bool:
    """Whether the update begins with a sum of gradients over devices, whose results are arrays of their own."""
    return setting.mesh["replica"] > 1 or (setting.stage == 0 and setting.mesh["data"] > 1)


def _beginning(setting: Setting) -> list[Held]:
    """Gradients are summed over devices, all in one operation; the lookup's is added to the head's."""
    shares = [setting.per_device(parameter.moment) for parameter in setting.trained]
    parts = [arrays("gradients", "gradients", UPDATE, shares, FLOAT32)]
    if _summed_over_devices(setting):
        parts.append(arrays("gradients, summed over devices", "gradients", UPDATE, shares, FLOAT32))
    elif setting.model.tied_embeddings and not setting.layout.frozen:
        table = setting.per_device(head_table(setting).moment)
        parts.append(arrays("gradient of the lookup", "gradients", UPDATE, [table], FLOAT32))
        if setting.stage == 0 and not setting.accumulates:
            # It lies above the head's gradient, and that above what waits for the backward pass: which leaves a hole.
            kept = (row for row in between_passes(setting, UPDATE, (), 0) if row.kind == "activations")
            parts += [(row, []) for row in kept]
    if setting.config.optimizer.name == "adafactor":
        # Arrays of the direction that are made at a time.
        made = 2 if setting.devices == 1 else 1
        parts.append(arrays("directions", "optimizer", UPDATE, [max(shares)] * made, FLOAT32))
    return parts


def _orthogonalized(setting: Setting) -> list[Held]:
    """Muon's Newton–Schulz steps, which run for all matrices side by side.

    Each matrix is there as it was and divided by its norm. On one device there are also those of attention in the
    order of products, and Gram matrices with their squares, or half of them with the largest product. Over devices
    the directions are put together.
    """
    matrices = [p for p in setting.trained if p.spec.role == "matrix"]
    shares = [setting.per_device(p.moment) for p in matrices]
    parts = [arrays("directions", "optimizer", UPDATE, [*shares, *shares], FLOAT32)]
    if setting.stage:
        whole = [setting.computing(p) for p in matrices]
        parts.append(arrays("directions put together", "optimizer", UPDATE, [*whole, max(whole)], FLOAT32))
    elif setting.tensor == 1:
        of_attention = [setting.per_device(p.moment) for p in matrices if ".attn." in p.name]
        parts.append(arrays("directions of attention, in order", "optimizer", UPDATE, of_attention, FLOAT32))
        grams = sum(gram_numbers(p.spec) for p in matrices)
        products = max(2 * grams, max(shares) + 3 * grams // 2)
        parts.append(arrays("Gram matrices and products", "optimizer", UPDATE, [products], FLOAT32))
    return parts
