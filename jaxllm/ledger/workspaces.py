"""What a training step holds beside the state: a row for each array, in each phase that it lives in.

Exact: batch, copies that compute, accumulators, gradients, and what waits for the backward pass. The rest is what XLA
makes of the step on a platform, read from its buffer assignments and stated as rules; the tests hold their sum.
"""

import math
from collections.abc import Iterable, Iterator

import jax

from jaxllm.ledger import rows
from jaxllm.ledger.activations import head_numbers, head_table, rows_between_passes
from jaxllm.ledger.dataflow import BLOCK_INPUT, block
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, FORWARD, UPDATE, Row
from jaxllm.ledger.setting import FLOAT32, Parameter, Setting
from jaxllm.ledger.slots import SLOTS
from jaxllm.ledger.slots import held as counts
from jaxllm.model.specs import ParamSpec

# tokens, targets, segment_ids, positions: int32; weights: float32.
BATCH_BYTES_PER_TOKEN = 5 * 4
# On a CPU, the XLA of JAX 0.10 holds in float32 what bfloat16 products read, and makes all blocks of a layer pattern
# again before the first gradient; that of 0.12 converts as it goes, and makes one block at a time. In between nobody
# looked, so the larger is taken.
_FRUGAL_CPU_FROM = (0, 12)


def _frugal(setting: Setting) -> bool:
    return setting.platform != "cpu" or jax.__version_info__ >= _FRUGAL_CPU_FROM


def held(setting: Setting) -> int:
    """Bytes in which the platform holds a number of the compute dtype that products read."""
    return setting.compute if _frugal(setting) else FLOAT32


def _numbers(name: str, kind: str, phase: str, count: int, size: int) -> Row:
    return rows.row(name, kind, phase, f"{count:,} × {size} B", count * size)


def _from_host(setting: Setting, phase: str) -> Iterator[Row]:
    """State of the largest array where it is kept in host memory: brought to the device while the gradients are made.

    Updates go array by array (ZeRO-Offload, Ren et al. 2021), so that no more than a few are there at a time.
    """
    optimizer = setting.config.optimizer
    if optimizer.offload == "none":
        return
    sizes = []
    for parameter in setting.parameters:
        numbers = sum(sum(counts(slot, parameter, setting)) for slot in SLOTS[optimizer.name])
        masters = setting.per_device(parameter.weight) if optimizer.offload == "all" else 0
        sizes.append(numbers * setting.moment + masters * setting.store)
    size = max(sizes)
    yield rows.row("state of one array, from host memory", "optimizer", phase, f"{size:,} B", size)


def _batch(setting: Setting, phase: str) -> Row:
    size = setting.step_tokens * BATCH_BYTES_PER_TOKEN
    return rows.row("batch", "batch", phase, f"{setting.step_tokens:,} tokens × {BATCH_BYTES_PER_TOKEN} B", size)


def gradient_numbers(setting: Setting, parameters: Iterable[Parameter]) -> int:
    """Numbers of their gradients on one device while they are taken: whole, or shares from stage 2 on."""
    if setting.stage >= 2:
        return sum(setting.per_device(parameter.share) for parameter in parameters)
    return sum(map(setting.computing, parameters))


def _between_passes(setting: Setting, phase: str) -> Iterator[Row]:
    """What lives from the forward pass to the end of the backward pass."""
    yield _batch(setting, phase)
    if setting.mixed:
        shares = setting.stage == 3
        arrays = setting.parameters
        if phase == BACKWARD and setting.platform != "cpu":  # those of embeddings and head are gone by then
            arrays = tuple(setting.select("layers", "tail"))
        count = sum(setting.per_device(p.weight) if shares else setting.computing(p) for p in arrays)
        name = "compute copy of weights, shares" if shares else "compute copy of weights"
        yield _numbers(name, "weights", phase, count, held(setting))
    if setting.accumulates:
        count = gradient_numbers(setting, setting.parameters)
        yield _numbers("accumulated gradients", "gradient accumulator", phase, count, FLOAT32)
    yield from rows_between_passes(setting, phase)


