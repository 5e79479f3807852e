"""Arrays alive on a CPU from the forward pass into the backward pass, gradient stacks included.

XLA's CPU backend allocates the zeros that layer gradients are written into before the forward pass.
"""

from collections.abc import Iterator

import jax

from jaxllm.ledger.formula.exact.activations import head_elements
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, block
from jaxllm.ledger.formula.exact.run import FLOAT32, Parameter, TrainingRun
from jaxllm.ledger.formula.fitted.train.cpu_moments import rows_of_copies
from jaxllm.ledger.formula.fitted.train.parts import between_passes
from jaxllm.ledger.rows import BACKWARD, Row, array_row

# On a CPU, the XLA of JAX 0.10 stores operands of bfloat16 matmuls in float32, and recomputes all blocks of a layer
# pattern before the first gradient. That of 0.12 converts on the fly and recomputes one block at a time. Versions in
# between are not checked, so the larger figure applies to them.
_FRUGAL_CPU_FROM = (0, 12)

_FLOAT32_TAGS = ("attn_scores", "attn_probs")
# A row, and the bytes of each of its arrays that is large enough to list separately.
Held = tuple[Row, list[int]]


def frugal() -> bool:
    return jax.__version_info__ >= _FRUGAL_CPU_FROM


def operand_itemsize(run: TrainingRun) -> int:
    """Returns the bytes in which the platform stores a compute-dtype element that matmuls read."""
    return run.compute_bytes if frugal() else FLOAT32


def with_copies(run: TrainingRun, phase: str, parts: list[Held]) -> Iterator[Row]:
    yield from (row for row, _ in parts)
    yield from rows_of_copies(run, phase, [size for _, sizes in parts for size in sizes])


def arrays(name: str, kind: str, phase: str, counts: list[int], size: int) -> Held:
    """Returns one row for arrays of the given element counts, with `size` bytes per element."""
    return array_row(name, kind, phase, sum(counts), size), [count * size for count in counts]


def alive_between_passes(run: TrainingRun, phase: str) -> Iterator[Held]:
    """Yields the arrays alive from the forward pass into the backward pass, zeroed gradient stacks included."""
    held, c = operand_itemsize(run), run.compute_bytes
    # Without accumulation nothing reads the embeddings after the loss.
    needed = run.parameters if run.accumulates or phase != BACKWARD else run.select("layers", "tail")
    for row in between_passes(run, phase, needed, held):
        if row.kind == "gradient accumulator":
            yield row, [_gradient(run, p) * FLOAT32 for p in run.trained]
        elif row.name in _STACKS_ALIKE and run.devices > 1:
            yield row, _late_activations(run, row.name)
        else:
            yield row, []
    if held != c:
        # The stacked outputs of all layers are converted to float32 before the loss.
        one = block(run)
        narrow = [size for tag, size in one.kept(run.remat.kept).items() if tag not in _FLOAT32_TAGS]
        kept = sum(narrow) + one.values[BLOCK_INPUT].bytes
        many = run.model.layers
        if run.group_size > 1:  # those of one group only, once recomputed; the inputs are few
            many = run.group_size * len(run.model.pattern) if phase == BACKWARD else 0
        more = kept * many * (held - c) // c
        formula = f"{more:,} B, of {many} layers"
        yield Row("activations in float32", "workspace", phase, more, formula), []
        chunked = run.config.train.loss_chunk < run.tokens
        if run.layout.frozen:
            pass
        elif run.accumulates or (chunked and phase != BACKWARD):
            yield arrays("embeddings in compute dtype", "weights", phase, [head_elements(run)], c)
    if run.layout.frozen and c != FLOAT32:  # all of them, before the loops over layers, in every version
        own = [p.weight.elements_per_device for p in run.select("layers") if not p.trained]
        yield arrays("frozen weights in float32", "workspace", phase, own, FLOAT32)
    layers = run.select("layers", "tail", trained=True)
    if run.stage < 2:
        counts = [p.compute_elements for p in layers]
        yield _stacks(run, "gradients of layers", phase, counts, c)
    if run.stage:
        size = FLOAT32 if run.stage == 1 and run.accumulates else c
        counts = [p.sharded.elements_per_device for p in layers]
        yield _stacks(run, "gradients of layers, scattered", phase, counts, size)
    if run.config.optimizer.name == "adafactor" and run.accumulates and run.devices == 1:
        yield squares(run, phase)
    if run.layout.frozen:
        return
    if run.mixed or run.stage >= 2:
        yield arrays("gradient of the lookup", "gradients", phase, [head_elements(run)], FLOAT32)
    positions = [p.compute_elements for p in run.select("embed") if p.name != "embed.tokens"]
    if positions:
        yield arrays("gradient of the positions", "gradients", phase, positions, c)


# Kept tags with stacks that are copies of existing zeros: all but the first of each shape; see `_late_activations`.
_STACKS_ALIKE = ("attn_qkv", "attn_context", "attn_out", "resid_mid", "mlp_gate", "mlp_hidden")


def _late_activations(run: TrainingRun, tag: str) -> list[int]:
    """Returns the bytes of each stack of a kept tag that starts as a copy of another stack's zeros; see `_stacks`."""
    model, kept = run.model, run.remat.kept
    values = block(run).values
    layers = model.layers
    q, k = values["q"].bytes * layers, values["k"].bytes * layers
    if tag == "attn_qkv":
        return [k] if model.heads != model.kv_heads else [q, k]
    if tag == "attn_context":
        return [q] if "attn_qkv" in kept else []
    if tag in ("mlp_gate", "mlp_hidden"):
        return [values["mlp_hidden"].bytes * layers] if "mlp_up" in kept else []
    return [values[BLOCK_INPUT].bytes * layers]


def _gradient(run: TrainingRun, parameter: Parameter) -> int:
    """Returns the elements of an array's accumulated gradient on one device."""
    return parameter.compute_elements if run.stage < 2 else parameter.sharded.elements_per_device


def _stacks(run: TrainingRun, name: str, phase: str, counts: list[int], size: int) -> Held:
    """Returns the row of the zeros that layer gradients are written into, and the sizes that may reuse moment buffers.

    On several devices the first stack of each shape is allocated before old moments are copied. The others are copies
    of it, made later: only they may reuse the buffers of the moments.
    """
    row, sizes = arrays(name, "gradients", phase, counts, size)
    if run.devices == 1:
        return row, sizes
    seen: set[tuple[int, ...]] = set()
    late = []
    for parameter, bytes_each in zip(run.select("layers", "tail", trained=True), sizes, strict=True):
        if parameter.spec.shape in seen:
            late.append(bytes_each)
        seen.add(parameter.spec.shape)
    return row, late


def squares(run: TrainingRun, phase: str) -> Held:
    """Returns the squares of all weights, which Adafactor computes for their norms before anything else.

    The squares are summed at once, but on one device with several micro-batches only after all of them.
    """
    counts = [p.moment.elements_per_device for p in run.trained]
    return arrays("weights, squared", "optimizer", phase, counts, FLOAT32)
