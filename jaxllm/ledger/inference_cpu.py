"""What prefill holds on a CPU beside weights and cache: XLA's choice, stated as rules.

Attention is plain products. With few rows of scores (new tokens × heads of queries) XLA writes them out, and what the
softmax makes of them; with 4,096 or more it fuses both products and the softmax into a loop that writes neither, and
whose scratch it does not count. It does so from one row to the next, whatever else is large; with a single head of keys
JAX 0.10 never does (0.12 does, and needs less than is billed).

Weights of the layers in one iteration of the loop over layers are cut out of their stacks at its start, and are gone
once they were read. So the largest moment of an iteration is one in its first layer: its start, attention, or the MLP.
The choice of a token comes after the layers.

Read from the buffer assignments of 40 programs at the sizes of published models; JAX 0.10.2 and 0.12 agree but where it
is said. Not for experts, for what computes in 16 bits, for a ring among layers of other kinds, or where one iteration
is all layers: `inference_workspaces` has forms for these that are less near.
"""

from jaxllm.ledger import rows
from jaxllm.ledger.inference_pass import CUT, Pass
from jaxllm.ledger.rows import PREFILL, Row
from jaxllm.ledger.setting import FLOAT32

_LOOPED = 4096  # rows of scores from which none are written
# Arrays of a number for each word while a token is drawn: logits, noise, sorted ones, their order, masks.
_CHOICE = 9


def covers(one: Pass) -> bool:
    """Whether the rules of this file are for it."""
    model = one.model
    plain = one.platform == "cpu" and one.cached and one.c == FLOAT32 and not model.experts
    loops_over_layers = _layers(one) == 1 or model.repeats > model.unroll
    return plain and loops_over_layers and (len(model.pattern) == 1 or not one.wraps)


def loops(one: Pass) -> bool:
    """Whether scores are made in a loop and not written."""
    return one.model.kv_heads > 1 and one.count * one.model.heads >= _LOOPED


def prefill_rows(one: Pass) -> list[Row]:
    """The rows of the largest moment of prefill, where `covers` says so."""
    through = _through_the_loop(one)
    moments = [{**through, **arrays} for arrays in (_start(one), _attention(one), _mlp(one))]
    moments.append({"logits and choice of a token": one.batch * one.model.vocab_size * _CHOICE * FLOAT32})
    fullest = max(moments, key=lambda arrays: sum(arrays.values()))
    return [rows.row(name, _kind(name), PREFILL, f"{size:,} B", size) for name, size in fullest.items()]


def _kind(name: str) -> str:
    return name.split()[0] if name.startswith(("weights", "logits")) else f"{PREFILL} workspace"


def _through_the_loop(one: Pass) -> dict[str, int]:
    """What is made once for all layers."""
    model = one.model
    kinds = {kind == "sliding" for kind in (*model.pattern, *model.tail)}
    made = {"masks, added to scores": len(kinds) * one.count * one.keys * FLOAT32}
    if _layers(one) > 1:
        # What all scores are multiplied by is written out once for several layers, as large as scores; so is the cap.
        # JAX 0.12 has one such array more where there is a cap.
        made["constants of scores"] = (2 if model.attention_softcap else 1) * one.scores
    if one.wraps:
        made["rings, copied"] = one.rings_bytes
    return made


def _layers(one: Pass) -> int:
    """In one iteration of the loop over layers."""
    model = one.model
    return len(model.pattern) * min(model.unroll, model.repeats) if model.repeats else len(model.tail)


def _weights(one: Pass, *names: str) -> int:
    """Bytes of a layer's weights, or of those arrays of it."""
    of_repeat = len(one.model.pattern) if one.model.repeats else len(one.model.tail)
    return one.weight_bytes(*names) // of_repeat


def _queries(one: Pass) -> int:
    """Bytes of one layer's queries, as many as those of attention's output."""
    return one.count * one.model.heads * one.model.head_dim * FLOAT32


def _start(one: Pass) -> dict[str, int]:
    return {CUT: _layers(one) * _weights(one), "hidden states": 2 * one.hidden, "queries": _queries(one)}


def _attention(one: Pass) -> dict[str, int]:
    arrays = {CUT: _layers(one) * _weights(one) - _weights(one, "q", "k", "v"), "hidden states": one.hidden}
    if loops(one):
        arrays["queries and attention's output"] = 2 * _queries(one)
        arrays["keys and values of one layer"] = 2 * one.keys_bytes
    elif one.scores > one.keys_bytes:
        # Keys are gone when exponentials are written.
        arrays |= {"scores and exponentials of one layer": 2 * one.scores, "values of one layer": one.keys_bytes}
    else:
        arrays |= {"scores of one layer": one.scores, "keys and values of one layer": 2 * one.keys_bytes}
    return arrays


def _mlp(one: Pass) -> dict[str, int]:
    inner = one.count * one.model.mlp_width * FLOAT32
    # Each product reads its matrix for the last time.
    steps = [(1, ("gate", "up", "down")), (2, ("up", "down")), (3, ("down",))]
    if not one.model.gated:
        steps = [(1, ("up", "down")), (2, ("down",))]
    others = (_layers(one) - 1) * _weights(one)
    last = steps[-1][0]
    moments = [
        {
            CUT: others + _weights(one, *matrices),
            "hidden states": (1 if arrays == last else 2) * one.hidden,
            "MLP of one layer": arrays * inner,
        }
        for arrays, matrices in steps
    ]
    return max(moments, key=lambda arrays: sum(arrays.values()))
