"""Collective communication of one training step, and of one forward pass of inference, in closed form.

Volumes follow the ZeRO paper (Rajbhandari et al. 2020, section 7): all-gathering or reduce-scattering Ψ elements moves
Ψ, and an all-reduce is one of each, 2Ψ. With Ψ parameters, data parallelism moves 2Ψ at stages 0 to 2 and 3Ψ at
stage 3. Tensor parallelism moves activations: with sequence parallelism (Korthikanti et al. 2022, section 4.2), a
layer has two all-gathers and two reduce-scatters of M·D elements in each pass, plus those of recomputed values.

Not counted: scalars (norms, losses, token counts), and what Muon and Adafactor exchange to update whole matrices,
which the partitioner inserts. Counted although the backward pass does not need it: a second all-gather of biases.
Outside loops, a compiler may merge a repeated all-gather with the first one; XLA does so on a CPU.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Literal

from jaxllm.config import Architecture, Config
from jaxllm.config.inference_mesh import InferenceMesh
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact.block_graph import block
from jaxllm.ledger.formula.exact.layout import Layout
from jaxllm.ledger.formula.exact.run import FLOAT32, TrainingRun

Op = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One kind of collective, summed over a whole step.

    Attributes:
      name: What is moved, and when.
      op: Type of collective.
      axes: Mesh axes that the collective spans.
      devices: Devices that take part in one collective.
      elements: Elements gathered or reduced, summed over all executions.
      itemsize: Bytes per element.
    """

    name: str
    op: Op
    axes: tuple[str, ...]
    devices: int
    elements: int
    itemsize: int

    @property
    def volume(self) -> int:
        """Elements that a device sends, by the ZeRO paper's count."""
        return self.elements * (2 if self.op == "all-reduce" else 1)

    @property
    def ring_bytes(self) -> float:
        """Bytes that a device sends in a ring algorithm: (n − 1)/n of the volume in bytes."""
        return self.volume * self.itemsize * (self.devices - 1) / self.devices


def train_step(model: Architecture, config: Config, policy_name: str) -> tuple[Transfer, ...]:
    """Returns every transfer of one update on one device; empty on a single device.

    Raises:
      UserError: An array cannot be sharded as the mesh requires.
    """
    return transfers(run_lib.make(model, config, policy_name, "gpu"))


def transfers(run: TrainingRun) -> tuple[Transfer, ...]:
    """Returns every transfer of one update of a training run, on any platform."""
    made = (*_weights(run), *_gradients(run), *_activations(run))
    return tuple(transfer for transfer in made if transfer.elements and transfer.devices > 1)


def inference(model: Architecture, batch: int, tokens: int, itemsize: int, mesh: InferenceMesh) -> tuple[Transfer, ...]:
    """Returns every transfer of one forward pass of inference on one device; empty without tensor parallelism.

    The outputs of both sub-layers of every layer are all-reduced, and so are the embeddings (Shoeybi et al. 2019). The
    logits of each sequence's last token are all-gathered.

    Args:
      batch: Sequences, over all devices.
      tokens: New tokens of each sequence.
      itemsize: Bytes per activation element.
      mesh: Number of devices along each mesh axis.
    """
    if mesh.tensor == 1:
        return ()
    rows, over = mesh.rows(batch), (("tensor",), mesh.tensor)
    outputs = (2 * model.layers + 1) * rows * tokens * model.width
    made = [Transfer("embeddings and outputs of sub-layers", "all-reduce", *over, outputs, itemsize)]
    if model.qk_norm and model.qk_norm_over == "projection":
        sums = 2 * model.layers * rows * tokens
        made.append(Transfer("sums of squares of queries and keys", "all-reduce", *over, sums, FLOAT32))
    logits = rows * mesh.stored_model(model).vocab_size
    return (*made, Transfer("logits", "all-gather", *over, logits, FLOAT32))


