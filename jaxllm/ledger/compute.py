"""The work of training and inference in closed form: FLOPs, bytes moved, and the least time they take.

A multiply and an add are two FLOPs, and only matrix products are counted: 2 a weight and token forward,
twice that backward. Attention is 4·N·H a query and key (scores, and their product with the values), in one of
two conventions, named wherever a figure is given:

    executed   all T × S pairs, as the reference attention computes them, windows and masks or not
    model      the pairs a query may see: (T + 1) / 2 of T on average, fewer in a sliding layer

Executed FLOPs make the roofline, recomputation included: they are one device's, and its share of them where products
are split over `tensor`. Model FLOPs make utilisation, MFU (Chowdhery et al. 2022, appendix B): those of a token times
tokens a second, over the peak of all devices of the run together. Neither recomputation nor masked pairs count as
work there, so that a remat policy can only lower it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config import Architecture, Config
from jaxllm.hardware import Device
from jaxllm.ledger import setting as setting_lib
from jaxllm.ledger.activations import head_numbers
from jaxllm.ledger.dataflow import block
from jaxllm.ledger.inference import ITEMSIZE
from jaxllm.ledger.memory import leaves
from jaxllm.ledger.rows import Unknown, figure_to_json
from jaxllm.ledger.setting import FLOAT32, Setting
from jaxllm.ledger.slots import SLOTS, held
from jaxllm.model.specs import ParamSpec, cache_slots, param_specs


@dataclasses.dataclass(frozen=True)
class Work:
    """What one program does on one device.

    Attributes:
      flops: executed.
      bytes: read and written in device memory: an estimate from below, each array once a use.
      tokens: that it does it for.
    """

    flops: int
    bytes: int
    tokens: int

    def to_json(self, device: Device, dtype: str) -> Mapping[str, Any]:
        """The ledger JSON's "compute"."""
        seconds, bound = roofline(self, device, dtype)
        return {
            "flops": self.flops,
            "bytes": self.bytes,
            "roofline_seconds": figure_to_json(seconds),
            "bound": figure_to_json(bound),
        }


def product_parameters(model: Architecture) -> int:
    """Weights that a token is multiplied with: matrices, those of its own experts only, and the head.

    Looking up an embedding is no product; a tied embedding counts once, as the head.
    """
    specs = leaves(param_specs(model))
    inside = sum(_active(spec, model) for spec in specs if spec.role == "matrix")
    return inside + model.vocab_size * model.width


def _active(spec: ParamSpec, model: Architecture) -> int:
    """Of an array with a matrix for each expert, the part that one token meets."""
    if "experts" in spec.axes and spec.axes.index("experts") < min(spec.fan_in):
        return spec.size // model.experts * model.experts_per_token
    return spec.size


def _kinds(model: Architecture) -> list[str]:
    return [*model.pattern * model.repeats, *model.tail]


def _pair_flops(model: Architecture) -> int:
    return 4 * model.heads * model.head_dim


def visible_pairs(model: Architecture, kind: str, length: int) -> int:
    """Pairs of a query and a key that it may see, over one sequence in one layer."""
    seen = min(model.window, length) if kind == "sliding" else length
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(model: Architecture, sequences: int, length: int) -> int:
    """Executed by one forward pass, the head included."""
    products = 2 * product_parameters(model) * sequences * length
    return products + sequences * model.layers * _pair_flops(model) * length * length


def model_flops_per_token(model: Architecture, sequence_length: int) -> float:
    """Model FLOPs of a trained token, forward and backward, for utilisation: 6 · N and visible attention."""
    pairs = sum(visible_pairs(model, kind, sequence_length) for kind in _kinds(model))
    return 3 * (2 * product_parameters(model) + _pair_flops(model) * pairs / sequence_length)


