"""The memory of inference in closed form: weights, KV cache, and what prefill and a decoded token need.

Exact: the persistent phase. Approximate: the workspaces of prefill and decode.
"""

from jaxllm.config import Architecture
from jaxllm.ledger import rows
from jaxllm.ledger.memory import leaves
from jaxllm.ledger.rows import DECODE, PERSISTENT, PREFILL, Ledger, Row
from jaxllm.ledger.setting import FLOAT32
from jaxllm.model.specs import cache_slots, cache_specs, param_specs

# Bytes of a number, by the names that flags, policies and checkpoints use.
ITEMSIZE = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}

# A row's place in the decode state beside logits and seen: length, reason, tokens made and their limit (int32),
# 16 end ids, six sampling numbers, a key of two words, and a flag.
ROW_BYTES = 4 * 4 + 16 * 4 + 6 * 4 + 2 * 4 + 1


def inference(
    model: Architecture,
    batch: int,
    capacity: int,
    chunk: int,
    weight_dtype: str,
    cache_dtype: str,
    name: str = "",
    platform: str = "cpu",
) -> Ledger:
    """The bill of decoding on one device.

    Args:
      batch: sequences at a time.
      capacity: tokens a sequence may have, prompt and text together.
      chunk: prompt tokens of each sequence that one prefill call takes.
      weight_dtype, cache_dtype: fp32, bf16 or fp16, or their long names.
      name: of the model, for the ledger.
      platform: cpu | gpu | tpu; a CPU makes float32 copies of bfloat16 weights as it uses them.
    """
    specs = leaves(param_specs(model))
    parameters = sum(spec.size for spec in specs)
    c = ITEMSIZE[weight_dtype]
    made = [
        rows.row("weights", "weights", PERSISTENT, f"{parameters:,} × {c} B", parameters * c),
        *cache_rows(model, batch, capacity, ITEMSIZE[cache_dtype]),
        *_state(model, batch),
    ]
    one = sum(spec.size for spec in specs if spec.axes[0] == "layers") // max(model.repeats, 1)
    copied = FLOAT32 if platform == "cpu" else c
    for phase, tokens in ((PREFILL, chunk), (DECODE, 1)):
        for part, formula, size in _workspace(model, batch, capacity, tokens, c, platform):
            made.append(rows.row(part, f"{phase} workspace", phase, formula, size))
        made.append(rows.row("weights of one repeat", "weights", phase, f"{one:,} × {copied} B", one * copied))
        made.append(_logits(model, batch, phase))
    return Ledger("infer", name, parameters, "", 1, tuple(made))


def cache_rows(model: Architecture, batch: int, capacity: int, itemsize: int) -> list[Row]:
    """A row for each kind of layer: 2 · layers · kv_heads · head_dim · bytes a token and sequence."""
    kinds = [*model.pattern * model.repeats, *model.tail]
    made = []
    for kind in sorted(set(kinds)):
        layers, slots = kinds.count(kind), cache_slots(model, kind, capacity)
        size = 2 * layers * batch * slots * model.kv_heads * model.head_dim * itemsize
        heads = f"{model.kv_heads} heads × {model.head_dim} × {itemsize} B"
        formula = f"2 × {layers} layers × {batch} × {slots:,} tokens × {heads}"
        made.append(rows.row(f"KV cache, {kind}", "KV cache", PERSISTENT, formula, size))
    total = sum(spec.size for spec in leaves(cache_specs(model, batch, capacity))) * itemsize
    assert total == sum(row.bytes_per_device for row in made), (total, made)
    return made


def _state(model: Architecture, batch: int) -> list[Row]:
    V = model.vocab_size
    return [
        rows.row("next logits", "decode state", PERSISTENT, f"{batch} × {V:,} × 4 B", batch * V * FLOAT32),
        rows.row("tokens seen", "decode state", PERSISTENT, f"{batch} × {V:,} × 1 B", batch * V),
        rows.row(
            "lengths, limits, sampling", "decode state", PERSISTENT, f"{batch} × {ROW_BYTES} B", batch * ROW_BYTES
        ),
    ]


def _keys_read(model: Architecture, kind: str, capacity: int, tokens: int) -> int:
    """Keys that a query is scored against; a ring has the new ones beside the old where there are several."""
    slots = cache_slots(model, kind, capacity)
    return slots + tokens if slots < capacity and tokens > 1 else slots


def _workspace(
    model: Architecture, batch: int, capacity: int, tokens: int, c: int, platform: str
) -> list[tuple[str, str, int]]:
    """(name, formula, bytes) of one layer's temporaries: masks, and the larger of attention and the MLP.

    Attention reads the layer's keys and values cut out of the cache, in the compute dtype, and holds its scores;
    a CPU writes their exponentials in place. From some size on it runs attention as one fused loop without whole
    scores: there this is an upper bound.
    """
    D, N, K, H, F = model.width, model.heads, model.kv_heads, model.head_dim, model.mlp_width
    M, X = batch * tokens, model.experts_per_token if model.experts else 1
    reads = {kind: _keys_read(model, kind, capacity, tokens) for kind in {*model.pattern, *model.tail}}
    keys, masks = max(reads.values()), sum(reads.values())
    attention = 2 * batch * keys * K * H * c + M * 2 * (N + K) * H * c
    attention += (1 if platform == "cpu" else 2) * M * N * keys * FLOAT32
    mlp = M * (3 if model.gated else 2) * X * F * c
    hidden = 4 * M * D * FLOAT32
    largest = ("attention", attention) if attention > mlp else ("MLP", mlp)
    return [
        ("masks", f"{M:,} tokens × {masks:,} keys × 4 B", M * masks * FLOAT32),
        (f"one layer's {largest[0]}", f"{M:,} tokens × {largest[1] // M:,} B", largest[1]),
        ("hidden states", f"4 × {M:,} tokens × {D:,} × 4 B", hidden),
    ]


def _logits(model: Architecture, batch: int, phase: str) -> Row:
    """Prefill: the new logits. Decode: they, sorted, and the numbers of all candidates while a token is drawn."""
    copies = 1 if phase == PREFILL else 9
    size = copies * batch * model.vocab_size * FLOAT32
    return rows.row("logits", "logits", phase, f"{copies} × {batch} × {model.vocab_size:,} × 4 B", size)
