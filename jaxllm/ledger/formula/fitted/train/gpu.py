"""Memory rules for a training step on XLA's GPU backend, derived from its buffer assignments."""

from collections.abc import Iterator

from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact.activations import head_numbers, head_table
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, block
from jaxllm.ledger.formula.exact.run import FLOAT32, Setting
from jaxllm.ledger.formula.fitted.train.parts import (
    batch,
    between_passes,
    from_host,
    gradient_numbers,
    gram_numbers,
    numbers,
    of_one_layer,
    one_layer,
)
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, FORWARD, UPDATE, Row


def forward_rows(setting: Setting) -> Iterator[Row]:
    """Yields rows of the start of the forward pass, just after ZeRO stages 1 and 2 all-gather the weights.

    A stack whose layers are all-gathered along their last dimension is copied once more, into the layout that matmuls
    read.
    """
    if setting.stage not in (1, 2) or not setting.mixed:
        return
    yield from between_passes(setting, FORWARD, setting.parameters, setting.compute)
    count = sum(setting.per_device(p.share) for p in setting.select("embed", "head", trained=True))
    yield numbers("shares put together", "weights", FORWARD, count, setting.compute)
    stacks = [
        setting.computing(p) for p in setting.select("layers", trained=True) if p.share.zero_dim not in (None, 0, 1)
    ]
    if stacks:
        yield numbers("weights, in another order", "weights", FORWARD, max(stacks), setting.compute)


def _zeros(setting: Setting, phase: str) -> Iterator[Row]:
    """Yields the stacks of layer gradients that the scheduler zero-fills long before the loop over layers writes them.

    Without mixed precision this happens unless gradients are accumulated. With it, this happens with ZeRO stages 1 and
    2, and on several devices with accumulation. Otherwise XLA allocates the stacks after the loss, as it always does
    on one device with Pallas attention.
    """
    if setting.devices == 1 and setting.attention.implementation == "pallas":
        return
    several = setting.accumulates and setting.devices > 1
    if several or setting.stage in (1, 2) if setting.mixed else not setting.accumulates:
        count = gradient_numbers(setting, setting.select("layers", trained=True))
        yield numbers("gradients of layers, zeros", "gradients", phase, count, setting.compute)


def _shares_zeros(setting: Setting, phase: str) -> Iterator[Row]:
    """Yields the zeroed gradient shards of ZeRO stage 1, which reduce-scatters gradients once per step."""
    if setting.stage == 1:
        count = sum(setting.per_device(p.moment) for p in setting.select("layers", trained=True))
        size = FLOAT32 if setting.accumulates else setting.compute
        yield numbers("shares of gradients, zeros", "gradients", phase, count, size)


def _one_chunk(setting: Setting) -> bool:
    """Returns True if one loss chunk has all tokens; the head's gradient is then computed after the layers' gradients."""
    return setting.config.train.loss_chunk >= setting.tokens


def boundary_rows(setting: Setting) -> Iterator[Row]:
    """Yields rows of the loss: a chunk's float32 logits, their gradient, and the head's gradient summed over chunks."""
    model, c, tokens = setting.model, setting.compute, setting.tokens
    chunk = min(setting.config.train.loss_chunk, tokens)
    words = head_numbers(setting) // model.width
    yield from between_passes(setting, BOUNDARY, setting.parameters, c)
    if setting.stage == 3:
        # The all-gathered head, and a copy in the layout that the loop reads. There is no copy for a frozen head (no
        # gradient), for a tied one with accumulation (in that layout since its lookup), or with Pallas attention for
        # one sharded over `tensor`.
        ordered = bool(setting.layout.frozen) or (model.tied_embeddings and setting.accumulates)
        ordered |= setting.attention.implementation == "pallas" and setting.tensor > 1
        copies = 1 if ordered else 2
        yield numbers("gathered head", "gathered parameters", BOUNDARY, copies * head_numbers(setting), c)
    yield numbers("logits", "logits and loss", BOUNDARY, chunk * words, FLOAT32)
    yield numbers("gradient of the logits", "logits and loss", BOUNDARY, chunk * words, c)
    yield numbers("gradient of the hidden states", "gradients", BOUNDARY, tokens * model.width, c)
    if not _one_chunk(setting) and not setting.layout.frozen:
        yield numbers("gradient of the head, summed", "gradients", BOUNDARY, head_numbers(setting), FLOAT32)
    yield from _zeros(setting, BOUNDARY)
    yield from _shares_zeros(setting, BOUNDARY)


