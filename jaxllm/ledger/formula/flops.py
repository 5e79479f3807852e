"""Work of training and inference in closed form: FLOPs and bytes moved, by purpose.

A multiply and an add are two FLOPs, and only matmuls are counted: 2 FLOPs per weight and token forward, twice that
backward. Attention is 4·N·H FLOPs per query-key pair (the scores, and their product with the values), in one of two
conventions; every reported figure names its convention:

    executed   all pairs that the program's attention multiplies: T × S in the reference implementation, masked or not;
               visible pairs in a kernel (its tiles at the mask's edge compute some more, about tile / T of them)
    model      pairs that a query may attend to: (T + 1) / 2 of T on average, fewer in a sliding-window layer

Executed FLOPs, including recomputation, make the roofline (`roofline`): they are those of one device, or its shard of
matmuls that are sharded over `tensor`. Model FLOPs make utilisation, MFU (Chowdhery et al. 2022, appendix B): model
FLOPs per token times tokens per second, over the summed peak of all devices of the run. Recomputation and masked pairs
do not count as work there, so a remat policy can only lower MFU. Every visible pair is multiplied, so model FLOPs never
exceed executed FLOPs, and utilisation of a true peak never exceeds 1.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

from jaxllm.config import Architecture, Config, LoraConfig
from jaxllm.config.inference_mesh import ONE_DEVICE, InferenceMesh
from jaxllm.config.optimizers import MUON_STEPS, OPTIMIZERS
from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact.activations import head_elements
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT, Block, block, kinds, visible_pairs
from jaxllm.ledger.formula.exact.layout import NO_LORA, Lora
from jaxllm.ledger.formula.exact.optimizer_slots import total_elements
from jaxllm.ledger.formula.exact.run import FLOAT32, Layout, TrainingRun
from jaxllm.model.adapter_specs import adapter_specs
from jaxllm.model.specs import ParamSpec, cache_slots, leaves, param_specs

# Convention of `Work.flops`, printed with the figures.
EXECUTED = "executed: recomputation and masked pairs of attention included"


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs and bytes of one program on one device.

    Attributes:
      flops_of: Executed FLOPs by part: forward, backward, recomputation, optimizer (matmuls only).
      bytes_of: Bytes read and written in device memory by part: weights, gradients, activations, logits, optimizer, KV
        cache. Estimated low: each array counts once per use, and nothing stays on the chip between uses.
      tokens: Tokens that the program processes.
    """

    flops_of: Mapping[str, int]
    bytes_of: Mapping[str, int]
    tokens: int

    @property
    def flops(self) -> int:
        """Executed FLOPs, all parts together."""
        return sum(self.flops_of.values())

    @property
    def bytes(self) -> int:
        """Bytes moved in device memory, all parts together."""
        return sum(self.bytes_of.values())

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte."""
        return self.flops / self.bytes


def matmul_parameters(model: Architecture) -> int:
    """Returns the number of weights that a token is multiplied with: matrices, its active experts only, and the head.

    An embedding lookup is no matmul; a tied embedding counts once, as the head.
    """
    specs = leaves(param_specs(model))
    inside = sum(_active(spec, model) for spec in specs if spec.role == "matrix")
    return inside + model.vocab_size * model.width


def _active(spec: ParamSpec, model: Architecture) -> int:
    """Returns the elements of an array that one token uses: its active experts' matrices, or the whole array."""
    if any(spec.axes[dim] == "experts" for dim in spec.stacked):
        return spec.size // model.experts * model.experts_per_token
    return spec.size


def _pair_flops(model: Architecture) -> int:
    return 4 * model.heads * model.head_dim


def forward_flops(model: Architecture, sequences: int, length: int) -> int:
    """Returns the executed FLOPs of one forward pass with every pair multiplied, the head included."""
    products = 2 * matmul_parameters(model) * sequences * length
    return products + sequences * model.layers * _pair_flops(model) * length * length