def forward_rows(setting: Setting) -> Iterator[Row]:
    """The beginning of the forward pass, where stages 1 and 2 have just put their weights together.

    A stack whose layers are put together along their last dimension is copied once more, into the order in which
    products read it.
    """
    if setting.stage not in (1, 2) or not setting.mixed:
        return
    yield from _between_passes(setting, FORWARD)
    count = sum(setting.per_device(p.share) for p in setting.select("embed", "head"))
    yield _numbers("shares put together", "weights", FORWARD, count, setting.compute)
    stacks = [setting.computing(p) for p in setting.select("layers") if p.share.zero_dim not in (None, 0, 1)]
    if stacks:
        yield _numbers("weights, in another order", "weights", FORWARD, max(stacks), setting.compute)
    yield from _zeros(setting, FORWARD)


def _zeros(setting: Setting, phase: str) -> Iterator[Row]:
    """Stacks of gradients, which a GPU that waits for others makes as soon as it can."""
    if setting.platform == "gpu" and setting.devices > 1 and not setting.accumulates:
        count = gradient_numbers(setting, setting.select("layers"))
        yield _numbers("gradients of layers, zeros", "gradients", phase, count, setting.compute)


def boundary_rows(setting: Setting) -> Iterator[Row]:
    """The loss: a chunk's logits, float32, and their gradient; the head's gradient over the chunks so far."""
    model, c, tokens = setting.model, setting.compute, setting.tokens
    chunk = min(setting.config.train.loss_chunk, tokens)
    words = head_numbers(setting) // model.width
    yield from _between_passes(setting, BOUNDARY)
    if setting.stage == 3:
        yield _numbers("gathered head", "gathered parameters", BOUNDARY, head_numbers(setting), c)
    yield _numbers("logits", "logits and loss", BOUNDARY, chunk * words, FLOAT32)
    yield _numbers("gradient of the logits", "logits and loss", BOUNDARY, chunk * words, held(setting))
    yield _numbers("gradient of the hidden states", "gradients", BOUNDARY, tokens * model.width, c)
    if chunk < tokens:
        yield _numbers("gradient of the head, summed", "gradients", BOUNDARY, head_numbers(setting), FLOAT32)
    yield from _zeros(setting, BOUNDARY)


def one_layer(setting: Setting) -> int:
    """Numbers of the weights of one layer, as they compute."""
    arrays = setting.select("layers") or setting.select("tail")
    layers = len(setting.model.pattern if setting.model.repeats else setting.model.tail)
    return sum(_of_one_layer(setting, parameter) for parameter in arrays) // layers


def _of_one_layer(setting: Setting, parameter: Parameter) -> int:
    """Numbers of an array, or of one layer of its stack, while it computes."""
    return setting.computing(parameter) // (setting.model.repeats if parameter.group == "layers" else 1)


def backward_rows(setting: Setting) -> Iterator[Row]:
    """The fullest moment of the backward pass: the gradients of a block are being taken."""
    model, c = setting.model, setting.compute
    yield from _between_passes(setting, BACKWARD)
    arrays = setting.parameters
    if setting.platform != "cpu":  # that of the embeddings comes last
        arrays = tuple(p for p in arrays if p.group != "embed" or p.name == head_table(setting).name)
    yield _numbers("gradients", "gradients", BACKWARD, gradient_numbers(setting, arrays), c)
    yield from _from_host(setting, BACKWARD)
    if setting.stage == 3:
        yield _numbers("gathered layer", "gathered parameters", BACKWARD, one_layer(setting), c)
    if setting.stage >= 2:
        largest = max(_of_one_layer(setting, p) for p in setting.select("layers", "tail"))
        yield _numbers("gradients before they are scattered", "gradients", BACKWARD, 2 * largest, c)
    if setting.group_size > 1:
        one, count = block(setting), setting.group_size * len(model.pattern)
        size = sum(one.kept(setting.remat.kept).values()) + one.values[BLOCK_INPUT].bytes
        formula = f"{count} layers × {size:,} B"
        yield rows.row("blocks of one group", "activations", BACKWARD, formula, count * size)
    yield from _block_rows(setting)


