"""Values of a transformer block and their inputs: the table behind saved activations and recomputed work.

M is the tokens of a micro-batch on a device, t the devices along `tensor`, c the bytes per element of the compute
dtype, X the experts per token (1 in a dense MLP):

    value         computed from                        matmuls (FLOPs)      bytes
    block_input                                                             M/t·D·c
    attn_norm     block_input                                               M/t·D·c
    attn_inputs   attn_norm all-gathered over `tensor`                      never saved
    q, k, v       attn_inputs (q and k: before norm)   2·M·D·heads/t·H      M·heads/t·H·c   tag attn_qkv
    attn_scores   q, k (saved with a soft cap only)    2·M·N/t·T·H          M·N/t·T·4
    attn_probs    attn_scores (saved unless chunked)                        M·N/t·T·4
    attn_context  attn_probs, v                        2·M·N/t·T·H          M·N/t·H·c
    attn_lse      the kernel, see below                                     M·N/t·4
    attn_out      attn_context                         2·M·N/t·H·D          M/t·D·c
    resid_mid     block_input, attn_out                                     M/t·D·c
    mlp_norm      resid_mid                                                 M/t·D·c
    mlp_up, gate  mlp_norm all-gathered, routing       2·M·X·D·F/t          M·X·F/t·c
    mlp_hidden    mlp_up, mlp_gate                                          M·X·F/t·c
    mlp_down      mlp_hidden (experts only)            2·M·X·F/t·D          M·X·D·c
    mlp_out       mlp_hidden or mlp_down               2·M·F/t·D            M/t·D·c
    routing       mlp_norm all-gathered                2·M·D·E              never saved
    w, through A  the input of w                       2·M·inputs·r         M·r·c         tag lora

Attention kernels store no scores and no probabilities. One kernel computes attn_context and attn_lse from q, k and v,
with both matmuls over the pairs that a query may attend to (P of a sequence's T², averaged over all layers):
4·M·N/t·H·P/T. Its backward pass reads the kernel's inputs and outputs, and recomputes the scores and the gradients of
the probabilities twice, once for queries and once for keys: seven matmuls, where plain attention has four. cuDNN's has
five; what it saves between the passes has no tag, so its forward pass is always recomputed.

With `norm_placement` "post", attn_norm and mlp_norm are absent: attn_inputs is computed from block_input and mlp_inputs
from resid_mid. With experts, M·X is the number of rows in `rows_of_experts`: each expert's rows are padded to whole
blocks.

The backward pass reads some of these values. A remat policy saves those under its tags and recomputes the others from
the saved ones. A tag that nothing reads is not saved, whatever the policy says.

With low-rank adapters of rank r, the weights are frozen. Their matmuls then have only the gradient of their
activations, which reads the weight and not the inputs. An adapter's gradients read the inputs of both of its matmuls;
each adapted projection w takes 2·M·r·outputs/t FLOPs more.
"""

import dataclasses
import functools

from jaxllm.config import Architecture
from jaxllm.ledger.formula.exact.layout import NO_LORA, Lora
from jaxllm.ledger.formula.exact.run import FLOAT32, TrainingRun
from jaxllm.ledger.formula.exact.value_graph import BLOCK_INPUT as BLOCK_INPUT
from jaxllm.ledger.formula.exact.value_graph import Block as Block
from jaxllm.ledger.formula.exact.value_graph import Value as Value


def block(run: TrainingRun) -> Block:
    """Returns the block of a run's model: one for all layers, whatever their attention window."""
    attention = run.attention.implementation
    if attention == "xla":
        attention = "chunked" if run.config.train.attention_chunk else "whole"
    return _block(run.model, run.tokens, run.length, run.tensor, run.compute_bytes, attention, run.lora)


def visible_pairs(model: Architecture, kind: str, length: int) -> int:
    """Returns the unmasked query-key pairs of one sequence in one layer."""
    seen = min(model.window, length) if kind == "sliding" else length
    return seen * (seen + 1) // 2 + (length - seen) * seen


