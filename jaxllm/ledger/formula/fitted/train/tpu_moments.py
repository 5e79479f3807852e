"""Live sets of a block's backward pass in a TPU's HBM, without the arrays that fit its vector memory (VMEM).

The live set is largest while the gradients of attention are computed, or while those of the MLP are.
"""

from jaxllm.ledger.formula.exact import tpu_tiles
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, block
from jaxllm.ledger.formula.exact.run import FLOAT32, Parameter, TrainingRun
from jaxllm.ledger.formula.fitted.train.parts import of_one_layer

# Bytes of a v5e core (Google's JAX scaling book, "How to think about TPUs"); the kernels themselves need some of it.
VECTOR_MEMORY = 128 * 2**20
_FREE = VECTOR_MEMORY * 3 // 4
_BFLOAT16 = 2

# (name, bytes of one array, arrays)
LiveSet = list[tuple[str, int, int]]


def in_vector_memory(size: int) -> bool:
    """Returns True if an array of `size` bytes fits vector memory when nothing else is in it."""
    return size <= VECTOR_MEMORY * 7 // 8


def live_sets(run: TrainingRun) -> tuple[LiveSet, LiveSet]:
    """Returns HBM arrays (attention, MLP) of one backward iteration of the loop over layers, without vector memory."""
    return _beside_vector_memory(_attention(run)), _beside_vector_memory(_mlp(run))


def _attention(run: TrainingRun) -> LiveSet:
    values = block(run).values
    own, q, k = (values[name].bytes for name in (BLOCK_INPUT, "q", "k"))
    # Chunks of queries and their gradients are stacked; gradients of keys and values are summed over chunks.
    chunked = run.config.train.attention_chunk > 0
    if run.attention.implementation == "pallas":
        scores = ("log-sum-exp and delta of attention", values["attn_lse"].bytes, 2)
    else:
        scores = ("scores and their gradient", _scores(run), 2)
    return [
        scores,
        ("queries", q, 5 if chunked else 3),
        ("keys and values", k, 5 if chunked else 2),
        ("hidden states", own * run.tensor, 1),
        ("hidden states, sharded", own, 1),
    ]


def _mlp(run: TrainingRun) -> LiveSet:
    values = block(run).values
    own, q = values[BLOCK_INPUT].bytes, values["q"].bytes
    inner = values["mlp_hidden"].bytes // run.compute_bytes * _BFLOAT16
    live_set = [
        ("MLP", inner, 4),
        ("weights of one MLP", *_weights(run)),
        # With several devices along `tensor`: inputs of attention and of the MLP, and their gradients, all-gathered.
        ("hidden states", own * run.tensor, 4 if run.tensor > 1 else 2),
        ("hidden states, sharded", own, 2),
        ("queries", q, 3 if run.tensor > 1 else 1),
    ]
    if run.group_size > 1:  # plus the group's saved activations of one repeat, sliced from its stacks
        pattern = len(run.model.pattern)
        kept = block(run).kept(run.remat.kept)
        live_set[0] = ("MLP", inner, 2)
        live_set += [(f"{tag}, sliced", size, pattern) for tag, size in kept.items()]
    again = block(run).recomputed(run.remat.kept)
    if "attn_probs" in again and not run.config.train.attention_chunk:
        live_set.append(("scores", _scores(run), 1))
    return live_set


def _scores(run: TrainingRun) -> int:
    scores, chunk = block(run).values["attn_probs"].bytes, run.config.train.attention_chunk
    return scores * chunk // run.length if chunk else scores


def _weights(run: TrainingRun) -> tuple[int, int]:
    """Returns (bytes of a layer's largest matrix, copies): its gradient, plus two all-gathered in ZeRO stage 3."""
    if run.stage < 3:
        return _largest_matrix(run)[1] * run.compute_bytes, 1
    return gathered_matrix(run), 3


def gathered_matrix(run: TrainingRun) -> int:
    """Returns the bytes of the largest matrix of a layer after all-gather.

    Shards whose rows do not fill tiles are concatenated along the slowest dimension, so each row of the result is a
    separate tile. With packed elements (fewer than 32 bits) such a tile has two rows, one of which is padding.
    """
    largest, count = _largest_matrix(run)
    dimension = largest.sharded.zero_dim
    assert dimension is not None
    rows = largest.sharded.local_shape[dimension]
    whole = rows % tpu_tiles.SUBLANES == 0 or run.compute_bytes == FLOAT32
    return count * run.compute_bytes * (1 if whole else 2)


def _largest_matrix(run: TrainingRun) -> tuple[Parameter, int]:
    """Returns (the parameter with the largest matrix of a layer, its elements in one layer)."""
    largest = max(run.select("layers", "tail"), key=lambda p: of_one_layer(run, p))
    return largest, of_one_layer(run, largest)


def attention_elements(run: TrainingRun) -> int:
    """Returns the elements of one layer's attention weights on one device."""
    model = run.model
    heads = 2 * (model.heads + model.kv_heads) // run.tensor
    return model.width * model.head_dim * heads


def _beside_vector_memory(live_set: LiveSet) -> LiveSet:
    """Returns the arrays left in HBM after vector memory is filled with the smallest ones first."""
    free, left = _FREE, []
    for name, size, count in sorted(live_set, key=lambda row: row[1]):
        inside = min(count, free // size) if size else count
        free -= inside * size
        if count > inside:
            left.append((name, size, count - inside))
    return left
