"""Memory rules for a training step on XLA's TPU backend, derived from its buffer assignments.

The TPU differs from XLA's other backends in three ways. Arrays are stored in tiles (`formula.exact.tpu_tiles`). Each
core has vector memory (VMEM) beside its HBM, and XLA stores small temporaries there, so they take no HBM. Matmuls read
bfloat16 under every policy: under fp32, arrays that only matmuls read are stored in bfloat16.
"""

from collections.abc import Iterator

from jaxllm.config.optimizers import OPTIMIZERS
from jaxllm.ledger.formula.exact import tpu_tiles
from jaxllm.ledger.formula.exact.activations import head_elements, head_table
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, block
from jaxllm.ledger.formula.exact.run import FLOAT32, Parameter, TrainingRun
from jaxllm.ledger.formula.fitted.train.parts import (
    batch,
    between_passes,
    from_host,
    gradient_elements,
    gram_elements,
    of_one_layer,
)
from jaxllm.ledger.formula.fitted.train.tpu_moments import (
    attention_elements,
    gathered_matrix,
    in_vector_memory,
    live_sets,
)
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, FORWARD, UPDATE, Row, array_row

_BFLOAT16 = 2


def _kept(run: TrainingRun, phase: str, copies: list[Parameter]) -> Iterator[Row]:
    """Yields the arrays alive between the passes, with the TPU's storage formats and padding.

    The final norm saves its input only; the rest is recomputed from it. Under fp32, keys and values are stored in
    bfloat16, as only matmuls read them.
    """
    for row in between_passes(run, phase, copies, run.compute_bytes):
        if row.name == "final norm":
            yield array_row(row.name, row.kind, phase, run.tokens // run.tensor * run.model.width, run.compute_bytes)
        elif row.name == "attn_qkv" and run.policy == "fp32":
            each = row.bytes_per_device // run.model.layers - block(run).values["v"].bytes
            formula = f"{run.model.layers} layers × {each:,} B"
            yield Row(row.name, row.kind, phase, run.model.layers * each, formula)
        else:
            yield row
    yield from tpu_tiles.batch_padding(run, phase)
    if run.mixed and run.stage == 3:
        groups = tuple(dict.fromkeys(parameter.group for parameter in copies))
        size = tpu_tiles.weights_padding(run.layout, groups, run.compute_bytes)
        yield Row("tile padding of shards", tpu_tiles.PADDING, phase, size, f"{size:,} B")
    if run.policy == "fp32" and run.stage < 3:
        count = sum(p.compute_elements for p in run.select("layers", "tail") if p.spec.role == "matrix")
        yield array_row("weights in bfloat16", "weights", phase, count, _BFLOAT16)


def _computing_copies(run: TrainingRun) -> list[Parameter]:
    """Returns parameters whose compute copies outlive the lookup: embeddings only if tied or with accumulation."""
    if run.accumulates or run.model.tied_embeddings:
        return list(run.parameters)
    return [parameter for parameter in run.parameters if parameter.group != "embed"]


def forward_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the largest live set of the forward pass: after all-gather, in the last layers, or the loss."""
    found = [list(_gathered_weights(run)), list(_last_layers(run)), list(_loss(run))]
    yield from max(found, key=lambda made: sum(row.bytes_per_device for row in made))


def _gathered_weights(run: TrainingRun) -> Iterator[Row]:
    """Yields the live set after ZeRO stages 1 and 2 all-gather the weights, which they do before anything else."""
    if run.stage not in (1, 2) or not run.mixed:
        return
    yield from _kept(run, FORWARD, list(run.parameters))
    count = sum(p.sharded.elements_per_device for p in run.select("embed", "head", trained=True))
    yield array_row("all-gathered shards", "weights", FORWARD, count, run.compute_bytes)


def _last_layers(run: TrainingRun) -> Iterator[Row]:
    """Yields the live set of the last layers under ZeRO stage 3 with a tied table, kept from its lookup to the loss.

    MLP weights are all-gathered one by one, attention weights early, for half a pattern and for the tail.
    """
    if run.stage < 3 or not run.model.tied_embeddings:
        return
    yield from _kept(run, FORWARD, list(run.parameters))
    yield array_row("gathered head", "gathered parameters", FORWARD, head_elements(run), run.compute_bytes)
    matrix = gathered_matrix(run)
    tail = len(run.model.tail)
    yield Row(
        "gathered MLP", "gathered parameters", FORWARD, (2 + (tail > 0)) * matrix, f"{2 + (tail > 0)} × {matrix:,} B"
    )
    layers = len(run.model.tail) + max(1, len(run.model.pattern) // 2)
    count = attention_elements(run)
    yield array_row("gathered attention", "gathered parameters", FORWARD, layers * count, run.compute_bytes)


def _loss(run: TrainingRun) -> Iterator[Row]:
    """Yields the live set of the loss: a chunk's float32 logits, and the head's gradient summed over chunks.

    Under ZeRO stage 3 the live set just after the all-gather of the head may be larger: shards whose rows do not fill
    tiles are copied into a table of whole tiles.
    """
    model, c, tokens = run.model, run.compute_bytes, run.tokens
    head = head_elements(run)
    yield from _kept(run, FORWARD, _computing_copies(run))
    size = _logits_bytes(run)
    logits = Row("logits", "logits and loss", FORWARD, size, f"{size:,} B")
    if run.stage == 3:
        yield array_row("gathered head", "gathered parameters", FORWARD, head, c)
        shape = head_table(run).sharded.local_shape
        ways, each = run.mesh["data"], tpu_tiles.padded_bytes(shape, c)
        if shape[0] % tpu_tiles.SUBLANES and ways * each > size:
            formula = f"{ways} × {each:,} B"
            logits = Row("shards of the head", "gathered parameters", FORWARD, ways * each, formula)
    if not in_vector_memory(logits.bytes_per_device):
        yield logits
    if _is_narrow(run):
        yield from _narrow_table(run, FORWARD)
        if not in_vector_memory(size):
            yield array_row("gradient of the logits", "logits and loss", FORWARD, size // FLOAT32, c)
    yield array_row("hidden states in bfloat16", "logits and loss", FORWARD, tokens * model.width, _BFLOAT16)
    yield array_row("gradient of the hidden states", "gradients", FORWARD, tokens * model.width, c)
    if not _one_chunk(run) and not run.layout.frozen:
        yield array_row("gradient of the head, summed", "gradients", FORWARD, head, FLOAT32)


def _logits_bytes(run: TrainingRun) -> int:
    """Returns the bytes of one chunk's float32 logits; their gradient is fused into the two matmuls that read it."""
    chunk = min(run.config.train.loss_chunk, run.tokens)
    return tpu_tiles.padded_bytes((chunk, head_elements(run) // run.model.width), FLOAT32)


def _one_chunk(run: TrainingRun) -> bool:
    return run.config.train.loss_chunk >= run.tokens


def _is_narrow(run: TrainingRun) -> bool:
    return run.model.width % tpu_tiles.LANES > 0 and run.tensor == 1


def _narrow_table(run: TrainingRun, phase: str) -> Iterator[Row]:
    """Yields the padded row-major table that matmuls read; rows that do not fill lanes are stored by columns."""
    width = run.model.width
    words = head_elements(run) // width
    yield array_row(
        "row-major table", "weights", phase, words * tpu_tiles.round_up(width, tpu_tiles.LANES), run.compute_bytes
    )


def boundary_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields the saved activations that the program defines; the loss, which needs more, is in `forward_rows`."""
    yield from between_passes(run, BOUNDARY, _computing_copies(run), run.compute_bytes)
    yield from tpu_tiles.batch_padding(run, BOUNDARY)


def backward_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the largest live set of the backward pass, while a block's gradients are computed."""
    model, c = run.model, run.compute_bytes
    copies = list(run.parameters) if run.accumulates else run.select("layers", "tail")
    yield from _kept(run, BACKWARD, copies)
    if _is_narrow(run):
        yield from _narrow_table(run, BACKWARD)
    if not run.layout.frozen:
        yield _head_gradient(run)
        if run.stage == 2 and run.accumulates and model.tied_embeddings:
            # The lookup's gradient is added to the head's before both are scattered.
            yield array_row("gradient of the lookup", "gradients", BACKWARD, head_elements(run), FLOAT32)
    # The gradients of the embeddings are computed at the end, those of the final norm at the start.
    yield array_row(
        "gradients", "gradients", BACKWARD, gradient_elements(run, run.select("layers", "tail", trained=True)), c
    )
    if run.stage == 1:
        count = sum(p.moment.elements_per_device for p in run.select("layers", "tail", trained=True))
        size = FLOAT32 if run.accumulates else c
        yield array_row("gradient shards, zeroed", "gradients", BACKWARD, count, size)
    yield from from_host(run, BACKWARD)
    if run.group_size > 1:
        yield from _group_rows(run)
    for name, size, each in max(live_sets(run), key=lambda moment: sum(size * each for _, size, each in moment)):
        yield Row(name, "activations", BACKWARD, each * size, f"{each} × {size:,} B")
    if model.experts and not run.layout.frozen:
        count = max(of_one_layer(run, p) for p in run.select("layers", "tail") if p.spec.role == "matrix")
        yield array_row("summed expert gradients, a layer", "gradients", BACKWARD, count, FLOAT32)


def _group_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields what remat policy `sqrt` adds per group: saved activations, weights sliced from the stacks, gradients."""
    one, count = block(run), run.group_size * len(run.model.pattern)
    size = sum(one.kept(run.remat.kept).values()) + one.values[BLOCK_INPUT].bytes
    yield Row("blocks of one group", "activations", BACKWARD, count * size, f"{count} layers × {size:,} B")
    groups, weights = run.model.repeats // run.group_size, run.select("layers")
    shares = run.stage == 3
    whole = sum(p.sharded.elements_per_device if shares else p.compute_elements for p in weights)
    yield array_row("weights of one group", "weights", BACKWARD, whole // groups, run.compute_bytes)
    gradients = gradient_elements(run, run.select("layers", trained=True)) // groups
    yield array_row("gradients of one group", "gradients", BACKWARD, gradients, run.compute_bytes)


def _head_gradient(run: TrainingRun) -> Row:
    """Returns the row of the head's gradient, or of the logits that it is computed from.

    Over several chunks and devices it is summed in float32 and stays so until it is scattered at the end. With one
    chunk it is computed at the end, or at once if it is no larger than the logits.
    """
    size, head = _logits_bytes(run), head_elements(run)
    if _one_chunk(run) and size < head * run.compute_bytes:
        return Row("logits", "logits and loss", BACKWARD, size, f"{size:,} B")
    each = FLOAT32 if run.devices > 1 and not _one_chunk(run) else run.compute_bytes
    return array_row("gradient of the head", "gradients", BACKWARD, head, each)


def update_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the optimizer's update."""
    optimizer = OPTIMIZERS[run.config.optimizer.name]
    size = FLOAT32 if run.accumulates else run.compute_bytes
    count = sum(parameter.moment.elements_per_device for parameter in run.trained)
    yield batch(run, UPDATE)
    yield array_row("gradients", "gradients", UPDATE, count, size)
    yield from from_host(run, UPDATE)
    largest = max(parameter.moment.elements_per_device for parameter in run.trained)
    copies = optimizer.directions.get("tpu", 0)
    if copies:
        yield array_row("directions", "optimizer", UPDATE, copies * largest, FLOAT32)
    if optimizer.orthogonalizes:
        grams = sum(gram_elements(p.spec) for p in run.trained if p.spec.role == "matrix")
        yield array_row("Gram matrices", "optimizer", UPDATE, 2 * grams, FLOAT32)