def model_flops_per_token(model: Architecture, sequence_length: int, lora: Lora = NO_LORA) -> float:
    """Returns the model FLOPs per trained token, forward and backward, for utilisation: 6 · N plus visible attention.

    With adapters only the adapters are trained: the N frozen weights have no gradients, and count 4 · N.
    """
    pairs = sum(visible_pairs(model, kind, sequence_length) for kind in kinds(model))
    attention, products = _pair_flops(model) * pairs / sequence_length, 2 * matmul_parameters(model)
    if lora == NO_LORA:
        return 3 * (products + attention)
    rank, targets = lora
    beside = 2 * sum(spec.size for spec in leaves(adapter_specs(model, LoraConfig(rank=rank, targets=targets))))
    return 2 * products + 3 * (beside + attention)


def train_step(model: Architecture, config: Config, policy_name: str, platform: str = "gpu") -> Work:
    """Returns the work of one update of a run on one device; see `step`.

    Args:
      policy_name: Precision policy: fp32 | bf16 | fp16 | bf16_pure.
      platform: cpu | gpu | tpu.
    """
    return step(run_lib.make(model, config, policy_name, platform))


def step(run: TrainingRun) -> Work:
    """Returns the work of one update on one device.

    FLOPs: each matmul has two in the backward pass, one per factor; with a frozen weight, one. Recomputed are the
    values that a remat policy does not keep and the backward pass needs (`exact.block_graph`), the scores of chunked
    attention for each chunk's gradients, and what attention kernels recompute for theirs
    (`Block.score_recompute_flops`). The head's gradients are computed while its logits exist, so the head is never
    recomputed. `tensor` divides the matmuls, except the router's and the second of each adapter; `replica` and `data`
    divide the tokens.

    Bytes: weights read in each pass of each micro-batch, and cast once from their masters; their gradients written and
    read; activations as in `_activation_bytes`; the logits and their gradient written and read; and for the optimizer,
    gradients and weights read, weights written, and its slots read and written.
    """
    accumulate = run.config.train.accumulate
    forward = run.model.layers * block(run).flops + head_flops(run)
    again = recomputed_flops(run)
    scores = run.model.layers * block(run).score_recompute_flops
    frozen = run.model.layers * block(run).frozen_flops
    if run.layout.frozen:
        frozen += head_flops(run)
    flops = {"forward": forward, "backward": 2 * forward - frozen, "recomputation": again + scores}
    executed = {part: accumulate * count for part, count in flops.items()}
    whole, updated = run.total("compute"), run.total("moment", trained=True)
    trained = run.total("compute", trained=True)
    logits = run.step_tokens * head_elements(run) // run.model.width
    casts = trained * (run.param_bytes + run.compute_bytes) if run.mixed else 0
    slots = total_elements(run.config.optimizer.name, run.layout)
    moved = {
        "weights": accumulate * whole * run.compute_bytes * (3 if again else 2) + casts,
        "gradients": accumulate * trained * (2 * run.compute_bytes + 2 * FLOAT32 * run.accumulates),
        "activations": accumulate * _activation_bytes(run),
        "logits": 4 * logits * FLOAT32,
        "optimizer": updated * (run.compute_bytes + 2 * run.param_bytes) + 2 * slots * run.moment_bytes,
    }
    executed["optimizer"] = _optimizer_flops(run.config.optimizer.name, run.layout)
    return Work(executed, moved, run.step_tokens)


@functools.lru_cache(maxsize=4096)
def _optimizer_flops(name: str, layout: Layout) -> int:
    """Returns the matmul FLOPs of one optimizer update on one device: Muon's; 0 for all other optimizers.

    A Newton-Schulz step multiplies a matrix X of size m ≤ n: A = X·Xᵀ, A·A, and a polynomial of A with X (Jordan 2024).
    At best, a device computes its shard of them: how they are sharded is up to the partitioner.
    """
    if not OPTIMIZERS[name].orthogonalizes:
        return 0
    total = 0
    for parameter in layout.trained:
        if parameter.spec.role == "matrix":
            count, *sides = parameter.spec.matrices
            m, n = sorted(sides)
            flops = count * MUON_STEPS * (4 * m * m * n + 2 * m**3)
            total += flops * parameter.moment.elements_per_device // math.prod(parameter.moment.shape)
    return total


def head_flops(run: TrainingRun) -> int:
    """Returns the forward FLOPs of the logits of one micro-batch on one device."""
    return 2 * run.tokens * head_elements(run)


def grouped_layers(run: TrainingRun) -> int:
    """Returns the number of layers in the groups of `sqrt`, which are recomputed as a whole.

    A group runs in a loop, from which nothing can be left out.
    """
    return run.model.repeats * len(run.model.pattern) if run.group_size > 1 else 0


