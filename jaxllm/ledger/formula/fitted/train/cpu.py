"""What XLA's CPU backend makes of a training step, read from its buffer assignments and stated as rules."""

from collections.abc import Iterator

from jaxllm.ledger import rows
from jaxllm.ledger.formula.exact.activations import head_gradient_numbers, head_numbers
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, block
from jaxllm.ledger.formula.exact.run import FLOAT32, Setting
from jaxllm.ledger.formula.fitted.train.cpu_stacks import (
    Held,
    arrays,
    frugal,
    held_bytes,
    squares,
    waiting,
    with_copies,
)
from jaxllm.ledger.formula.fitted.train.cpu_update import update_rows as update_rows
from jaxllm.ledger.formula.fitted.train.parts import from_host, of_one_layer, one_layer
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, FORWARD, Row


def forward_rows(setting: Setting) -> Iterator[Row]:
    """The beginning of the step, while stacks wait to be written into."""
    if setting.config.optimizer.name == "adafactor" and not setting.accumulates:
        yield from with_copies(setting, FORWARD, [*waiting(setting, FORWARD), squares(setting, FORWARD)])


def boundary_rows(setting: Setting) -> Iterator[Row]:
    """The loss: while a chunk's probabilities are made, or while they are multiplied for the head's gradient."""
    model, c, tokens = setting.model, setting.compute, setting.tokens
    chunk = min(setting.config.train.loss_chunk, tokens)
    head = head_numbers(setting)
    logits = chunk * (head // model.width)
    chunked = chunk < tokens
    parts = [*waiting(setting, BOUNDARY), *_unrolled(setting)]
    if setting.stage == 3:
        parts.append(arrays("gathered head", "gathered parameters", BOUNDARY, [head], FLOAT32))
    # The target's logit is read after the exponentials are made, except where it is an operation of its own: over
    # `tensor`, where other devices' numbers come in between, and beyond a size, from which on it is not fused. Masked
    # logits are a second array all the same.
    masked = head // model.width * setting.tensor > model.vocab_size
    unfused = 2**29 if setting.stage == 0 and setting.devices > 1 else 2**31
    in_place = setting.tensor > 1 or logits * FLOAT32 >= unfused
    copies = 2 if masked or not in_place else 1
    trained = head_gradient_numbers(setting) > 0
    if not trained or (copies - 1) * logits > head:
        parts.append(arrays("logits and their exponentials", "logits and loss", BOUNDARY, [logits] * copies, FLOAT32))
    else:
        parts.append(arrays("gradient of the head, of a chunk", "gradients", BOUNDARY, [head], FLOAT32))
        # Before the only chunk's gradient of the head is scattered it is brought into order.
        kept = setting.accumulates or (setting.stage == 2 and not setting.mixed)
        if head > logits and setting.stage >= 2 and not chunked and kept:
            parts.append(arrays("gradient of the head, in order", "gradients", BOUNDARY, [head], FLOAT32))
        else:
            parts.append(arrays("gradient of the logits", "logits and loss", BOUNDARY, [logits], FLOAT32))
    if chunked and trained:
        parts.append(arrays("gradient of the head, summed", "gradients", BOUNDARY, [head], FLOAT32))
    parts.append(arrays("gradient of the hidden states", "gradients", BOUNDARY, [tokens * model.width], c))
    yield from with_copies(setting, BOUNDARY, parts)


def _unrolled(setting: Setting) -> Iterator[Held]:
    """Where no loop over layers is left, what the gradients are made of is made in the forward pass already.

    That is for each layer: its probabilities in the order of the product with values, the gate's derivative, and three
    hidden states; and the mask, once, of the scores' shape.
    """
    model, one = setting.model, block(setting)
    if frugal() or model.unroll < model.repeats or model.repeats < 2:
        return
    kept = one.kept(setting.remat.kept)
    sizes = [one.values["attn_probs"].bytes] if "attn_probs" in kept else []
    if "mlp_gate" in kept:
        sizes.append(one.values["mlp_gate"].bytes)
    if setting.remat.kind == "none":
        sizes += [one.values[BLOCK_INPUT].bytes] * 3
    mask = one.values["attn_probs"].bytes if "attn_probs" in kept else 0
    size = model.layers * sum(sizes) + mask
    formula = f"{size:,} B, of {model.layers} layers"
    yield rows.row("for gradients, of unrolled layers", "workspace", BOUNDARY, formula, size), []


def backward_rows(setting: Setting) -> Iterator[Row]:
    """The fullest moment of the backward pass: the gradients of a block are being taken."""
    model, c = setting.model, setting.compute
    parts = list(waiting(setting, BACKWARD))
    parts.append(arrays("gradient of the head", "gradients", BACKWARD, [head_gradient_numbers(setting)], FLOAT32))
    parts += [(row, []) for row in from_host(setting, BACKWARD)]
    if setting.stage == 3:
        parts.append(arrays("gathered layer", "gathered parameters", BACKWARD, [one_layer(setting)], c))
    if setting.stage >= 2:
        largest = max(of_one_layer(setting, p) for p in setting.select("layers", "tail", trained=True))
        parts.append(arrays("gradients before they are scattered", "gradients", BACKWARD, [largest] * 2, c))
    if setting.group_size > 1:
        one, count = block(setting), setting.group_size * len(model.pattern)
        size = sum(one.kept(setting.remat.kept).values()) + one.values[BLOCK_INPUT].bytes
        formula = f"{count} layers × {size:,} B"
        parts.append((rows.row("blocks of one group", "activations", BACKWARD, formula, count * size), []))
        own = [of_one_layer(setting, p) * setting.group_size for p in setting.select("layers")]
        parts.append(arrays("weights of one group", "weights", BACKWARD, own, held_bytes(setting)))
        own = [of_one_layer(setting, p) * setting.group_size for p in setting.select("layers", trained=True)]
        parts.append(arrays("gradients of one group", "gradients", BACKWARD, own, c))
    if setting.layout.frozen and setting.stage < 3 and not model.experts:
        # Of weights with gradients, these have their places.
        weights = [one_layer(setting, trained=False)]
        parts.append(arrays("weights of one layer, out of their stacks", "weights", BACKWARD, weights, FLOAT32))
    parts += _block(setting)
    yield from with_copies(setting, BACKWARD, parts)


def _block(setting: Setting) -> Iterator[Held]:
    """Temporaries of one iteration of the loop over layers, by kind of array: the larger of two moments.

    Either the gradients of the MLP are taken, or those of attention.
    """
    model, widen = setting.model, held_bytes(setting) // setting.compute
    one = block(setting)
    values, again = one.values, one.made_again(setting.remat.kept)
    chunk, length, pattern = setting.config.train.attention_chunk, setting.length, len(model.pattern)
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
        if setting.layout.frozen:  # two factors of gradients of weights
            counts["MLP"] -= 2
        if chunked:  # cut into chunks, and put together again
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
        norms = 4 if model.norm_placement == "sandwich" else 2  # each on one side of its sub-layer, or on both
        capped = model.attention_softcap > 0
        mlp = {"scores": 3 * pattern + 2 if capped else pattern + 1, "MLP": 3 * pattern + 1}
        if setting.layout.frozen:  # what only the gradient of the last product reads
            mlp["MLP"] -= pattern * (("down" not in setting.config.lora.targets) + (not model.gated))
        mlp["hidden states"] = pattern * (6 + 3 * norms // 2)
        attention = mlp
    fullest = max(mlp, attention, key=lambda counts: sum(sizes[name] * count for name, count in counts.items()))
    for name, count in fullest.items():
        size = sizes[name]
        if count:
            formula = f"{count} × {size:,} B"
            yield rows.row(f"{name} in backward", "activations", BACKWARD, formula, count * size), [size] * count
    if model.experts:
        if not setting.layout.frozen:
            count = max(of_one_layer(setting, p) for p in setting.select("layers", "tail") if p.spec.role == "matrix")
            yield arrays("gradient of one layer's experts, summed", "gradients", BACKWARD, [count], FLOAT32)
        # Rows in the order of experts and in that of tokens: values, gradients, and what both are made from.
        ordered = values["mlp_down"].bytes * widen
        of_tokens = setting.tokens * model.experts_per_token * model.width * held_bytes(setting)
        size = 3 * (ordered + of_tokens)
        formula = f"3 × ({ordered:,} + {of_tokens:,} B)"
        yield rows.row("rows of experts in backward", "activations", BACKWARD, formula, size), []
    if "attn_probs" in again and not chunk:
        size = setting.sequences * length * length * FLOAT32
        kinds = len({kind == "sliding" for kind in model.pattern})  # what is not rotated sees what full layers see
        yield rows.row("masks", "activations", BACKWARD, f"{kinds} × {size:,} B", kinds * size), []
