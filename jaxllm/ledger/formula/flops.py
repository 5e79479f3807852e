"""The work of training and inference in closed form: FLOPs and bytes moved, each by what it is for.

A multiply and an add are two FLOPs, and only matrix products are counted: 2 a weight and token forward,
twice that backward. Attention is 4·N·H a query and key (scores, and their product with the values), in one of
two conventions, named wherever a figure is given:

    executed   all pairs that the program's attention multiplies: T × S of the reference, windows and masks or not; of
               a kernel those that may be seen (its tiles at the mask's edge have some beside, a tile over T of them)
    model      the pairs a query may see: (T + 1) / 2 of T on average, fewer in a sliding layer

Executed FLOPs make the roofline (`ledger.roofline`), recomputation included: they are one device's, and its share of
them where products are split over `tensor`. Model FLOPs make utilisation, MFU (Chowdhery et al. 2022, appendix B):
those of a token times tokens a second, over the peak of all devices of the run together. Neither recomputation nor
masked pairs count as work there, so that a remat policy can only lower it; and as every pair that may be seen is
multiplied, model FLOPs are never more than executed ones, and utilisation of a true peak never more than 1.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

from jaxllm.config import Architecture, Config, LoraConfig
from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact.activations import head_numbers
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, Block, block, kinds, visible_pairs
from jaxllm.ledger.formula.exact.layout import NO_LORA, Lora
from jaxllm.ledger.formula.exact.optimizer_slots import elements_held
from jaxllm.ledger.formula.exact.run import FLOAT32, Layout, TrainingRun
from jaxllm.ledger.formula.training_memory import leaves
from jaxllm.model.adapter_specs import adapter_specs
from jaxllm.model.specs import ParamSpec, cache_slots, param_specs

# optax's, of Newton and Schulz's iteration.
MUON_STEPS = 5
# The convention of `Work.flops`, for wherever they are told.
EXECUTED = "executed: recomputation and masked pairs of attention included"


@dataclasses.dataclass(frozen=True)
class Work:
    """What one program does on one device.

    Attributes:
      flops_of: executed, by part: forward, backward, recomputation, optimizer (its matrix products only).
      bytes_of: read and written in device memory, by part: weights, gradients, activations, logits, optimizer, KV
        cache. An estimate, rather from below: each array once a use, and nothing of it kept on the chip between uses.
      tokens: that it does it for.
    """

    flops_of: Mapping[str, int]
    bytes_of: Mapping[str, int]
    tokens: int

    @property
    def flops(self) -> int:
        """Executed."""
        return sum(self.flops_of.values())

    @property
    def bytes(self) -> int:
        """Moved in device memory."""
        return sum(self.bytes_of.values())

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs a byte."""
        return self.flops / self.bytes


def product_parameters(model: Architecture) -> int:
    """Weights that a token is multiplied with: matrices, those of its own experts only, and the head.

    Looking up an embedding is no product; a tied embedding counts once, as the head.
    """
    specs = leaves(param_specs(model))
    inside = sum(_active(spec, model) for spec in specs if spec.role == "matrix")
    return inside + model.vocab_size * model.width


def _active(spec: ParamSpec, model: Architecture) -> int:
    """Of an array with a matrix for each expert, the part that one token meets."""
    if any(axis == "experts" and _counts_matrices(spec, i) for i, axis in enumerate(spec.axes)):
        return spec.size // model.experts * model.experts_per_token
    return spec.size


def _pair_flops(model: Architecture) -> int:
    return 4 * model.heads * model.head_dim


def forward_flops(model: Architecture, sequences: int, length: int) -> int:
    """Executed by one forward pass with every pair multiplied, the head included."""
    products = 2 * product_parameters(model) * sequences * length
    return products + sequences * model.layers * _pair_flops(model) * length * length


