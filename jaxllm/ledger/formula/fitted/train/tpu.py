"""What the TPU compiler makes of a training step, read from its buffer assignments and stated as rules.

Three things set it apart from XLA's other backends. Arrays lie in tiles (`ledger.tiles`). Each core has a vector memory
of its own beside its HBM, and XLA keeps there what fits: small temporaries take no HBM. And products read bfloat16
whatever the policy: under fp32, what only products read is kept as that.
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
    """What lives between the passes, as the TPU holds it: of the last norm its input alone, from which what reads the
    rest makes it again; and under fp32 keys and values, which only products read, as these read them."""
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
    """Embeddings are looked up once; where other micro-batches follow, or the table makes logits too, they stay."""
    if setting.accumulates or setting.model.tied_embeddings:
        return list(setting.parameters)
    return [parameter for parameter in setting.parameters if parameter.group != "embed"]


def forward_rows(setting: Setting) -> Iterator[Row]:
    """Its fullest moment: weights have just been put together; the last layers are run; the loss is taken."""
    found = [list(_weights_put_together(setting)), list(_last_layers(setting)), list(_loss(setting))]
    yield from max(found, key=lambda made: sum(row.bytes_per_device for row in made))


def _weights_put_together(setting: Setting) -> Iterator[Row]:
    """By stages 1 and 2, before anything else."""
    if setting.stage not in (1, 2) or not setting.mixed:
        return
    yield from _kept(setting, FORWARD, list(setting.parameters))
    count = sum(setting.per_device(p.share) for p in setting.select("embed", "head", trained=True))
    yield numbers("shares put together", "weights", FORWARD, count, setting.compute)


def _last_layers(setting: Setting) -> Iterator[Row]:
    """Under stage 3: a tied table stays from its lookup to the loss.

    The weights of an MLP are put together one by one; those of attention early, for half a pattern and for the tail.
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
    """A chunk's logits, float32; the head's gradient over the chunks so far.

    Under stage 3 it may be fuller where the head's shares have just been put together: if their rows do not fill tiles,
    they are copied into a table of whole ones.
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
    """Of one chunk of the loss, float32: their gradient is fused into the two products that read it."""
    chunk = min(setting.config.train.loss_chunk, setting.tokens)
    return tpu_tiles.padded_bytes((chunk, head_numbers(setting) // setting.model.width), FLOAT32)


def _one_chunk(setting: Setting) -> bool:
    return setting.config.train.loss_chunk >= setting.tokens


def _is_narrow(setting: Setting) -> bool:
    return setting.model.width % tpu_tiles.LANES > 0 and setting.tensor == 1


def _narrow_table(setting: Setting, phase: str) -> Iterator[Row]:
    """A table whose rows do not fill the lanes lies by columns; products read a copy by rows, which are padded."""
    width = setting.model.width
    words = head_numbers(setting) // width
    yield numbers("table by rows", "weights", phase, words * tpu_tiles.up(width, tpu_tiles.LANES), setting.compute)


def boundary_rows(setting: Setting) -> Iterator[Row]:
    """What waits for the backward pass, as the program asks for it; the loss, which is fuller, is `forward_rows`'."""
    yield from between_passes(setting, BOUNDARY, _computing_copies(setting), setting.compute)
    yield from tpu_tiles.batch_padding(setting, BOUNDARY)


def backward_rows(setting: Setting) -> Iterator[Row]:
    """The fullest moment of the backward pass: the gradients of a block are being taken."""
    model, c = setting.model, setting.compute
    copies = list(setting.parameters) if setting.accumulates else setting.select("layers", "tail")
    yield from _kept(setting, BACKWARD, copies)
    if _is_narrow(setting):
        yield from _narrow_table(setting, BACKWARD)
    if not setting.layout.frozen:
        yield _head_gradient(setting)
        if setting.stage == 2 and setting.accumulates and model.tied_embeddings:
            # The lookup's, which is added to it before both are scattered.
            yield numbers("gradient of the lookup", "gradients", BACKWARD, head_numbers(setting), FLOAT32)
    # Those of the embeddings and of the last norm come at the end and at the beginning.
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
    """Under `sqrt`: what the blocks of one group keep, their weights cut out of the stacks, and their gradients."""
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
    """Summed over chunks in float32, and so until it is scattered, at the end; of one chunk, it is taken then, or at
    once where it is smaller than the logits that it is made of."""
    size, head = _logits_bytes(setting), head_numbers(setting)
    if _one_chunk(setting) and size < head * setting.compute:
        return rows.row("logits", "logits and loss", BACKWARD, f"{size:,} B", size)
    each = FLOAT32 if setting.devices > 1 and not _one_chunk(setting) else setting.compute
    return numbers("gradient of the head", "gradients", BACKWARD, head, each)


def update_rows(setting: Setting) -> Iterator[Row]:
    """The optimizer's step."""
    name = setting.config.optimizer.name
    size = FLOAT32 if setting.accumulates else setting.compute
    count = sum(setting.per_device(parameter.moment) for parameter in setting.trained)
    yield batch(setting, UPDATE)
    yield numbers("gradients", "gradients", UPDATE, count, size)
    yield from from_host(setting, UPDATE)
    largest = max(setting.per_device(parameter.moment) for parameter in setting.trained)
    copies = {"lion": 1, "muon": 1, "adafactor": 2}.get(name, 0)  # arrays of the direction that are made at a time
    if copies:
        yield numbers("directions", "optimizer", UPDATE, copies * largest, FLOAT32)
    if name == "muon":
        grams = sum(gram_numbers(p.spec) for p in setting.trained if p.spec.role == "matrix")
        yield numbers("Gram matrices", "optimizer", UPDATE, 2 * grams, FLOAT32)
