"""What the devices of a training run send each other in one step, in closed form.

Counted as the ZeRO paper counts (Rajbhandari et al. 2020, section 7): gathering or reduce-scattering Ψ elements moves
Ψ, and an all-reduce is one of each, 2Ψ. With Ψ parameters, data-parallel training moves 2Ψ at stages 0 to 2 and 3Ψ at
stage 3. Tensor parallelism moves activations: with its sequence in shares (Korthikanti et al. 2022, section 4.2) a
layer has two gathers and two reduce-scatters of M·D elements in each pass, and those of what is recomputed.

Left out: single numbers (norms, losses, counts of tokens), and what Muon and Adafactor exchange for updates of whole
matrices, which the partitioner writes. Counted though the backward pass can do without: biases gathered a second time.
Outside of loops a compiler may find that what is gathered again has been gathered before; XLA's does on a CPU.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Literal

from jaxllm.config import Architecture, Config
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact.block_graph import block
from jaxllm.ledger.formula.exact.layout import Layout
from jaxllm.ledger.formula.exact.run import FLOAT32, TrainingRun

Op = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One kind of collective over a whole step.

    Attributes:
      name: what it moves, and when.
      op: which collective.
      axes: of the mesh, that its devices lie along.
      devices: that take part with one.
      elements: put together or summed, in all its runs.
      itemsize: bytes of one.
    """

    name: str
    op: Op
    axes: tuple[str, ...]
    devices: int
    elements: int
    itemsize: int

    @property
    def volume(self) -> int:
        """Elements a device sends, in the ZeRO paper's count."""
        return self.elements * (2 if self.op == "all-reduce" else 1)

    @property
    def ring_bytes(self) -> float:
        """Bytes that a device sends where the others are in one ring: (n − 1)/n of the volume's."""
        return self.volume * self.itemsize * (self.devices - 1) / self.devices


def train_step(model: Architecture, config: Config, policy_name: str) -> tuple[Transfer, ...]:
    """Every transfer of one update on one device; none where there is one device.

    Raises:
      UserError: an array cannot be split as the mesh wants it.
    """
    return transfers(run_lib.make(model, config, policy_name, "gpu"))


def transfers(run: TrainingRun) -> tuple[Transfer, ...]:
    """The same of a setting, whatever its platform."""
    made = (*_weights(run), *_gradients(run), *_activations(run))
    return tuple(transfer for transfer in made if transfer.elements and transfer.devices > 1)


def _transfer(run: TrainingRun, name: str, op: Op, axes: tuple[str, ...], elements: int, itemsize: int = 0) -> Transfer:
    there = tuple(axis for axis in axes if run.mesh[axis] > 1)
    devices = math.prod(run.mesh[axis] for axis in there)
    return Transfer(name, op, there, devices, elements, itemsize or run.compute)


def padded(run: TrainingRun, *groups: str, trained: bool = False) -> int:
    """Numbers of all arrays, or of those of some groups, put together from their shares over `data`, with padding.

    Args:
      trained: of those that are.
    """
    return run.total("share", *groups, trained=trained) * run.mesh["data"]


def _weights(run: TrainingRun) -> Iterator[Transfer]:
    data, accumulate = ("data",), run.config.train.accumulate
    if run.stage in (1, 2) and run.mixed:
        yield _transfer(run, "weights, from masters", "all-gather", data, padded(run, trained=True))
    elif run.stage in (1, 2):
        # What is updated in shares is put together at the end of the step, as it is stored.
        count = padded(run, trained=True)
        yield _transfer(run, "weights, updated", "all-gather", data, count, run.store)
    elif run.stage == 3:
        # Under `sqrt` a block of a group runs twice before its gradients are taken.
        passes = 3 if run.group_size > 1 else 2
        for name, groups, times in (
            ("layers, in each pass", ("layers",), passes * accumulate),
            ("layers after the loop, in each pass", ("tail",), 2 * accumulate),
            # XLA takes them out of the loop over micro-batches.
            ("embeddings, norm and head", ("embed", "final_norm", "head"), 1),
        ):
            count = padded(run, *groups) * times
            yield _transfer(run, f"weights: {name}", "all-gather", data, count)