def _block_rows(setting: Setting) -> Iterator[Row]:
    """Temporaries of one iteration of the loop over layers, which is the whole layer pattern; by kind of array."""
    model, c = setting.model, held(setting)
    one, tags = block(setting), setting.remat.kept
    values, again = one.values, one.made_again(tags)
    scores, length = values["attn_probs"].bytes, setting.length
    if setting.config.train.attention_chunk and "attn_probs" in again:
        scores = scores * setting.config.train.attention_chunk // length
    inner = values["mlp_hidden"].bytes // setting.compute * c
    hidden = values[BLOCK_INPUT].bytes // setting.compute * c
    pattern = len(model.pattern)
    norms = 4 if model.norm_placement == "sandwich" else 2
    if "attn_probs" in again:
        counts = {"scores": 3 * pattern - 2, "inner": 6 + pattern, "hidden": 8 * pattern + 2}
        if setting.platform != "cpu":
            counts = {"scores": 2, "inner": 7, "hidden": 10}
        elif _frugal(setting):
            counts = {"scores": pattern, "inner": 7, "hidden": 6 + 4 * pattern}
    else:
        capped = model.attention_softcap > 0
        counts = {"scores": 3 * pattern + 2 if capped else pattern + 1, "inner": 3 * pattern + 1}
        counts["hidden"] = pattern * (6 + 3 * norms // 2)
    for name, size, count in (
        ("scores in backward", scores, counts["scores"]),
        ("MLP in backward", inner, counts["inner"]),
        ("hidden states in backward", hidden, counts["hidden"]),
    ):
        yield rows.row(name, "activations", BACKWARD, f"{count} × {size:,} B", count * size)
    if c != setting.compute:
        # The stacks that layers wrote are turned into float32 as wholes, before the loop that reads them.
        narrow = sum(size for tag, size in one.kept(tags).items() if tag not in ("attn_scores", "attn_probs"))
        size = model.layers * (narrow + values[BLOCK_INPUT].bytes) * (c - setting.compute) // setting.compute
        yield rows.row("activations in float32", "activations", BACKWARD, f"{model.layers} layers", size)
    if model.experts:
        numbers = max(_of_one_layer(setting, p) for p in setting.select("layers", "tail") if p.spec.role == "matrix")
        yield _numbers("gradient of one layer's experts, summed", "gradients", BACKWARD, numbers, FLOAT32)
    if "attn_probs" in again and not setting.config.train.attention_chunk:
        size = setting.sequences * length * length * FLOAT32
        kinds = len({*model.pattern, *model.tail})
        yield rows.row("masks", "activations", BACKWARD, f"{kinds} × {size:,} B", kinds * size)


def update_rows(setting: Setting) -> Iterator[Row]:
    """The optimizer's step."""
    name = setting.config.optimizer.name
    size = FLOAT32 if setting.accumulates else setting.compute
    count = sum(setting.per_device(parameter.moment) for parameter in setting.parameters)
    yield _batch(setting, UPDATE)
    yield _numbers("gradients", "gradients", UPDATE, count, size)
    yield from _from_host(setting, UPDATE)
    if setting.platform == "cpu":
        yield _numbers("gradients, averaged", "gradients", UPDATE, count, FLOAT32)
    largest = max(setting.per_device(parameter.moment) for parameter in setting.parameters)
    copies = {"lion": 1, "muon": 1, "adafactor": 2}.get(name, 0)  # arrays of the direction that are made at a time
    if copies:
        yield _numbers("directions", "optimizer", UPDATE, copies * largest, FLOAT32)
    if name == "muon":
        grams = sum(_gram_numbers(p.spec) for p in setting.parameters if p.spec.role == "matrix")
        yield _numbers("Gram matrices", "optimizer", UPDATE, 2 * grams, FLOAT32)


def _gram_numbers(spec: ParamSpec) -> int:
    """Muon's Newton–Schulz steps square each matrix of an array over its shorter side."""
    inputs = math.prod(spec.shape[i] for i in spec.fan_in)
    counted = [i for i, axis in enumerate(spec.axes) if axis in ("layers", "experts") and i < min(spec.fan_in)]
    matrices = math.prod(spec.shape[i] for i in counted)
    return matrices * min(inputs, spec.size // (matrices * inputs)) ** 2
