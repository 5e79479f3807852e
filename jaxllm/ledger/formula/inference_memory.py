"""Memory of inference in closed form: weights, KV cache, and the workspaces of prefill and of one decode step.

On a mesh, one device has the arrays of a smaller model: `InferenceMesh.shard` gives its architecture. Only the logits
and the decoding state have the whole vocabulary on every device.

Exact: the persistent phase. Approximate: the workspaces of prefill and decode (`fitted.infer.workspaces`).
"""

import dataclasses

from jaxllm.config import Architecture
from jaxllm.config import attention as attention_choice
from jaxllm.config.inference_mesh import ONE_DEVICE, InferenceMesh
from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.formula.exact.formats import ITEMSIZE as ITEMSIZE
from jaxllm.ledger.formula.exact.run import FLOAT32
from jaxllm.ledger.formula.fitted.infer import tpu as inference_tpu
from jaxllm.ledger.formula.fitted.infer.workspaces import workspace_rows
from jaxllm.ledger.rows import DECODE, PERSISTENT, PREFILL, Ledger, Row
from jaxllm.model.specs import cache_slots, cache_specs, leaves, param_specs

# Bytes per sequence of the decode state, besides the mask of tokens seen: length, finish reason, next token, generated
# tokens and their limit (int32), 16 end ids, six sampling parameters, a two-word PRNG key, and a flag.
TOKEN = 4
ROW_BYTES = 5 * 4 + 16 * 4 + 6 * 4 + 2 * 4 + 1


def inference(
    model: Architecture,
    batch: int,
    capacity: int,
    chunk: int,
    weight_dtype: str,
    cache_dtype: str,
    name: str = "",
    platform: str = "cpu",
    prompt_logprobs: bool = False,
    use_cache: bool = True,
    vector_memory: int = 0,
    mesh: InferenceMesh = ONE_DEVICE,
) -> Ledger:
    """Returns the memory bill of decoding, for one device of a mesh.

    Args:
      batch: Number of sequences decoded at a time, over all devices.
      capacity: Maximum tokens per sequence, prompt and generated text together.
      chunk: Prompt tokens of each sequence per prefill call.
      weight_dtype: Weight format, from `formats.FORMATS`, or the long name of a dtype.
      cache_dtype: KV cache format, from `formats.CACHE_FORMATS`, or the long name of a dtype.
      name: Name of the model, for the ledger.
      platform: cpu | gpu | tpu.
      prompt_logprobs: Whether prompts are scored: log-probabilities of every token of a chunk.
      use_cache: False runs the whole forward pass for every token, and stores the tokens instead of a cache.
      vector_memory: Bytes of a TPU's vector memory, as `Device.vector_memory`; 0 counts all arrays in main memory.
      mesh: Number of devices along each mesh axis.

    Raises:
      UserError: A format is unknown, or the model cannot be sharded over the mesh.
    """
    parameters = sum(spec.size for spec in leaves(param_specs(model)))
    vocab_size = model.vocab_size
    model, batch = mesh.shard(model), mesh.rows(batch)
    made = [
        *weight_rows(model, weight_dtype, platform),
        *(cache_rows(model, batch, capacity, cache_dtype) if use_cache else _tokens(batch, capacity)),
        *_state(vocab_size, batch),
    ]
    if platform == "tpu" and not formats.by_name(weight_dtype).scaled:
        held = cache_dtype if use_cache else ""
        made.append(inference_tpu.state_padding(model, batch, capacity, weight_dtype, held))
    model = dataclasses.replace(model, vocab_size=vocab_size)
    for phase, tokens in ((PREFILL, chunk), (DECODE, 1)) if use_cache else ((DECODE, capacity),):
        made += workspace_rows(
            model, batch, capacity, tokens, weight_dtype, platform, phase, use_cache, cache_dtype, vector_memory
        )
    if prompt_logprobs:
        made += _scoring(model, batch, chunk)
    line = _attention_line(model, (weight_dtype, cache_dtype), platform)
    return Ledger("infer", name, parameters, "", mesh.count, tuple(made), attention=line)


