"""Memory rules for a training step on XLA's GPU backend, derived from its buffer assignments."""

from collections.abc import Iterator

from jaxllm.config.optimizers import OPTIMIZERS
from jaxllm.ledger.formula.exact.activations import head_elements, head_table
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, block
from jaxllm.ledger.formula.exact.run import FLOAT32, TrainingRun
from jaxllm.ledger.formula.fitted.train.parts import (
    batch,
    between_passes,
    from_host,
    gradient_elements,
    gram_elements,
    of_one_layer,
    one_layer,
)
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, FORWARD, UPDATE, Row, array_row


def forward_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the start of the forward pass, just after ZeRO stages 1 and 2 all-gather the weights.

    A stack whose layers are all-gathered along their last dimension is copied once more, into the layout that matmuls
    read.
    """
    if run.stage not in (1, 2) or not run.mixed:
        return
    yield from between_passes(run, FORWARD, run.parameters, run.compute_bytes)
    count = sum(p.sharded.elements_per_device for p in run.select("embed", "head", trained=True))
    yield array_row("all-gathered shards", "weights", FORWARD, count, run.compute_bytes)
    stacks = [p.compute_elements for p in run.select("layers", trained=True) if p.sharded.zero_dim not in (None, 0, 1)]
    if stacks:
        yield array_row("weights in another layout", "weights", FORWARD, max(stacks), run.compute_bytes)


def _zeros(run: TrainingRun, phase: str) -> Iterator[Row]:
    """Yields the stacks of layer gradients that the scheduler zero-fills long before the loop over layers writes them.

    Without mixed precision this happens unless gradients are accumulated. With it, this happens with ZeRO stages 1 and
    2, and on several devices with accumulation. Otherwise XLA allocates the stacks after the loss, as it always does
    on one device with Pallas attention.
    """
    if run.devices == 1 and run.attention.implementation == "pallas":
        return
    several = run.accumulates and run.devices > 1
    if several or run.stage in (1, 2) if run.mixed else not run.accumulates:
        count = gradient_elements(run, run.select("layers", trained=True))
        yield array_row("layer gradients, zeroed", "gradients", phase, count, run.compute_bytes)


def _shares_zeros(run: TrainingRun, phase: str) -> Iterator[Row]:
    """Yields the zeroed gradient shards of ZeRO stage 1, which reduce-scatters gradients once per step."""
    if run.stage == 1:
        count = sum(p.moment.elements_per_device for p in run.select("layers", trained=True))
        size = FLOAT32 if run.accumulates else run.compute_bytes
        yield array_row("gradient shards, zeroed", "gradients", phase, count, size)


def _one_chunk(run: TrainingRun) -> bool:
    """Returns True if one loss chunk has all tokens; the head's gradient then comes after the layers' gradients."""
    return run.config.train.loss_chunk >= run.tokens


def boundary_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the loss: a chunk's float32 logits, their gradient, and the head's gradient summed over chunks."""
    model, c, tokens = run.model, run.compute_bytes, run.tokens
    chunk = min(run.config.train.loss_chunk, tokens)
    words = head_elements(run) // model.width
    yield from between_passes(run, BOUNDARY, run.parameters, c)
    if run.stage == 3:
        # The all-gathered head, and a copy in the layout that the loop reads. There is no copy for a frozen head (no
        # gradient), for a tied one with accumulation (in that layout since its lookup), or with Pallas attention for
        # one sharded over `tensor`.
        ordered = bool(run.layout.frozen) or (model.tied_embeddings and run.accumulates)
        ordered |= run.attention.implementation == "pallas" and run.tensor > 1
        copies = 1 if ordered else 2
        yield array_row("gathered head", "gathered parameters", BOUNDARY, copies * head_elements(run), c)
    yield array_row("logits", "logits and loss", BOUNDARY, chunk * words, FLOAT32)
    yield array_row("gradient of the logits", "logits and loss", BOUNDARY, chunk * words, c)
    yield array_row("gradient of the hidden states", "gradients", BOUNDARY, tokens * model.width, c)
    if not _one_chunk(run) and not run.layout.frozen:
        yield array_row("gradient of the head, summed", "gradients", BOUNDARY, head_elements(run), FLOAT32)
    yield from _zeros(run, BOUNDARY)
    yield from _shares_zeros(run, BOUNDARY)