def _transfer(run: TrainingRun, name: str, op: Op, axes: tuple[str, ...], elements: int, itemsize: int = 0) -> Transfer:
    there = tuple(axis for axis in axes if run.mesh[axis] > 1)
    devices = math.prod(run.mesh[axis] for axis in there)
    return Transfer(name, op, there, devices, elements, itemsize or run.compute_bytes)


def padded(run: TrainingRun, *groups: str, trained: bool = False) -> int:
    """Returns the elements of all arrays, or of some groups, all-gathered over `data`, padding included.

    Args:
      groups: Parameter groups (`Parameter.group`) to count; all if none is given.
      trained: Count trained arrays only.
    """
    return run.total("sharded", *groups, trained=trained) * run.mesh["data"]


def _weights(run: TrainingRun) -> Iterator[Transfer]:
    data, accumulate = ("data",), run.config.train.accumulate
    if run.stage in (1, 2) and run.mixed:
        yield _transfer(run, "weights, from masters", "all-gather", data, padded(run, trained=True))
    elif run.stage in (1, 2):
        # Weights updated shard by shard are all-gathered at the end of the step, in the dtype they are stored in.
        count = padded(run, trained=True)
        yield _transfer(run, "weights, updated", "all-gather", data, count, run.param_bytes)
    elif run.stage == 3:
        # Under `sqrt`, a block of a group runs forward twice before its backward pass.
        passes = 3 if run.group_size > 1 else 2
        for name, groups, times in (
            ("layers, in each pass", ("layers",), passes * accumulate),
            ("layers after the loop, in each pass", ("tail",), 2 * accumulate),
            # XLA hoists these all-gathers out of the loop over micro-batches.
            ("embeddings, norm and head", ("embed", "final_norm", "head"), 1),
        ):
            count = padded(run, *groups) * times
            yield _transfer(run, f"weights: {name}", "all-gather", data, count)


def _gradients(run: TrainingRun) -> Iterator[Transfer]:
    accumulate, stage = run.config.train.accumulate, run.stage
    # Gradients accumulate in float32; stages 2 and 3 accumulate gradients that are already scattered.
    summed = FLOAT32 if run.accumulates else run.compute_bytes
    if stage:
        size = summed if stage == 1 else run.compute_bytes
        count = padded(run, trained=True)
        # The lookup and the head matmul each reduce the gradient of a tied table.
        if stage >= 2 and not run.layout.frozen and run.model.tied_embeddings:
            table = next(p for p in run.parameters if p.name == "embed.tokens")
            count += table.sharded.elements_per_device * run.mesh["data"]
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
    """Returns the gradient elements on a device as (arrays sharded over `tensor`, other arrays).

    Args:
      shares: True counts the device's shards over `data`; False counts all elements that it computes with.
    """
    split = whole = 0
    for parameter in layout.trained:
        count = parameter.sharded.elements_per_device if shares else parameter.compute_elements
        if any("tensor" in axes for axes in parameter.weight.axes):
            split += count
        else:
            whole += count
    return split, whole


def _activations(run: TrainingRun) -> Iterator[Transfer]:
    """Yields transfers over `tensor`: block inputs and outputs, embeddings, last hidden states, and the loss."""
    if run.tensor == 1:
        return
    layers, accumulate, size = run.model.layers, run.config.train.accumulate, run.group_size
    one, width = block(run), run.tokens * run.model.width
    again = one.recomputed(run.remat.kept)
    gathers = sum(value.moved for name, value in again.items() if name.endswith("inputs")) * layers
    scatters = sum(value.moved for name, value in again.items() if not name.endswith("inputs")) * layers
    grouped = run.model.repeats * len(run.model.pattern) if size > 1 else 0
    if grouped:  # once more, when its group is recomputed
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
        # One element per token for queries and one for keys: forward, recomputation, and gradient.
        sums = 2 * run.tokens * (3 * layers + grouped)
        name = "sums of squares of queries and keys"
        yield _transfer(run, name, "all-reduce", tensor, sums * accumulate, FLOAT32)
    # Per token: the largest logit, the sum of exponentials, and the target's logit.
    yield _transfer(run, "loss", "all-reduce", tensor, 3 * run.step_tokens, FLOAT32)