def _attention_line(model: Architecture, held: tuple[str, ...], platform: str) -> str:
    """Returns a line that names the attention implementations of prompts and of new tokens, with the reason."""
    dtypes = ("float16" if name == "fp16" else name for name in held)
    of_tokens = attention_choice.decoding(platform, model.head_dim, *dtypes)
    return f"attention: of prompts xla, chunk by chunk; of new tokens {of_tokens.implementation} ({of_tokens.why})"


def weight_rows(model: Architecture, weight_dtype: str, platform: str) -> list[Row]:
    """Returns a row for the weights in a format, and one for its scales if it has any."""
    specs, stored = leaves(param_specs(model)), formats.by_name(weight_dtype, platform)
    size = sum(map(stored.element_bytes, specs))
    count = sum(spec.size for spec in specs)
    if not stored.scaled:
        return [Row("weights", "weights", PERSISTENT, size, f"{count:,} × {stored.bits // 8} B")]
    rest = sum(spec.size for spec in specs if not stored.quantizes(spec))
    formula = f"{count - rest:,} × {stored.bits} bits + {rest:,} × {stored.rest // 8} B"
    scales = sum(map(stored.scale_bytes, specs))
    scale = f"{scales // formats.SCALE_BYTES:,} × {formats.SCALE_BYTES} B"
    return [
        Row("weights", "weights", PERSISTENT, size, formula),
        Row("scales", "weights", PERSISTENT, scales, scale),
    ]


def cache_rows(model: Architecture, batch: int, capacity: int, cache_dtype: str) -> list[Row]:
    """Returns the KV cache rows, one per kind of layer, and their scales.

    Bytes per token and sequence: 2 · layers · kv_heads · head_dim · itemsize.
    """
    kinds = [*model.pattern * model.repeats, *model.tail]
    itemsize, scale = formats.cache_itemsize(cache_dtype)
    made, elements = [], 0
    for kind in sorted(set(kinds)):
        layers, slots = kinds.count(kind), cache_slots(model, kind, capacity)
        heads = 2 * layers * batch * slots * model.kv_heads
        elements += heads * model.head_dim
        count = f"2 × {layers} layers × {batch} × {slots:,} tokens × {model.kv_heads} heads"
        formula = f"{count} × {model.head_dim} × {itemsize} B"
        size = heads * model.head_dim * itemsize
        made.append(Row(f"KV cache, {kind}", "KV cache", PERSISTENT, size, formula))
        if scale:
            row = Row(f"KV cache scales, {kind}", "KV cache", PERSISTENT, heads * scale, f"{count} × {scale} B")
            made.append(row)
    assert elements == sum(spec.size for spec in leaves(cache_specs(model, batch, capacity))), elements
    return made


def _tokens(batch: int, capacity: int) -> list[Row]:
    """Returns the row of the token buffer that replaces the KV cache when decoding without one."""
    size = batch * capacity * TOKEN
    return [Row("tokens so far", "decode state", PERSISTENT, size, f"{batch} × {capacity:,} × {TOKEN} B")]


def _state(V: int, batch: int) -> list[Row]:
    return [
        Row("tokens seen", "decode state", PERSISTENT, batch * V, f"{batch} × {V:,} × 1 B"),
        Row("lengths, limits, sampling", "decode state", PERSISTENT, batch * ROW_BYTES, f"{batch} × {ROW_BYTES} B"),
    ]


def _scoring(model: Architecture, batch: int, chunk: int) -> list[Row]:
    """Returns the row of a prompt chunk's log-probabilities: float32, over the whole vocabulary.

    They are computed in place of the chunk's logits.
    """
    size = batch * chunk * model.vocab_size * FLOAT32
    formula = f"{batch} × {chunk:,} tokens × {model.vocab_size:,} × 4 B"
    return [Row("log-probabilities of the prompt", "logits", PREFILL, size, formula)]