def backward_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the largest live set of the backward pass, while a block's gradients are computed."""
    model, c = run.model, run.compute_bytes
    # The copies of embeddings and head are freed by then, unless other micro-batches follow.
    copies = run.parameters if run.accumulates else run.select("layers", "tail")
    yield from between_passes(run, BACKWARD, copies, c)
    # The gradient of the embeddings is computed last.
    head = head_table(run).name
    arrays = [p for p in run.trained if p.name == head or p.group != "embed"]
    if run.layout.frozen:
        pass
    elif _one_chunk(run):
        arrays = [p for p in arrays if p.name != head]
        words = head_elements(run) // model.width
        yield array_row("gradient of the logits", "logits and loss", BACKWARD, run.tokens * words, c)
    elif run.stage >= 2 and model.tied_embeddings:  # scattered after the lookup's gradient is added
        yield array_row("gradient of the head, unsharded", "gradients", BACKWARD, head_elements(run), c)
    yield array_row("gradients", "gradients", BACKWARD, gradient_elements(run, arrays), c)
    yield from _shares_zeros(run, BACKWARD)
    yield from from_host(run, BACKWARD)
    if run.stage == 3:
        yield array_row("gathered layer", "gathered parameters", BACKWARD, one_layer(run), c)
    if run.stage >= 2:
        largest = max(of_one_layer(run, p) for p in run.select("layers", "tail", trained=True))
        yield array_row("gradients before reduce-scatter", "gradients", BACKWARD, 2 * largest, c)
    if run.group_size > 1:
        yield from _group_rows(run)
    fuller = max(_live_sets(run), key=lambda moment: sum(size * count for _, size, count in moment))
    for name, size, count in fuller:
        yield Row(name, "activations", BACKWARD, count * size, f"{count} × {size:,} B")
    if model.experts and not run.layout.frozen:
        largest = max(of_one_layer(run, p) for p in run.select("layers", "tail") if p.spec.role == "matrix")
        count = (3 if model.gated else 2) * largest
        yield array_row("summed expert gradients, a layer", "gradients", BACKWARD, count, FLOAT32)