def recomputed_flops(run: TrainingRun) -> int:
    """Returns the FLOPs recomputed for the backward pass of one micro-batch on one device."""
    one = block(run)
    return run.model.layers * one.recompute_flops(run.remat.kept) + grouped_layers(run) * one.flops


def _activation_bytes(run: TrainingRun) -> int:
    """Returns the bytes read and written for the block activations of one micro-batch.

    The values of a block are written and read once each time they are computed, and so are their gradients; the
    backward pass also reads what it needs of them. A value with several readers is read once. No value is fused away.
    """
    one = block(run)
    values = _block_bytes(one)
    again = sum(value.bytes for value in one.recomputed(run.remat.kept).values())
    read = sum(one.values[name].bytes for name in {BLOCK_INPUT, *one.read})
    return run.model.layers * (4 * values + 2 * again + read) + grouped_layers(run) * 2 * values


def _block_bytes(one: Block) -> int:
    """Returns the bytes of the values that a block computes; its input is the previous block's output."""
    return sum(value.bytes for name, value in one.values.items() if name != BLOCK_INPUT)


def prefill(
    model: Architecture,
    batch: int,
    tokens: int,
    weight_dtype: str,
    cache_dtype: str,
    mesh: InferenceMesh = ONE_DEVICE,
    platform: str = "",
) -> Work:
    """Returns the work of one device in prefilling `tokens` prompt tokens of each of `batch` sequences in one call.

    Only the last token of each sequence goes through the head. Executed FLOPs: all query-key pairs are multiplied.
    Bytes: the weights, read once, and the keys and values, written once; activations are not counted.
    """
    model, batch = mesh.shard(model), mesh.rows(batch)
    head = 2 * model.vocab_size * model.width
    flops = forward_flops(model, batch, tokens) - head * batch * (tokens - 1)
    weights = _weight_bytes(model, batch * tokens, weight_dtype, platform)
    moved = {"weights": weights, "KV cache": _cache_bytes(model, batch, tokens, cache_dtype)}
    return Work({"forward": flops}, moved, batch * tokens)


def decode_token(
    model: Architecture,
    batch: int,
    length: int,
    weight_dtype: str,
    cache_dtype: str,
    mesh: InferenceMesh = ONE_DEVICE,
    platform: str = "",
) -> Work:
    """Returns the work of one device for one new token for each of `batch` sequences of `length` tokens.

    The device reads all its weights and keys.

    Executed FLOPs: each new token attends to every slot of the cache.
    """
    model, batch = mesh.shard(model), mesh.rows(batch)
    slots = sum(cache_slots(model, kind, length) for kind in kinds(model))
    flops = batch * (2 * matmul_parameters(model) + _pair_flops(model) * slots)
    weights = _weight_bytes(model, batch, weight_dtype, platform)
    cache = _cache_bytes(model, batch, length, cache_dtype)
    return Work({"forward": flops}, {"weights": weights, "KV cache": cache}, batch)


def _cache_bytes(model: Architecture, batch: int, length: int, dtype: str) -> int:
    """Returns the bytes of the KV cache and its scales; a sliding layer caches its window only."""
    itemsize, scale = formats.cache_itemsize(dtype)
    slots = sum(cache_slots(model, kind, length) for kind in kinds(model))
    return 2 * batch * slots * model.kv_heads * (model.head_dim * itemsize + scale)


def _weight_bytes(model: Architecture, tokens: int, dtype: str, platform: str) -> int:
    """Returns the bytes of weights, with their scales, that `tokens` tokens read.

    Each expert counts at most once. Embeddings count the rows that are looked up; a tied table also counts as the head.
    """
    stored, total = formats.by_name(dtype, platform), 0
    for spec in leaves(param_specs(model)):
        size = stored.element_bytes(spec) + stored.scale_bytes(spec)
        if spec.role == "embedding":
            rows = min(tokens, spec.shape[0])
            total += size // spec.shape[0] * rows
            total += size if model.tied_embeddings and spec.axes[0] == "vocab" else 0
        else:
            one = _active(spec, model) if spec.role == "matrix" else spec.size
            total += size * min(spec.size, one * tokens if one < spec.size else one) // spec.size
    return total