def _gradients(run: TrainingRun) -> Iterator[Transfer]:
    accumulate, stage = run.config.train.accumulate, run.stage
    # Sums over micro-batches are float32; stages 2 and 3 add up what is scattered already.
    summed = FLOAT32 if run.accumulates else run.compute
    if stage:
        size = summed if stage == 1 else run.compute
        count = padded(run, trained=True)
        # A tied table is looked up and multiplied with: two sums.
        if stage >= 2 and not run.layout.frozen and run.model.tied_embeddings:
            table = next(p for p in run.parameters if p.name == "embed.tokens")
            count += run.per_device(table.share) * run.mesh["data"]
        count *= accumulate if stage > 1 else 1
        yield _transfer(run, "gradients", "reduce-scatter", ("data",), count, size)
    over = ("replica",) if stage else ("replica", "data")

    split, whole = _split_over_tensor(run.layout, stage > 0)
    if run.tensor == 1:
        split, whole = split + whole, 0
    for name, count, axes in (
        ("gradients, summed", split, over),
        ("gradients that meet other tokens along tensor", whole, (*over, "tensor")),
    ):
        yield _transfer(run, name, "all-reduce", axes, count, summed)


@functools.lru_cache(maxsize=4096)
def _split_over_tensor(layout: Layout, shares: bool) -> tuple[int, int]:
    """Numbers of gradients on a device: (of arrays that are split over `tensor`, of the others).

    Args:
      shares: whether a device has shares over `data` of them; or all that it computes with.
    """
    split = whole = 0
    for parameter in layout.trained:
        count = layout.per_device(parameter.share) if shares else layout.computing(parameter)
        if any("tensor" in axes for axes in parameter.weight.axes):
            split += count
        else:
            whole += count
    return split, whole


def _activations(run: TrainingRun) -> Iterator[Transfer]:
    """Over `tensor`: of a block's inputs and outputs; of embeddings and the last hidden states; of the loss."""
    if run.tensor == 1:
        return
    layers, accumulate, size = run.model.layers, run.config.train.accumulate, run.group_size
    one, width = block(run), run.tokens * run.model.width
    again = one.made_again(run.remat.kept)
    gathers = sum(value.moved for name, value in again.items() if name.endswith("inputs")) * layers
    scatters = sum(value.moved for name, value in again.items() if not name.endswith("inputs")) * layers
    grouped = run.model.repeats * len(run.model.pattern) if size > 1 else 0
    if grouped:  # and once more as a part of its group
        gathers, scatters = gathers + 2 * width * grouped, scatters + 2 * width * grouped
    both = 2 * width * layers + width
    tensor = ("tensor",)
    yield _transfer(run, "activations, forward", "all-gather", tensor, both * accumulate)
    yield _transfer(run, "activations, forward", "reduce-scatter", tensor, both * accumulate)
    yield _transfer(run, "activations, recomputed", "all-gather", tensor, gathers * accumulate)
    yield _transfer(run, "activations, recomputed", "reduce-scatter", tensor, scatters * accumulate)
    yield _transfer(run, "gradients of activations", "all-gather", tensor, both * accumulate)
    yield _transfer(run, "gradients of activations", "reduce-scatter", tensor, both * accumulate)
    if run.model.qk_norm and run.model.qk_norm_over == "projection":
        # Of queries and of keys, a number a token: forward, again for the backward pass, and the gradient of each.
        sums = 2 * run.tokens * (3 * layers + grouped)
        name = "sums of squares of queries and keys"
        yield _transfer(run, name, "all-reduce", tensor, sums * accumulate, FLOAT32)
    # The highest logit of each token, their sum and the target's.
    yield _transfer(run, "loss", "all-reduce", tensor, 3 * run.step_tokens, FLOAT32)
