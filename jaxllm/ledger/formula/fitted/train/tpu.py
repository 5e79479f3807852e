"""Memory rules for a training step on XLA's TPU backend, derived from its buffer assignments.

The TPU differs from XLA's other backends in three ways. Arrays are stored in tiles (`formula.exact.tpu_tiles`). Each
core has vector memory (VMEM) beside its HBM, and XLA stores small temporaries there, so they take no HBM. Matmuls read
bfloat16 under every policy: under fp32, arrays that only matmuls read are stored in bfloat16.
"""

from collections.abc import Iterator

from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact import tpu_tiles
from jaxllm.ledger.formula.exact.activations import head_numbers, head_table
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, block
from jaxllm.ledger.formula.exact.run import FLOAT32, Parameter, Setting
from jaxllm.ledger.formula.fitted.train.parts import (
    batch,
    between_passes,
    from_host,
    gradient_numbers,
    gram_numbers,
    numbers,
    of_one_layer,
)
from jaxllm.ledger.formula.fitted.train.tpu_moments import attention_numbers, gathered_matrix, in_vector_memory, moments
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, FORWARD, UPDATE, Row

_BFLOAT16 = 2


def _kept(setting: Setting, phase: str, copies: list[Parameter]) -> Iterator[Row]:
    """Yields the arrays alive between the passes, with the TPU's storage formats and padding.

    The final norm saves its input only; the rest is recomputed from it. Under fp32, keys and values are stored in
    bfloat16, as only matmuls read them.
    """
    for row in between_passes(setting, phase, copies, setting.compute):
        if row.name == "final norm":
            yield numbers(
                row.name, row.kind, phase, setting.tokens // setting.tensor * setting.model.width, setting.compute
            )
        elif row.name == "attn_qkv" and setting.policy == "fp32":
            each = row.bytes_per_device // setting.model.layers - block(setting).values["v"].bytes
            formula = f"{setting.model.layers} layers × {each:,} B"
            yield rows.row(row.name, row.kind, phase, formula, setting.model.layers * each)
        else:
            yield row
    yield from tpu_tiles.batch_padding(setting, phase)
    if setting.mixed and setting.stage == 3:
        groups = tuple(dict.fromkeys(parameter.group for parameter in copies))
        size = tpu_tiles.weights_padding(setting.layout, groups, setting.compute)
        yield rows.row("padding of tiles of shares", tpu_tiles.PADDING, phase, f"{size:,} B", size)
    if setting.policy == "fp32" and setting.stage < 3:
        count = sum(setting.computing(p) for p in setting.select("layers", "tail") if p.spec.role == "matrix")
        yield numbers("weights as matmuls read them", "weights", phase, count, _BFLOAT16)


def _computing_copies(setting: Setting) -> list[Parameter]:
    """Returns parameters whose compute copies outlive the lookup: embeddings only if tied or with accumulation."""
    if setting.accumulates or setting.model.tied_embeddings:
        return list(setting.parameters)
    return [parameter for parameter in setting.parameters if parameter.group != "embed"]


def forward_rows(setting: Setting) -> Iterator[Row]:
    """Yields rows of the largest live set of the forward pass: after the all-gather, in the last layers, or the loss."""
    found = [list(_weights_put_together(setting)), list(_last_layers(setting)), list(_loss(setting))]
    yield from max(found, key=lambda made: sum(row.bytes_per_device for row in made))


def _weights_put_together(setting: Setting) -> Iterator[Row]:
    """Yields the live set after ZeRO stages 1 and 2 all-gather the weights, which they do before anything else."""
    if setting.stage not in (1, 2) or not setting.mixed:
        return
    yield from _kept(setting, FORWARD, list(setting.parameters))
    count = sum(setting.per_device(p.share) for p in setting.select("embed", "head", trained=True))
    yield numbers("shares put together", "weights", FORWARD, count, setting.compute)


