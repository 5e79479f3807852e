"""Saved activations of a micro-batch on each device, per checkpoint tag: exact.

A block saves its input and, of the values that its backward pass reads, those that the remat policy keeps
(`exact.block_graph`). Saved outside the blocks: rotary angles, residuals of the token lookup and of the last norm, and
the two gradients that the loss computes while its logits exist. The tests compare all of it, to the byte, with the
residuals of JAX's derivative of the program.
"""

from collections.abc import Iterator

from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, block
from jaxllm.ledger.formula.exact.run import FLOAT32, Parameter, TrainingRun
from jaxllm.ledger.rows import Row

_INT32 = 4
_BOOL = 1


def kept_tags(run: TrainingRun) -> tuple[str, ...]:
    """Returns the tags saved for the whole backward pass; under `sqrt`, those of blocks outside all groups."""
    return run.remat.kept


def rows_between_passes(run: TrainingRun, phase: str) -> Iterator[Row]:
    """Yields one row per tag, those in host memory included, and the rows of values outside the blocks."""
    layers, remat, size = run.model.layers, run.remat, run.group_size
    one = block(run)
    grouped = run.model.repeats * len(run.model.pattern) if size > 1 else 0
    inputs = layers - grouped + run.model.repeats // size * (size > 1)
    bytes_each = one.values[BLOCK_INPUT].bytes
    formula = f"{inputs} {'inputs' if grouped else 'layers'} × {bytes_each:,} B"
    if one.saves_input(kept_tags(run)) or grouped:
        yield Row(BLOCK_INPUT, "activations", phase, inputs * bytes_each, formula)
    for tag, each in one.kept(kept_tags(run)).items():
        where = rows.HOST if remat.kind == "offload" else phase
        count = layers - grouped
        if count and not (where == rows.HOST and phase != rows.BOUNDARY):
            yield Row(tag, "activations", where, count * each, f"{count} layers × {each:,} B")
    for name, per_token, tokens in _outside(run, phase):
        yield Row(name, "activations", phase, tokens * per_token, f"{tokens:,} tokens × {per_token:,} B")
    if run.model.experts:
        yield Row("count of real tokens", "activations", phase, FLOAT32, "4 B")


def _outside(run: TrainingRun, phase: str) -> Iterator[tuple[str, int, int]]:
    """Yields (name, bytes per token, tokens) of each value saved outside the blocks."""
    model, tokens, own = run.model, run.tokens, run.tokens // run.tensor
    D = model.width
    frozen = bool(run.layout.frozen)  # embeddings too: the backward pass reads nothing of their lookup
    if frozen:
        pass
    elif run.tensor == 1:
        yield "token ids", _INT32, tokens
    else:  # besides the ids, a mask of those in this device's shard of the vocabulary
        yield "token ids and vocabulary mask", _INT32 + run.compute_bytes, tokens
    if model.positions == "learned" and frozen:
        pass
    elif model.positions == "learned":
        yield "position ids", _INT32, own
    else:
        kinds = len({*model.pattern * model.repeats, *model.tail} - {"nope"})
        yield "rotary angles", kinds * model.rotated * FLOAT32, tokens
    if model.experts:
        yield "real tokens", _BOOL, tokens
    # The last norm is outside the blocks. It saves its centred inputs, their scaled and squared forms, and two elements
    # per token. The scaled form is for the gradient of the norm's scale. The backward pass computes its gradient first.
    if phase != rows.BACKWARD:
        yield "final norm", (2 if frozen else 3) * D * FLOAT32 + 2 * FLOAT32, own


def loss_gradients(run: TrainingRun) -> int:
    """Returns the elements of the gradients that the loss computes early: of its inputs and of the head."""
    return run.tokens * run.model.width + head_gradient_elements(run)


def head_gradient_elements(run: TrainingRun) -> int:
    """Returns the elements of the gradient of the head's table; 0 if it is frozen."""
    return 0 if run.layout.frozen else head_elements(run)


def head_table(run: TrainingRun) -> Parameter:
    """Returns the table that computes the logits: the head, or the embeddings if they are tied."""
    name = "embed.tokens" if run.model.tied_embeddings else "head"
    return next(parameter for parameter in run.parameters if parameter.name == name)


def head_elements(run: TrainingRun) -> int:
    """Returns the elements of the head's table that a device computes with."""
    return head_table(run).compute_elements