def backward_rows(setting: Setting) -> Iterator[Row]:
    """Yields rows of the largest live set of the backward pass, while a block's gradients are computed."""
    model, c = setting.model, setting.compute
    # The copies of embeddings and head are freed by then, unless other micro-batches follow.
    copies = setting.parameters if setting.accumulates else setting.select("layers", "tail")
    yield from between_passes(setting, BACKWARD, copies, c)
    # The gradient of the embeddings is computed last.
    head = head_table(setting).name
    arrays = [p for p in setting.trained if p.name == head or p.group != "embed"]
    if setting.layout.frozen:
        pass
    elif _one_chunk(setting):
        arrays = [p for p in arrays if p.name != head]
        words = head_numbers(setting) // model.width
        yield numbers("gradient of the logits", "logits and loss", BACKWARD, setting.tokens * words, c)
    elif setting.stage >= 2 and model.tied_embeddings:  # scattered after the lookup's gradient is added
        yield numbers("gradient of the head, whole", "gradients", BACKWARD, head_numbers(setting), c)
    yield numbers("gradients", "gradients", BACKWARD, gradient_numbers(setting, arrays), c)
    yield from _shares_zeros(setting, BACKWARD)
    yield from from_host(setting, BACKWARD)
    if setting.stage == 3:
        yield numbers("gathered layer", "gathered parameters", BACKWARD, one_layer(setting), c)
    if setting.stage >= 2:
        largest = max(of_one_layer(setting, p) for p in setting.select("layers", "tail", trained=True))
        yield numbers("gradients before reduce-scatter", "gradients", BACKWARD, 2 * largest, c)
    if setting.group_size > 1:
        yield from _group_rows(setting)
    fuller = max(_moments(setting), key=lambda moment: sum(size * count for _, size, count in moment))
    for name, size, count in fuller:
        yield rows.row(name, "activations", BACKWARD, f"{count} × {size:,} B", count * size)
    if model.experts and not setting.layout.frozen:
        largest = max(of_one_layer(setting, p) for p in setting.select("layers", "tail") if p.spec.role == "matrix")
        count = (3 if model.gated else 2) * largest
        yield numbers("summed expert gradients, a layer", "gradients", BACKWARD, count, FLOAT32)


def _group_rows(setting: Setting) -> Iterator[Row]:
    """Yields what remat policy `sqrt` adds per group: saved activations, weights sliced from the stacks, gradients."""
    one, count = block(setting), setting.group_size * len(setting.model.pattern)
    size = sum(one.kept(setting.remat.kept).values()) + one.values[BLOCK_INPUT].bytes
    yield rows.row("blocks of one group", "activations", BACKWARD, f"{count} layers × {size:,} B", count * size)
    groups = setting.model.repeats // setting.group_size
    weights = setting.select("layers")
    if setting.stage < 3:
        whole = 2 * sum(map(setting.computing, weights)) // groups  # for recomputation, and for gradients
        yield numbers("weights of one group, twice", "weights", BACKWARD, whole, setting.compute)
    gradients = gradient_numbers(setting, setting.select("layers", trained=True)) // groups
    yield numbers("gradients of one group", "gradients", BACKWARD, gradients, setting.compute)


# (name, bytes of one array, arrays)
Moment = list[tuple[str, int, int]]


