"""Memory rules for prefill and decode on each platform, beside weights and cache.

The rules come from the buffer assignments of JAX 0.10.2 for a CPU, an H100 and a v5e, at the sizes of published models
(`experiments/inference_cells.py`). JAX 0.12 assigns nearly the same on a CPU. A layer's weights, keys and values are
sliced from their stacks if a matmul cannot read them in place. Layers run one after another, so only the largest of
attention, MLP and token sampling counts. On a GPU or TPU, decode attention is a kernel that reads the cache in place.
More accurate rules for prefill are in `tpu`, and in `cpu` for most models. Not checked against any program: experts on
GPUs and TPUs, decoding without a cache except on a CPU, and weights in int8 and int4.
"""

from collections.abc import Iterator

from jaxllm.config import Architecture
from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.formula.exact.block_graph import rows_of_experts
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer import cpu as inference_cpu
from jaxllm.ledger.formula.fitted.infer import tpu as inference_tpu
from jaxllm.ledger.formula.fitted.infer.forward_pass import SLICED_WEIGHTS, Pass
from jaxllm.ledger.rows import DECODE, PREFILL, Row, array_row
from jaxllm.model.specs import cache_specs, leaves, param_specs

# Float32 elements per sequence and vocabulary entry while a token is sampled: sorted logits, order, noise, masks.
_CHOICE = 8
_CHOICE_BITS = 228  # bits per sequence and vocabulary entry on a GPU, in total
# A GPU's one-row matmuls read matrices up to this many bytes in place, except the last of an MLP's two or three.
_READ_IN_PLACE = 32 * 2**20
# They also read the stacked query projections in another layout if one layer's is at most this many bytes.
_REORDERED = 16 * 2**20
# Bytes of a layer's scores from which a CPU's attention with several KV heads computes them in a loop whose scratch XLA
# does not count. Coarse: `cpu` has the more accurate rule and is used where it applies.
_WHOLE_SCORES = 8 * 2**20
_MASK = 1  # byte per query–key pair


def workspace_rows(
    model: Architecture,
    batch: int,
    capacity: int,
    tokens: int,
    weight_dtype: str,
    platform: str,
    phase: str,
    cached: bool = True,
    cache_dtype: str = "",
    vector_memory: int = 0,
) -> list[Row]:
    """Returns the workspace rows of a phase.

    Args:
      capacity: cache slots per sequence.
      tokens: new tokens per sequence.
      weight_dtype: format of the weights.
      platform: cpu | gpu | tpu.
      phase: PREFILL or DECODE.
      cached: True with a KV cache.
      cache_dtype: format of the cache, for prefill on a TPU; "" is the format of the weights.
      vector_memory: bytes of vector memory available to a program's arrays, for prefill on a TPU.
    """
    one = Pass(model, batch, capacity, tokens, formats.compute_itemsize(weight_dtype, platform), platform, cached)
    # Without a cache, decoding a token takes the memory of a prefill of all tokens.
    like = phase if cached else PREFILL
    if platform == "tpu" and like == PREFILL:
        cache_dtype = cache_dtype or weight_dtype
        made = inference_tpu.prefill_rows(
            model, batch, capacity, tokens, weight_dtype, cache_dtype, vector_memory, phase, cached
        )
    elif like == PREFILL and inference_cpu.covers(one):
        made = inference_cpu.prefill_rows(one)
    else:
        made = _rows(one, phase, like)
    if formats.by_name(weight_dtype).scaled:
        # One repeat of the layers in the compute dtype; a kernel that reads the stored format needs none.
        size = one.weight_bytes()
        made = [row for row in made if row.name != SLICED_WEIGHTS]
        made.append(Row("weights of one repeat, dequantized", "weights", phase, size, f"{size:,} B"))
    return made


def _rows(one: Pass, phase: str, like: str) -> list[Row]:
    """Returns rows by the general rules, if `cpu` and `tpu` do not apply, with the arrays of the phase `like`."""
    kind = f"{phase} workspace"
    made = [row._replace(phase=phase) for row in _copies(one, like)]
    # A token is sampled after the layers, in the buffers of the weight copies; in CPU decode it needs extra memory.
    shared = one.platform == "gpu" or like == PREFILL
    there = sum(row.bytes_per_device for row in made if shared and row.name == SLICED_WEIGHTS)
    choice = _choice(one)
    moments = {
        "attention": _attention(one, like),
        "MLP": _mlp(one),
        "logits and sampling": max(choice - there, 0),
    }
    name = max(moments, key=moments.__getitem__)
    formula = f"{one.count:,} tokens × {moments[name] // one.count:,} B"
    if name.startswith("logits") and there:
        formula = f"{choice:,} − {there:,} B, in place of weights"
    what = "logits" if name.startswith("logits") else kind
    made.append(Row(name if what == "logits" else f"one layer's {name}", what, phase, moments[name], formula))
    return made