def model_flops_per_token(model: Architecture, sequence_length: int, lora: Lora = NO_LORA) -> float:
    """Model FLOPs of a trained token, forward and backward, for utilisation: 6 · N and visible attention.

    Beside adapters, which are trained, N has no gradient of its own: 4 · N.
    """
    pairs = sum(visible_pairs(model, kind, sequence_length) for kind in kinds(model))
    attention, products = _pair_flops(model) * pairs / sequence_length, 2 * product_parameters(model)
    if lora == NO_LORA:
        return 3 * (products + attention)
    rank, targets = lora
    beside = 2 * sum(spec.size for spec in leaves(adapter_specs(model, LoraConfig(rank=rank, targets=targets))))
    return 2 * products + 3 * (beside + attention)


def train_step(model: Architecture, config: Config, policy_name: str, platform: str = "gpu") -> Work:
    """`step` of a run.

    Args:
      platform: cpu | gpu | tpu.
    """
    return step(run_lib.make(model, config, policy_name, platform))


def step(run: TrainingRun) -> Work:
    """One update on one device.

    Each product has two in the backward pass, one for each of its factors; one with a frozen weight has one. What a
    remat policy does not keep and the backward pass needs is made once more (`ledger.dataflow`), and the scores of
    chunked attention for each chunk's gradients; so is what kernels of attention make again for theirs
    (`Block.flops_of_scores`). The head's gradients are taken where its logits are, so it is never computed again.
    `tensor` divides the products, the router's and the second of each adapter aside, and `replica` and `data` the
    tokens.

    The bytes are: weights read in each pass of each micro-batch, and cast once from their masters; their gradients
    written and read; activations as `_activation_bytes` says; the logits and their gradient written and read; and by
    the optimizer, gradients and weights read, weights written, and its slots read and written.
    """
    accumulate = run.config.train.accumulate
    forward = run.model.layers * block(run).flops + head_flops(run)
    again = recomputed_flops(run)
    scores = run.model.layers * block(run).flops_of_scores
    frozen = run.model.layers * block(run).frozen_flops
    if run.layout.frozen:
        frozen += head_flops(run)
    flops = {"forward": forward, "backward": 2 * forward - frozen, "recomputation": again + scores}
    executed = {part: accumulate * count for part, count in flops.items()}
    whole, updated = run.total("computing"), run.total("moment", trained=True)
    trained = run.total("computing", trained=True)
    logits = run.step_tokens * head_numbers(run) // run.model.width
    casts = trained * (run.store + run.compute) if run.mixed else 0
    moved = {
        "weights": accumulate * whole * run.compute * (3 if again else 2) + casts,
        "gradients": accumulate * trained * (2 * run.compute + 2 * FLOAT32 * run.accumulates),
        "activations": accumulate * _activation_bytes(run),
        "logits": 4 * logits * FLOAT32,
        "optimizer": updated * (run.compute + 2 * run.store) + 2 * elements_held(run) * run.moment,
    }
    executed["optimizer"] = _optimizer_flops(run.config.optimizer.name, run.layout)
    return Work(executed, moved, run.step_tokens)


@functools.lru_cache(maxsize=4096)
def _optimizer_flops(name: str, layout: Layout) -> int:
    """Of the products of one update on one device: Muon's, 0 of all others.

    A step of Newton and Schulz's iteration multiplies a matrix X of m ≤ n: A = X·Xᵀ, A·A, and a polynomial of A with X
    (Jordan 2024); there are five. A device has its share of them, at best: how the partitioner splits them is its own.
    """
    if name != "muon":
        return 0
    total = 0
    for parameter in layout.trained:
        spec = parameter.spec
        if spec.role == "matrix":
            rows = math.prod(spec.shape[i] for i in spec.fan_in)
            columns = math.prod(spec.shape[i] for i in range(len(spec.shape)) if not _counts_matrices(spec, i)) // rows
            m, n = sorted((rows, columns))
            whole = spec.size // (m * n) * MUON_STEPS * (4 * m * m * n + 2 * m**3)
            total += whole * layout.per_device(parameter.moment) // math.prod(parameter.moment.shape)
    return total


def _counts_matrices(spec: ParamSpec, dimension: int) -> bool:
    """Whether a dimension numbers matrices that stand on their own: layers, and experts."""
    axis = spec.axes[dimension]
    return axis == "layers" or (axis == "experts" and dimension < min(spec.fan_in))