def kinds(model: Architecture) -> list[str]:
    """Returns the attention kind of every layer."""
    return [*model.pattern * model.repeats, *model.tail]


def rows_of_experts(assignments: int, experts: int) -> int:
    """Returns the rows that experts multiply, padding included, for `assignments` = tokens × experts per token.

    Rows are arranged in blocks of one expert each. A block has a power of two of rows, from 8 to 512, and at most half
    of the mean rows per expert; the number of blocks suffices for the worst distribution (`jaxllm.kernels.grouped`).
    """
    half = min(512, assignments // (2 * experts))
    block_rows = max(8, 1 << max(half.bit_length() - 1, 0))
    filled = min(assignments, experts)
    return (filled + (assignments - filled) // block_rows) * block_rows


@functools.lru_cache(maxsize=64)
def _block(model: Architecture, M: int, T: int, t: int, c: int, attention: str, lora: Lora) -> Block:
    block = _plain(model, M, T, t, c, attention)
    return block if lora == NO_LORA else _with_adapters(block, model, M, t, c, lora)


def _plain(model: Architecture, M: int, T: int, t: int, c: int, attention: str) -> Block:
    D, H, N, K = model.width, model.head_dim, model.heads // t, model.kv_heads // t
    own = M // t * D * c
    everyone = M * D if t > 1 else 0
    values = {BLOCK_INPUT: Value((), bytes=own)}
    attention_of, mlp_of = BLOCK_INPUT, "resid_mid"
    if model.norm_placement != "post":
        attention_of, mlp_of = "attn_norm", "mlp_norm"
        values["attn_norm"] = Value((BLOCK_INPUT,), bytes=own, tag="attn_norm")
    values["attn_inputs"] = Value((attention_of,), moved=everyone)
    for name, heads in (("q", N), ("k", K), ("v", K)):
        flops, size = 2 * M * D * heads * H, M * heads * H * c
        if model.qk_norm and name != "v":
            values[f"{name}, before its norm"] = Value(("attn_inputs",), flops)
            values[name] = Value((f"{name}, before its norm",), 0, size, "attn_qkv")
        else:
            values[name] = Value(("attn_inputs",), flops, size, "attn_qkv")
    found, of_attention = _attention(model, M, T, N, c, attention)
    values |= found
    values |= {
        "attn_out": Value(("attn_context",), 2 * M * N * H * D, own, "attn_out", everyone),
        "resid_mid": Value((BLOCK_INPUT, "attn_out"), 0, own, "resid_mid"),
        "mlp_inputs": Value((mlp_of,), moved=everyone),
    }
    if model.norm_placement != "post":
        values["mlp_norm"] = Value(("resid_mid",), 0, own, "mlp_norm")
    read = [BLOCK_INPUT] if model.norm_placement != "post" else []
    read += ["attn_inputs", "q", "k", "v", *of_attention, "resid_mid", "mlp_inputs"]
    if model.qk_norm:
        read += ["q, before its norm", "k, before its norm"]
    if model.norm_placement != "pre":
        read += ["attn_out", "mlp_out"]
    more, reads = _mlp(model, M, t, c)
    return Block(values | more, (*read, *reads), attention)


def _attention(
    model: Architecture, M: int, T: int, N: int, c: int, attention: str
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Returns the attention values of N heads and the names of those that the backward pass reads.

    The values are those from q, k and v to attn_context, that one included.
    """
    H, softcap = model.head_dim, model.attention_softcap
    context, pairs, scores = M * N * H * c, 2 * M * N * T * H, M * N * T * FLOAT32
    if attention in ("pallas", "cudnn"):
        seen = sum(visible_pairs(model, kind, T) for kind in kinds(model))
        # Mean pairs per layer, rounded up to an integer so that heads and sequences add up.
        flops = 4 * (M // T) * N * H * -(-seen // model.layers)
        values = {
            "attn_kernel": Value(("q", "k", "v"), flops),
            "attn_context": Value(("attn_kernel",), 0, context, "attn_context"),
        }
        if attention == "cudnn":
            return values, ("attn_kernel", "attn_context")
        values["attn_lse"] = Value(("attn_kernel",), 0, M * N * FLOAT32, "attn_lse")
        return values, ("attn_context", "attn_lse")
    chunked = attention == "chunked"
    values = {
        "attn_scores": Value(("q", "k"), pairs, scores, "attn_scores" if softcap and not chunked else ""),
        "attn_probs": Value(("attn_scores",), 0, scores, "" if chunked else "attn_probs"),
        "attn_context": Value(("attn_probs", "v"), pairs, context, "attn_context"),
    }
    return values, ("attn_probs", "attn_context", *(("attn_scores",) if softcap else ()))


# Adapted projection -> (its output value, its input value).
_ADAPTED = {
    "q": ("q", "attn_inputs"),
    "k": ("k", "attn_inputs"),
    "v": ("v", "attn_inputs"),
    "out": ("attn_out", "attn_context"),
    "gate": ("mlp_gate", "mlp_inputs"),
    "up": ("mlp_up", "mlp_inputs"),
    "down": ("mlp_out", "mlp_hidden"),
}
# Values from matmuls of two activations.
_OF_ATTENTION = ("attn_scores", "attn_context", "attn_kernel")
# Values that the backward pass reads for weight gradients only; attention kernels also read their outputs.
_FOR_WEIGHTS = ("attn_inputs", "mlp_inputs", "mlp_hidden")


def _with_adapters(block: Block, model: Architecture, M: int, t: int, c: int, lora: Lora) -> Block:
    """Returns the block with frozen weights and low-rank adapters on some of the projections."""
    rank, targets = lora
    values = {
        name: dataclasses.replace(value, frozen=0 if name in _OF_ATTENTION else value.flops)
        for name, value in block.values.items()
    }
    for_weights = {*_FOR_WEIGHTS, *(("resid_mid",) if model.norm_placement == "post" else ())}
    if block.attention in ("whole", "chunked"):
        for_weights.add("attn_context")
    read = [name for name in block.read if name not in for_weights]
    H, D, F = model.head_dim, model.width, model.mlp_width // t
    heads, keys = model.heads // t * H, model.kv_heads // t * H
    sizes = {"q": (D, heads), "k": (D, keys), "v": (D, keys), "out": (heads, D), "down": (F, D)}
    for target in targets:
        name, of = _ADAPTED[target]
        name = f"{name}, before its norm" if f"{name}, before its norm" in values else name
        inputs, outputs = sizes.get(target, (D, F))
        through = f"{target}, through A"
        values[through] = Value((of,), 2 * M * inputs * rank, M * rank * c, "lora")
        made = values[name]
        values[name] = dataclasses.replace(
            made, inputs=(*made.inputs, through), flops=made.flops + 2 * M * rank * outputs
        )
        read += [of, through]
    return Block(values, tuple(read), block.attention)


def _mlp(model: Architecture, M: int, t: int, c: int) -> tuple[dict[str, Value], tuple[str, ...]]:
    D, F, E = model.width, model.mlp_width // t, model.experts
    R = rows_of_experts(M * model.experts_per_token, E) if E else M
    everyone = M * D if t > 1 else 0
    inner, product = R * F * c, 2 * R * D * F
    inputs: tuple[str, ...] = ("mlp_inputs", "routing") if E else ("mlp_inputs",)
    names = ("mlp_up", "mlp_gate") if model.gated else ("mlp_up",)
    values = {name: Value(inputs, product, inner, name) for name in names}
    values["mlp_hidden"] = Value(names, 0, inner, "mlp_hidden")
    out = M // t * D * c
    if not E:
        values["mlp_out"] = Value(("mlp_hidden",), product, out, "mlp_out", everyone)
        return values, (*names, "mlp_hidden")
    values["routing"] = Value(("mlp_inputs",), 2 * M * D * E)
    values["mlp_down"] = Value(("mlp_hidden", "routing"), product, R * D * c, "mlp_down")
    values["mlp_out"] = Value(("mlp_down", "routing"), 0, out, "mlp_out", everyone)
    return values, (*names, "mlp_hidden", "routing", "mlp_down")