def _copies(one: Pass, phase: str) -> Iterator[Row]:
    """Yields rows of the arrays that are sliced or converted from the stacks before use."""
    model, whole = one.model, one.weight_bytes()
    if one.platform == "cpu":
        if not one.cached:
            yield from _constants(one, phase)
            # Attention weights are freed where the MLP, or attention's arrays, need the most memory.
            whole = whole if model.experts else one.weight_bytes("gate", "up", "down")
        # One iteration of the loop over layers has `unroll` repeats.
        whole = whole // one.c * FLOAT32 * max(min(model.unroll, model.repeats), 1)
        yield Row(SLICED_WEIGHTS, "weights", phase, whole, f"{whole:,} B")
        if one.c < FLOAT32:
            # A CPU has no 16-bit matmuls: XLA converts the inputs of the loop over layers to float32 before the loop.
            elements = _matmul_elements(model)
            yield array_row("weights in float32", "weights", phase, elements, FLOAT32)
            if phase == DECODE:
                elements = sum(spec.size for spec in leaves(cache_specs(model, one.batch, one.capacity)))
                yield array_row("cache in float32", f"{phase} workspace", phase, elements, FLOAT32)
        if one.wraps:
            size = one.rings_bytes
            yield Row("rings, copied", f"{phase} workspace", phase, size, f"{size // one.c:,} × {one.c} B")
        return
    if phase == PREFILL:
        # Matmuls of few tokens read copies, of many tokens the stacks; in between it is unknown before compilation.
        whole = whole // 2 if one.slices_weights else 0
        yield Row(SLICED_WEIGHTS, "weights", phase, whole, f"{whole:,} B")
    elif one.platform == "gpu":
        yield from _copies_of_one_token(one)


def _constants(one: Pass, phase: str) -> Iterator[Row]:
    """Yields rows of the arrays that a CPU computes once for all layers in a pass without a cache.

    With a softcap, JAX 0.12 has one more array in the shape of the scores.
    """
    kind, pairs = f"{phase} workspace", one.count * one.keys
    masks = len({each == "sliding" for each in (*one.model.pattern, *one.model.tail)})
    formula = f"{masks} × {one.count:,} × {one.keys:,} × {FLOAT32} B"
    yield Row("masks, added to scores", kind, phase, masks * pairs * FLOAT32, formula)
    if one.model.attention_softcap:
        # The softcap, and the divisor of the scores, materialized in the shape of the scores.
        yield Row("soft-capped scores", kind, phase, 2 * one.scores, f"2 × {one.scores:,} B")


def _copies_of_one_token(one: Pass) -> Iterator[Row]:
    """Yields rows of the weight copies that a GPU makes to decode one token per sequence."""
    model = one.model
    layers = len(model.pattern) if model.repeats else len(model.tail)
    mlp, q = one.weight_bytes("gate", "up", "down"), one.weight_bytes("q") // layers
    matrices = 3 if model.gated else 2
    in_place = one.batch == 1 and not model.experts and mlp // layers <= matrices * _READ_IN_PLACE
    cut = mlp - mlp // matrices if in_place else mlp
    if not in_place:  # plus attention weights that are alive at the same time
        cut += q if layers == 1 or one.batch == 1 else 2 * layers * q
    yield Row(
        SLICED_WEIGHTS, "weights", DECODE, cut if one.slices_weights else 0, f"{cut if one.slices_weights else 0:,} B"
    )
    if one.batch == 1:
        # A one-row matmul reads the stacked projections in another layout, copied once for all layers.
        names = ("q", "k", "v") if q <= _REORDERED else ("k", "v")
        size = one.weight_bytes(*names) * max(model.repeats, 1)
        size = size if one.slices_weights else 0
        yield Row("projections, in another layout", "weights", DECODE, size, f"{size:,} B")


def _matmul_elements(model: Architecture) -> int:
    """Returns the elements of all weights that matmuls read: all but untied embeddings."""
    specs = param_specs(model)
    if not model.tied_embeddings:
        specs = {group: tree for group, tree in specs.items() if group != "embed"}
    return sum(spec.size for spec in leaves(specs))


def _attention(one: Pass, phase: str) -> int:
    layers = min(len(one.model.pattern), 2)
    groups = one.model.heads // one.model.kv_heads
    if one.platform == "cpu":
        if phase == DECODE:
            return 2 * one.keys_bytes + 2 * one.scores if one.model.kv_heads > 1 else 2 * one.scores
        written = one.scores if one.model.kv_heads == 1 else min(one.scores, _WHOLE_SCORES)
        if not one.cached and one.model.kv_heads > 1 and one.scores >= _WHOLE_SCORES:
            written = 0  # all in one fused loop
        return 2 * one.keys_bytes + 2 * written + 3 * one.hidden
    # Scores in float32, probabilities in the compute dtype; plus the values, when the keys are freed.
    written = one.scores + one.scores * one.c // FLOAT32
    if phase == PREFILL:
        return written + one.keys_bytes + one.hidden + one.count * one.keys * _MASK
    # The kernel's partial results of a few splits are negligible. With long patterns XLA makes unexplained copies.
    return (
        0
        if one.slices_weights or one.platform == "tpu"
        else written + (2 * layers * one.keys_bytes if groups > 1 else 0)
    )


def _mlp(one: Pass) -> int:
    model = one.model
    if not model.experts:
        gated = model.gated and (one.platform != "cpu" or not one.cached)
        hidden = 1 if one.platform == "cpu" and gated else 2
        return (3 if gated else 2) * one.count * model.mlp_width * one.c + hidden * one.hidden
    slots = rows_of_experts(one.count * model.experts_per_token, model.experts) * one.c
    return slots * (2 * model.width + 3 * model.mlp_width) + 4 * one.hidden


def _choice(one: Pass) -> int:
    """Returns the bytes of token sampling over all candidates; prefill samples a token too."""
    if one.platform == "gpu":
        return one.batch * one.model.vocab_size * _CHOICE_BITS // 8
    return one.batch * one.model.vocab_size * (_CHOICE * FLOAT32 + 1)