def train_step(model: Architecture, config: Config, policy_name: str, platform: str = "gpu") -> Work:
    """One update on one device.

    Each product has two in the backward pass, one for each of its factors. What a remat policy does not keep and the
    backward pass needs is made once more (`ledger.dataflow`), and the scores of chunked attention for each chunk's
    gradients. The head's gradients are taken where its logits are, so it is never computed again. `tensor` divides
    the products, the router's aside, and `replica` and `data` the tokens.

    The bytes are: weights read in each pass of each micro-batch, gradients written and read, the optimizer's slots
    read and written, the logits and their gradient written and read.

    Args:
      platform: cpu | gpu | tpu.
    """
    setting = setting_lib.make(model, config, policy_name, platform)
    again = recomputed_flops(setting)
    flops = 3 * (_layers_flops(setting) + head_flops(setting)) + again
    accumulate = config.train.accumulate
    whole = sum(map(setting.computing, setting.parameters))
    stored = sum(setting.per_device(parameter.moment) for parameter in setting.parameters)
    slots = sum(
        sum(held(slot, parameter, setting)) for slot in SLOTS[config.optimizer.name] for parameter in setting.parameters
    )
    passes = 3 if again else 2
    moved = accumulate * whole * setting.compute * (passes + 2)
    moved += stored * 3 * FLOAT32 + 2 * slots * setting.moment  # gradient and weight read, weight written; slots
    moved += 4 * setting.step_tokens * head_numbers(setting) // model.width * FLOAT32
    return Work(accumulate * flops, moved, setting.step_tokens)


def head_flops(setting: Setting) -> int:
    """Of the logits of one micro-batch on one device."""
    return 2 * setting.tokens * head_numbers(setting)


def _layers_flops(setting: Setting) -> int:
    return setting.model.layers * block(setting).flops


def recomputed_flops(setting: Setting) -> int:
    """Executed a second time for the backward pass of one micro-batch, on one device.

    Under `sqrt` the layers of a group run once more as a whole: they are a loop, out of which nothing is left.
    """
    one, layers = block(setting), setting.model.layers
    size = setting.group_size
    grouped = setting.model.repeats * len(setting.model.pattern) if size > 1 else 0
    again = (layers - grouped) * one.flops_again(setting.remat.kept)
    if grouped:
        again += grouped * (one.flops + one.flops_again(setting.remat.kept))
    return again


def prefill(model: Architecture, batch: int, tokens: int, weight_dtype: str) -> Work:
    """Taking in a prompt of so many tokens in one call; only the last token of each goes through the head."""
    head = 2 * model.vocab_size * model.width
    flops = forward_flops(model, batch, tokens) - head * batch * (tokens - 1)
    return Work(flops, _weight_bytes(model, batch * tokens, weight_dtype), batch * tokens)


def decode_token(model: Architecture, batch: int, length: int, weight_dtype: str, cache_dtype: str) -> Work:
    """One more token for each of `batch` sequences of `length` tokens: all weights and all keys are read."""
    slots = sum(cache_slots(model, kind, length) for kind in _kinds(model))
    flops = batch * (2 * product_parameters(model) + _pair_flops(model) * slots)
    cache = 2 * batch * slots * model.kv_heads * model.head_dim * ITEMSIZE[cache_dtype]
    return Work(flops, _weight_bytes(model, batch, weight_dtype) + cache, batch)


def _weight_bytes(model: Architecture, tokens: int, dtype: str) -> int:
    """Weights that so many tokens read: of the experts at most those there are, of the embeddings their rows."""
    count = 0
    for spec in leaves(param_specs(model)):
        if spec.role == "embedding":
            continue
        one = _active(spec, model) if spec.role == "matrix" else spec.size
        count += min(spec.size, one * tokens) if one < spec.size else spec.size
    if model.tied_embeddings:
        count += model.vocab_size * model.width
    return (count + tokens * model.width) * ITEMSIZE[dtype]


def roofline(work: Work, device: Device, dtype: str) -> tuple[float | Unknown, str | Unknown]:
    """(least seconds, what sets them: "compute" or "bandwidth") on a device."""
    peak = device.peak_flops.get(dtype)
    if peak is None or device.bandwidth is None:
        missing = f"peak {dtype} FLOP/s" if peak is None else "memory bandwidth"
        unknown = Unknown(f"the {missing} of {device.name} is not known")
        return unknown, unknown
    compute, memory = work.flops / peak, work.bytes / device.bandwidth
    return max(compute, memory), "compute" if compute >= memory else "bandwidth"