def _group_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields what remat policy `sqrt` adds per group: saved activations, weights sliced from the stacks, gradients."""
    one, count = block(run), run.group_size * len(run.model.pattern)
    size = sum(one.kept(run.remat.kept).values()) + one.values[BLOCK_INPUT].bytes
    yield Row("blocks of one group", "activations", BACKWARD, count * size, f"{count} layers × {size:,} B")
    groups = run.model.repeats // run.group_size
    weights = run.select("layers")
    if run.stage < 3:
        whole = 2 * sum(p.compute_elements for p in weights) // groups  # for recomputation, and for gradients
        yield array_row("weights of one group, twice", "weights", BACKWARD, whole, run.compute_bytes)
    gradients = gradient_elements(run, run.select("layers", trained=True)) // groups
    yield array_row("gradients of one group", "gradients", BACKWARD, gradients, run.compute_bytes)


# (name, bytes of one array, arrays)
LiveSet = list[tuple[str, int, int]]


def _live_sets(run: TrainingRun) -> tuple[LiveSet, LiveSet]:
    """Returns the live sets of one iteration of the loop over layers: at attention's gradients, and at the MLP's.

    Unchunked float32 scores are recomputed before both and stay alive until attention's gradients. Chunks of scores are
    freed at once.
    """
    c, t = run.compute_bytes, run.tensor
    one = block(run)
    values, again = one.values, one.recomputed(run.remat.kept)
    chunk, kernels = run.config.train.attention_chunk, run.attention.implementation == "pallas"
    own, q, k = (values[name].bytes for name in (BLOCK_INPUT, "q", "k"))
    whole = own * t
    inner = values["mlp_hidden"].bytes
    weights = run.model.width * run.model.mlp_width // t * c
    attention = [
        *_scores(run),
        ("hidden states", whole, 4),
        ("queries", q, 4),
        ("keys and values", k, 4),
    ]
    mlp = [
        ("MLP", inner, 5),
        ("weights of one MLP", weights, 2),
        ("hidden states", whole, 7 if kernels and t > 1 and run.stage == 3 else 5),
        ("queries", q, 4 if chunk else 2),
        ("keys and values", k, 3),
    ]
    if run.model.experts:
        mlp.append(("rows of experts", values["mlp_down"].bytes, 4))
    if chunk and run.stage == 3:  # weight gradients are computed late, while others are in transfer
        attention.append(("MLP", inner, 4))
    others = len(run.model.pattern) - 1
    if others and run.group_size == 1:  # the pattern's other blocks are recomputed before the first gradient
        inners, hiddens, keys = (4, 5, 4) if run.stage >= 2 else (1, 1, 0)
        if kernels and t > 1 and run.stage < 2:
            inners, hiddens = 2, 4
        if run.stage == 3:  # a block's all-gather of weights waits for the block before it
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


def _scores(run: TrainingRun) -> LiveSet:
    """Returns the arrays of attention's gradients with one element per query–key pair, or per query with Pallas."""
    pairs = run.sequences * run.length**2
    heads = run.model.heads // run.tensor
    if run.attention.implementation == "pallas":
        return [("log-sum-exp and delta of attention", run.tokens * heads * FLOAT32, 2)]
    if run.attention.implementation == "cudnn":
        return [("mask and its gradient", pairs * run.compute_bytes, 2)]
    chunk = run.config.train.attention_chunk
    if chunk:
        pairs = pairs * chunk // run.length
    scores = pairs * heads * FLOAT32
    return [
        ("scores and their gradient", scores, 2),
        ("probabilities", scores * run.compute_bytes // FLOAT32, 2 if run.tensor > 1 or run.stage >= 2 else 1),
        ("mask", pairs, 1),
    ]


def update_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the optimizer's update."""
    optimizer = OPTIMIZERS[run.config.optimizer.name]
    size = FLOAT32 if run.accumulates else run.compute_bytes
    count = sum(parameter.moment.elements_per_device for parameter in run.trained)
    yield batch(run, UPDATE)
    together = run.stage in (1, 2) and not run.mixed
    if together and run.accumulates:
        # The gradient of each layer array is freed when its new weights are all-gathered.
        count = sum(p.moment.elements_per_device for p in run.select("embed", "head", trained=True))
    yield array_row("gradients", "gradients", UPDATE, count, size)
    yield from from_host(run, UPDATE)
    if together:
        whole = sum(p.compute_elements for p in run.select("layers", trained=True))
        yield array_row("new weights, all-gathered", "weights", UPDATE, whole, run.param_bytes)
    largest = max(parameter.moment.elements_per_device for parameter in run.trained)
    copies = optimizer.directions.get("gpu", 0)
    if copies:
        if optimizer.array_statistics and size != FLOAT32:
            copies += 1  # the gradient in float32
        yield array_row("direction of one array", "optimizer", UPDATE, copies * largest, FLOAT32)
    if optimizer.orthogonalizes:  # its matrices are all-gathered and orthogonalised concurrently
        matrices = [p for p in run.trained if p.spec.role == "matrix"]
        yield array_row("directions", "optimizer", UPDATE, sum(p.compute_elements for p in matrices), FLOAT32)
        grams = sum(gram_elements(p.spec) for p in matrices)
        made = 2 * grams if run.stage == 0 else 3 * grams // 2
        yield array_row("Gram matrices", "optimizer", UPDATE, made, FLOAT32)
