"""Memory rules for a training step on XLA's CPU backend, derived from its buffer assignments."""

from collections.abc import Iterator

from jaxllm.config.optimizers import OPTIMIZERS
from jaxllm.ledger.formula.exact.activations import head_elements, head_gradient_elements
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, block
from jaxllm.ledger.formula.exact.run import FLOAT32, TrainingRun
from jaxllm.ledger.formula.fitted.train.cpu_stacks import (
    Held,
    alive_between_passes,
    arrays,
    frugal,
    operand_itemsize,
    squares,
    with_copies,
)
from jaxllm.ledger.formula.fitted.train.cpu_update import update_rows as update_rows
from jaxllm.ledger.formula.fitted.train.parts import from_host, of_one_layer, one_layer
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, FORWARD, Row


def forward_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the start of the step, where the zeroed gradient stacks are already allocated (Adafactor)."""
    if OPTIMIZERS[run.config.optimizer.name].array_statistics and not run.accumulates:
        yield from with_copies(run, FORWARD, [*alive_between_passes(run, FORWARD), squares(run, FORWARD)])


def boundary_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the loss: computing a chunk's probabilities, or the head-gradient matmul that reads them."""
    model, c, tokens = run.model, run.compute_bytes, run.tokens
    chunk = min(run.config.train.loss_chunk, tokens)
    head = head_elements(run)
    logits = chunk * (head // model.width)
    chunked = chunk < tokens
    parts = [*alive_between_passes(run, BOUNDARY), *_unrolled(run)]
    if run.stage == 3:
        parts.append(arrays("gathered head", "gathered parameters", BOUNDARY, [head], FLOAT32))
    # XLA reads the target's logit after it computes the exponentials, so both arrays are alive. The read is a separate
    # operation over `tensor`, where values of other devices come in between, and above a size from which it is not
    # fused. Masked logits are a second array in any case.
    masked = head // model.width * run.tensor > model.vocab_size
    unfused = 2**29 if run.stage == 0 and run.devices > 1 else 2**31
    in_place = run.tensor > 1 or logits * FLOAT32 >= unfused
    copies = 2 if masked or not in_place else 1
    trained = head_gradient_elements(run) > 0
    if not trained or (copies - 1) * logits > head:
        parts.append(arrays("logits and their exponentials", "logits and loss", BOUNDARY, [logits] * copies, FLOAT32))
    else:
        parts.append(arrays("gradient of the head, one chunk", "gradients", BOUNDARY, [head], FLOAT32))
        # With one chunk, the head's gradient is copied to another layout before it is scattered.
        kept = run.accumulates or (run.stage == 2 and not run.mixed)
        if head > logits and run.stage >= 2 and not chunked and kept:
            parts.append(arrays("gradient of the head, in another layout", "gradients", BOUNDARY, [head], FLOAT32))
        else:
            parts.append(arrays("gradient of the logits", "logits and loss", BOUNDARY, [logits], FLOAT32))
    if chunked and trained:
        parts.append(arrays("gradient of the head, summed", "gradients", BOUNDARY, [head], FLOAT32))
    parts.append(arrays("gradient of the hidden states", "gradients", BOUNDARY, [tokens * model.width], c))
    yield from with_copies(run, BOUNDARY, parts)


def _unrolled(run: TrainingRun) -> Iterator[Held]:
    """Yields inputs of the gradients that XLA computes in the forward pass when the loop over layers is fully unrolled.

    Per layer: the probabilities in the layout of the matmul with values, the gate's derivative, and three hidden
    states. Once: the mask, in the shape of the scores.
    """
    model, one = run.model, block(run)
    if frugal() or model.unroll < model.repeats or model.repeats < 2:
        return
    kept = one.kept(run.remat.kept)
    sizes = [one.values["attn_probs"].bytes] if "attn_probs" in kept else []
    if "mlp_gate" in kept:
        sizes.append(one.values["mlp_gate"].bytes)
    if run.remat.kind == "none":
        sizes += [one.values[BLOCK_INPUT].bytes] * 3
    mask = one.values["attn_probs"].bytes if "attn_probs" in kept else 0
    size = model.layers * sum(sizes) + mask
    formula = f"{size:,} B, of {model.layers} layers"
    yield Row("gradient inputs, unrolled layers", "workspace", BOUNDARY, size, formula), []


def backward_rows(run: TrainingRun) -> Iterator[Row]:
    """Yields rows of the largest live set of the backward pass, while a block's gradients are computed."""
    model, c = run.model, run.compute_bytes
    parts = list(alive_between_passes(run, BACKWARD))
    parts.append(arrays("gradient of the head", "gradients", BACKWARD, [head_gradient_elements(run)], FLOAT32))
    parts += [(row, []) for row in from_host(run, BACKWARD)]
    if run.stage == 3:
        parts.append(arrays("gathered layer", "gathered parameters", BACKWARD, [one_layer(run)], c))
    if run.stage >= 2:
        largest = max(of_one_layer(run, p) for p in run.select("layers", "tail", trained=True))
        parts.append(arrays("gradients before reduce-scatter", "gradients", BACKWARD, [largest] * 2, c))
    if run.group_size > 1:
        one, count = block(run), run.group_size * len(model.pattern)
        size = sum(one.kept(run.remat.kept).values()) + one.values[BLOCK_INPUT].bytes
        formula = f"{count} layers × {size:,} B"
        parts.append((Row("blocks of one group", "activations", BACKWARD, count * size, formula), []))
        own = [of_one_layer(run, p) * run.group_size for p in run.select("layers")]
        parts.append(arrays("weights of one group", "weights", BACKWARD, own, operand_itemsize(run)))
        own = [of_one_layer(run, p) * run.group_size for p in run.select("layers", trained=True)]
        parts.append(arrays("gradients of one group", "gradients", BACKWARD, own, c))
    if run.layout.frozen and run.stage < 3 and not model.experts:
        # For trained weights, these copies reuse the buffers of the gradients.
        weights = [one_layer(run, trained=False)]
        parts.append(arrays("weights of one layer, sliced", "weights", BACKWARD, weights, FLOAT32))
    parts += _block(run)
    yield from with_copies(run, BACKWARD, parts)


def _block(run: TrainingRun) -> Iterator[Held]:
    """Yields temporaries of one backward iteration of the loop over layers, by kind of array.

    They are the larger of two live sets: the gradients of the MLP, or those of attention.
    """
    model, widen = run.model, operand_itemsize(run) // run.compute_bytes
    one = block(run)
    values, again = one.values, one.recomputed(run.remat.kept)
    chunk, length, pattern = run.config.train.attention_chunk, run.length, len(model.pattern)
    chunked = 0 < chunk < length
    scores = values["attn_probs"].bytes * (chunk if chunked else length) // length
    sizes = {
        "scores": scores,
        "MLP": values["mlp_hidden"].bytes * widen,
        "hidden states": values[BLOCK_INPUT].bytes * widen,
        "queries": values["q"].bytes * widen,
        "keys and values": values["k"].bytes * widen,
    }
    if "attn_probs" in again:
        counts = {"MLP": 7 if model.gated else 4, "hidden states": 8, "queries": 2, "keys and values": 2}
        if run.layout.frozen:  # without two factors of weight gradients
            counts["MLP"] -= 2
        if chunked:  # sliced into chunks, and concatenated again
            counts = {**counts, "hidden states": 9, "queries": 5, "keys and values": 4}
        if model.qk_norm:
            counts["queries"] += 2
            counts["keys and values"] += 3
        more = pattern - 1
        if frugal():
            counts["hidden states"] += 4 * more
            many = {"MLP": pattern, "attention": pattern + 1}
        else:
            counts = {name: count + (more * count if name != "MLP" else more) for name, count in counts.items()}
            many = {"MLP": 3 * pattern - 2, "attention": 3 * pattern}
        mlp = {**counts, "scores": 0 if chunked else many["MLP"]}
        attention = {**counts, "scores": many["attention"], "MLP": 0}
    else:
        norms = 4 if model.norm_placement == "sandwich" else 2  # on one side of each sub-layer, or on both
        capped = model.attention_softcap > 0
        mlp = {"scores": 3 * pattern + 2 if capped else pattern + 1, "MLP": 3 * pattern + 1}
        if run.layout.frozen:  # without what only the weight gradient of the last matmul reads
            mlp["MLP"] -= pattern * (("down" not in run.config.lora.targets) + (not model.gated))
        mlp["hidden states"] = pattern * (6 + 3 * norms // 2)
        attention = mlp
    fullest = max(mlp, attention, key=lambda counts: sum(sizes[name] * count for name, count in counts.items()))
    for name, count in fullest.items():
        size = sizes[name]
        if count:
            formula = f"{count} × {size:,} B"
            yield Row(f"{name} in backward", "activations", BACKWARD, count * size, formula), [size] * count
    if model.experts:
        if not run.layout.frozen:
            count = max(of_one_layer(run, p) for p in run.select("layers", "tail") if p.spec.role == "matrix")
            yield arrays("summed expert gradients, a layer", "gradients", BACKWARD, [count], FLOAT32)
        # Rows in expert order and in token order: values, gradients, and the inputs of both.
        ordered = values["mlp_down"].bytes * widen
        of_tokens = run.tokens * model.experts_per_token * model.width * operand_itemsize(run)
        size = 3 * (ordered + of_tokens)
        formula = f"3 × ({ordered:,} + {of_tokens:,} B)"
        yield Row("rows of experts in backward", "activations", BACKWARD, size, formula), []
    if "attn_probs" in again and not chunk:
        size = run.sequences * length * length * FLOAT32
        kinds = len({kind == "sliding" for kind in model.pattern})  # layers without RoPE use the mask of full layers
        yield Row("masks", "activations", BACKWARD, kinds * size, f"{kinds} × {size:,} B"), []