def head_flops(run: TrainingRun) -> int:
    """Of the logits of one micro-batch on one device."""
    return 2 * run.tokens * head_numbers(run)


def grouped_layers(run: TrainingRun) -> int:
    """Layers in the groups of `sqrt`, which run once more as a whole: a loop, out of which nothing is left."""
    return run.model.repeats * len(run.model.pattern) if run.group_size > 1 else 0


def recomputed_flops(run: TrainingRun) -> int:
    """Executed a second time for the backward pass of one micro-batch, on one device."""
    one = block(run)
    return run.model.layers * one.flops_again(run.remat.kept) + grouped_layers(run) * one.flops


def _activation_bytes(run: TrainingRun) -> int:
    """Of the blocks of one micro-batch: what a block computes is written and read once whenever it is computed, and so
    are its gradients; the backward pass reads what it needs of it. A value that several need is read once, and no
    value is fused away."""
    one = block(run)
    values = _block_bytes(one)
    again = sum(value.bytes for value in one.made_again(run.remat.kept).values())
    read = sum(one.values[name].bytes for name in {BLOCK_INPUT, *one.read})
    return run.model.layers * (4 * values + 2 * again + read) + grouped_layers(run) * 2 * values


def _block_bytes(one: Block) -> int:
    """Of the values that a block makes: its input is the output of the block before."""
    return sum(value.bytes for name, value in one.values.items() if name != BLOCK_INPUT)


def prefill(model: Architecture, batch: int, tokens: int, weight_dtype: str, cache_dtype: str) -> Work:
    """Taking in a prompt of so many tokens in one call; only the last token of each goes through the head.

    Executed FLOPs: all pairs of two tokens are multiplied. The bytes are the weights', read once, and the keys and
    values that are written; activations are left out.
    """
    head = 2 * model.vocab_size * model.width
    flops = forward_flops(model, batch, tokens) - head * batch * (tokens - 1)
    weights = _weight_bytes(model, batch * tokens, weight_dtype)
    moved = {"weights": weights, "KV cache": _cache_bytes(model, batch, tokens, cache_dtype)}
    return Work({"forward": flops}, moved, batch * tokens)


def decode_token(model: Architecture, batch: int, length: int, weight_dtype: str, cache_dtype: str) -> Work:
    """One more token for each of `batch` sequences of `length` tokens: all weights and all keys are read.

    Executed FLOPs: each new token with every slot of the cache.
    """
    slots = sum(cache_slots(model, kind, length) for kind in kinds(model))
    flops = batch * (2 * product_parameters(model) + _pair_flops(model) * slots)
    weights, cache = _weight_bytes(model, batch, weight_dtype), _cache_bytes(model, batch, length, cache_dtype)
    return Work({"forward": flops}, {"weights": weights, "KV cache": cache}, batch)


def _cache_bytes(model: Architecture, batch: int, length: int, dtype: str) -> int:
    """Of the keys and values of sequences of so many tokens, and their scales; a sliding layer has its window's."""
    itemsize, scale = formats.cache_itemsize(dtype)
    slots = sum(cache_slots(model, kind, length) for kind in kinds(model))
    return 2 * batch * slots * model.kv_heads * (model.head_dim * itemsize + scale)


def _weight_bytes(model: Architecture, tokens: int, dtype: str) -> int:
    """Weights that so many tokens read, with their scales: of the experts at most those there are, of the embeddings
    their rows."""
    stored, total = formats.named(dtype), 0
    for spec in leaves(param_specs(model)):
        size = stored.numbers_bytes(spec) + stored.scale_bytes(spec)
        if spec.role == "embedding":
            rows = min(tokens, spec.shape[0])
            total += size // spec.shape[0] * rows
            total += size if model.tied_embeddings and spec.axes[0] == "vocab" else 0
        else:
            one = _active(spec, model) if spec.role == "matrix" else spec.size
            total += size * min(spec.size, one * tokens if one < spec.size else one) // spec.size
    return total