def _moments(setting: Setting) -> tuple[Moment, Moment]:
    """Returns the live sets of one iteration of the loop over layers: at attention's gradients, and at the MLP's.

    Unchunked float32 scores are recomputed before both and stay alive until attention's gradients. Chunks of scores are
    freed at once.
    """
    c, t = setting.compute, setting.tensor
    one = block(setting)
    values, again = one.values, one.made_again(setting.remat.kept)
    chunk, kernels = setting.config.train.attention_chunk, setting.attention.implementation == "pallas"
    own, q, k = (values[name].bytes for name in (BLOCK_INPUT, "q", "k"))
    whole = own * t
    inner = values["mlp_hidden"].bytes
    weights = setting.model.width * setting.model.mlp_width // t * c
    attention = [
        *_scores(setting),
        ("hidden states", whole, 4),
        ("queries", q, 4),
        ("keys and values", k, 4),
    ]
    mlp = [
        ("MLP", inner, 5),
        ("weights of one MLP", weights, 2),
        ("hidden states", whole, 7 if kernels and t > 1 and setting.stage == 3 else 5),
        ("queries", q, 4 if chunk else 2),
        ("keys and values", k, 3),
    ]
    if setting.model.experts:
        mlp.append(("rows of experts", values["mlp_down"].bytes, 4))
    if chunk and setting.stage == 3:  # weight gradients are computed late, while others are in transfer
        attention.append(("MLP", inner, 4))
    others = len(setting.model.pattern) - 1
    if others and setting.group_size == 1:  # the pattern's other blocks are recomputed before the first gradient
        inners, hiddens, keys = (4, 5, 4) if setting.stage >= 2 else (1, 1, 0)
        if kernels and t > 1 and setting.stage < 2:
            inners, hiddens = 2, 4
        if setting.stage == 3:  # a block's all-gather of weights waits for the block before it
            others = 1
        mlp += [
            ("MLP, other blocks", inner, inners * others),
            ("hidden states, other blocks", whole, hiddens * others),
            ("keys and values, other blocks", k, keys * others),
        ]
    if "attn_probs" in again and not chunk:
        scores = values["attn_probs"].bytes
        mlp += [("scores", scores, 1), ("probabilities", scores * c // FLOAT32, 1)]
    return attention, mlp


def _scores(setting: Setting) -> Moment:
    """Returns the arrays of attention's gradients with one element per query–key pair, or per query with Pallas."""
    pairs = setting.sequences * setting.length**2
    heads = setting.model.heads // setting.tensor
    if setting.attention.implementation == "pallas":
        return [("log sums of attention, and lost shares", setting.tokens * heads * FLOAT32, 2)]
    if setting.attention.implementation == "cudnn":
        return [("mask and its gradient", pairs * setting.compute, 2)]
    chunk = setting.config.train.attention_chunk
    if chunk:
        pairs = pairs * chunk // setting.length
    scores = pairs * heads * FLOAT32
    return [
        ("scores and their gradient", scores, 2),
        ("probabilities", scores * setting.compute // FLOAT32, 2 if setting.tensor > 1 or setting.stage >= 2 else 1),
        ("mask", pairs, 1),
    ]


def update_rows(setting: Setting) -> Iterator[Row]:
    """Yields rows of the optimizer's update."""
    name = setting.config.optimizer.name
    size = FLOAT32 if setting.accumulates else setting.compute
    count = sum(setting.per_device(parameter.moment) for parameter in setting.trained)
    yield batch(setting, UPDATE)
    together = setting.stage in (1, 2) and not setting.mixed
    if together and setting.accumulates:
        # The gradient of each layer array is freed when its new weights are all-gathered.
        count = sum(setting.per_device(p.moment) for p in setting.select("embed", "head", trained=True))
    yield numbers("gradients", "gradients", UPDATE, count, size)
    yield from from_host(setting, UPDATE)
    if together:
        whole = sum(map(setting.computing, setting.select("layers", trained=True)))
        yield numbers("new weights, put together", "weights", UPDATE, whole, setting.store)
    largest = max(setting.per_device(parameter.moment) for parameter in setting.trained)
    if name in ("lion", "adafactor"):
        copies = 2 if name == "adafactor" and size != FLOAT32 else 1  # plus the gradient in float32
        yield numbers("direction of one array", "optimizer", UPDATE, copies * largest, FLOAT32)
    if name == "muon":  # its matrices are all-gathered and orthogonalised concurrently
        matrices = [p for p in setting.trained if p.spec.role == "matrix"]
        yield numbers("directions", "optimizer", UPDATE, sum(map(setting.computing, matrices)), FLOAT32)
        grams = sum(gram_numbers(p.spec) for p in matrices)
        made = 2 * grams if setting.stage == 0 else 3 * grams // 2
        yield numbers("Gram matrices", "optimizer", UPDATE, made, FLOAT32)