def _last_layers(setting: Setting) -> Iterator[Row]:
    """Yields the live set of the last layers under ZeRO stage 3 with a tied table, kept from its lookup to the loss.

    MLP weights are all-gathered one by one, attention weights early, for half a pattern and for the tail.
    """
    if setting.stage < 3 or not setting.model.tied_embeddings:
        return
    yield from _kept(setting, FORWARD, list(setting.parameters))
    yield numbers("gathered head", "gathered parameters", FORWARD, head_numbers(setting), setting.compute)
    matrix = gathered_matrix(setting)
    tail = len(setting.model.tail)
    yield rows.row(
        "gathered MLP", "gathered parameters", FORWARD, f"{2 + (tail > 0)} × {matrix:,} B", (2 + (tail > 0)) * matrix
    )
    layers = len(setting.model.tail) + max(1, len(setting.model.pattern) // 2)
    count = attention_numbers(setting)
    yield numbers("gathered attention", "gathered parameters", FORWARD, layers * count, setting.compute)


def _loss(setting: Setting) -> Iterator[Row]:
    """Yields the live set of the loss: a chunk's float32 logits, and the head's gradient summed over chunks.

    Under ZeRO stage 3 the live set just after the all-gather of the head may be larger: shards whose rows do not fill
    tiles are copied into a table of whole tiles.
    """
    model, c, tokens = setting.model, setting.compute, setting.tokens
    head = head_numbers(setting)
    yield from _kept(setting, FORWARD, _computing_copies(setting))
    size = _logits_bytes(setting)
    logits = rows.row("logits", "logits and loss", FORWARD, f"{size:,} B", size)
    if setting.stage == 3:
        yield numbers("gathered head", "gathered parameters", FORWARD, head, c)
        shape = tpu_tiles.shape_on_device(setting.layout, head_table(setting).share)
        ways, each = setting.mesh["data"], tpu_tiles.padded_bytes(shape, c)
        if shape[0] % tpu_tiles.SUBLANES and ways * each > size:
            formula = f"{ways} × {each:,} B"
            logits = rows.row("shares of the head", "gathered parameters", FORWARD, formula, ways * each)
    if not in_vector_memory(logits.bytes_per_device):
        yield logits
    if _is_narrow(setting):
        yield from _narrow_table(setting, FORWARD)
        if not in_vector_memory(size):
            yield numbers("gradient of the logits", "logits and loss", FORWARD, size // FLOAT32, c)
    yield numbers("hidden states as matmuls read", "logits and loss", FORWARD, tokens * model.width, _BFLOAT16)
    yield numbers("gradient of the hidden states", "gradients", FORWARD, tokens * model.width, c)
    if not _one_chunk(setting) and not setting.layout.frozen:
        yield numbers("gradient of the head, summed", "gradients", FORWARD, head, FLOAT32)


def _logits_bytes(setting: Setting) -> int:
    """Returns the bytes of one chunk's float32 logits; their gradient is fused into the two matmuls that read it."""
    chunk = min(setting.config.train.loss_chunk, setting.tokens)
    return tpu_tiles.padded_bytes((chunk, head_numbers(setting) // setting.model.width), FLOAT32)


def _one_chunk(setting: Setting) -> bool:
    return setting.config.train.loss_chunk >= setting.tokens


def _is_narrow(setting: Setting) -> bool:
    return setting.model.width % tpu_tiles.LANES > 0 and setting.tensor == 1


def _narrow_table(setting: Setting, phase: str) -> Iterator[Row]:
    """Yields the padded row-major copy of a table, which matmuls read; rows that do not fill lanes are stored by columns."""
    width = setting.model.width
    words = head_numbers(setting) // width
    yield numbers("table by rows", "weights", phase, words * tpu_tiles.up(width, tpu_tiles.LANES), setting.compute)


def boundary_rows(setting: Setting) -> Iterator[Row]:
    """Yields the saved activations that the program defines; the loss, which needs more, is in `forward_rows`."""
    yield from between_passes(setting, BOUNDARY, _computing_copies(setting), setting.compute)
    yield from tpu_tiles.batch_padding(setting, BOUNDARY)


def backward_rows(setting: Setting) -> Iterator[Row]:
    """Yields rows of the largest live set of the backward pass, while a block's gradients are computed."""
    model, c = setting.model, setting.compute
    copies = list(setting.parameters) if setting.accumulates else setting.select("layers", "tail")
    yield from _kept(setting, BACKWARD, copies)
    if _is_narrow(setting):
        yield from _narrow_table(setting, BACKWARD)
    if not setting.layout.frozen:
        yield _head_gradient(setting)
        if setting.stage == 2 and setting.accumulates and model.tied_embeddings:
            # The lookup's gradient is added to the head's before both are scattered.
            yield numbers("gradient of the lookup", "gradients", BACKWARD, head_numbers(setting), FLOAT32)
    # The gradients of the embeddings are computed at the end, those of the final norm at the start.
    yield numbers(
        "gradients", "gradients", BACKWARD, gradient_numbers(setting, setting.select("layers", "tail", trained=True)), c
    )
    if setting.stage == 1:
        count = sum(setting.per_device(p.moment) for p in setting.select("layers", "tail", trained=True))
        size = FLOAT32 if setting.accumulates else c
        yield numbers("shares of gradients, zeros", "gradients", BACKWARD, count, size)
    yield from from_host(setting, BACKWARD)
    if setting.group_size > 1:
        yield from _group_rows(setting)
    for name, size, each in max(moments(setting), key=lambda moment: sum(size * each for _, size, each in moment)):
        yield rows.row(name, "activations", BACKWARD, f"{each} × {size:,} B", each * size)
    if model.experts and not setting.layout.frozen:
        count = max(of_one_layer(setting, p) for p in setting.select("layers", "tail") if p.spec.role == "matrix")
        yield numbers("summed expert gradients, a layer", "gradients", BACKWARD, count, FLOAT32)


def _group_rows(setting: Setting) -> Iterator[Row]:
    """Yields what remat policy `sqrt` adds per group: saved activations, weights sliced from the stacks, gradients."""
    one, count = block(setting), setting.group_size * len(setting.model.pattern)
    size = sum(one.kept(setting.remat.kept).values()) + one.values[BLOCK_INPUT].bytes
    yield rows.row("blocks of one group", "activations", BACKWARD, f"{count} layers × {size:,} B", count * size)
    groups, weights = setting.model.repeats // setting.group_size, setting.select("layers")
    shares = setting.stage == 3
    whole = sum(setting.per_device(p.share) if shares else setting.computing(p) for p in weights)
    yield numbers("weights of one group", "weights", BACKWARD, whole // groups, setting.compute)
    gradients = gradient_numbers(setting, setting.select("layers", trained=True)) // groups
    yield numbers("gradients of one group", "gradients", BACKWARD, gradients, setting.compute)


def _head_gradient(setting: Setting) -> Row:
    """Returns the row of the head's gradient, or of the logits that it is computed from.

    Over several chunks and devices it is summed in float32 and stays so until it is scattered at the end. With one
    chunk it is computed at the end, or at once if it is no larger than the logits.
    """
    size, head = _logits_bytes(setting), head_numbers(setting)
    if _one_chunk(setting) and size < head * setting.compute:
        return rows.row("logits", "logits and loss", BACKWARD, f"{size:,} B", size)
    each = FLOAT32 if setting.devices > 1 and not _one_chunk(setting) else setting.compute
    return numbers("gradient of the head", "gradients", BACKWARD, head, each)


def update_rows(setting: Setting) -> Iterator[Row]:
    """Yields rows of the optimizer's update."""
    name = setting.config.optimizer.name
    size = FLOAT32 if setting.accumulates else setting.compute
    count = sum(setting.per_device(parameter.moment) for parameter in setting.trained)
    yield batch(setting, UPDATE)
    yield numbers("gradients", "gradients", UPDATE, count, size)
    yield from from_host(setting, UPDATE)
    largest = max(setting.per_device(parameter.moment) for parameter in setting.trained)
    copies = {"lion": 1, "muon": 1, "adafactor": 2}.get(name, 0)  # direction arrays alive at a time
    if copies:
        yield numbers("directions", "optimizer", UPDATE, copies * largest, FLOAT32)
    if name == "muon":
        grams = sum(gram_numbers(p.spec) for p in setting.trained if p.spec.role == "matrix")
        yield numbers("Gram matrices", "optimizer", UPDATE, 2 * grams, FLOAT32)
