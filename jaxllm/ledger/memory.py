"""The memory of a training run in closed form, without a trace; that of inference is `ledger.inference`.

Exact: every row of the persistent phase (weights, optimizer slots, counters), the batch, the gradients and
their accumulator, and on XLA's CPU backend what scanned layers keep (`ledger.activations`). Approximate: the
workspaces, which are the compiler's choice, and what layers outside the scan keep. The tests hold the peak
that they make against XLA.

Only the configuration and the specs are read, never the model's code, so that agreement is evidence.
"""

import dataclasses
import math

import jax

from jaxllm.config import Architecture, Config
from jaxllm.ledger import rows
from jaxllm.ledger.activations import (
    FLOAT32,
    expanded_experts_per_token,
    kept_per_token,
    workspace_per_token,
)
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, PERSISTENT, UPDATE, Ledger, Row
from jaxllm.ledger.slots import slot_rows
from jaxllm.model.specs import ParamSpec, is_spec, param_specs

# tokens, targets, segment_ids, positions: int32; weights: float32.
BATCH_BYTES_PER_TOKEN = 5 * 4
# The XLA of JAX 0.10 holds in float32 what bfloat16 products read on a CPU; that of 0.12 converts as it goes. In
# between nobody looked, so the larger is taken.
WHOLE_BFLOAT16_FROM = (0, 12)


def leaves(specs: object) -> list[ParamSpec]:
    return jax.tree.leaves(specs, is_leaf=is_spec)


def training(model: Architecture, config: Config, policy_name: str, platform: str = "cpu") -> Ledger:
    """The bill of a training run on each of `config.mesh.data` devices; the state is whole on every one.

    Args:
      policy_name: "fp32", or "bf16": float32 weights, and a bfloat16 copy that computes.
      platform: cpu | gpu | tpu. XLA's CPU backend multiplies no bfloat16 numbers and no ragged groups: it makes
        both from plain float32 products.
    """
    step = _Step.of(model, config, policy_name, platform)
    made = (*_persistent(step), *_boundary(step), *_backward(step), *_update(step))
    return Ledger("train", config.model.name, step.parameters, "", config.mesh.data, made)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The numbers that the rows of one training step share.

    Attributes:
      itemsize: bytes of a number in the compute dtype.
      held: bytes in which the platform holds such a number between the passes.
      step_tokens, tokens: on one device, in a step and in one of its micro-batches.
      scanned: whether the layers are iterations of a loop: XLA unrolls a loop of one iteration.
    """

    model: Architecture
    config: Config
    platform: str
    specs: list[ParamSpec]
    parameters: int
    itemsize: int
    held: int
    step_tokens: int
    tokens: int
    scanned: bool

    @classmethod
    def of(cls, model: Architecture, config: Config, policy_name: str, platform: str) -> "_Step":
        specs = leaves(param_specs(model))
        itemsize = {"fp32": 4, "bf16": 2}[policy_name]
        tokens = config.train.batch_size * config.data.sequence_length // config.mesh.data
        return cls(
            model=model,
            config=config,
            platform=platform,
            specs=specs,
            parameters=sum(spec.size for spec in specs),
            itemsize=itemsize,
            held=FLOAT32 if platform == "cpu" and jax.__version_info__ < WHOLE_BFLOAT16_FROM else itemsize,
            step_tokens=tokens,
            tokens=tokens // config.train.accumulate,
            scanned=model.repeats // model.unroll > 1,
        )

    def per_token(self, name: str, kind: str, phase: str, size: int, layers: int = 0) -> Row:
        """A row of so many bytes for each token of a micro-batch, in one layer or in several."""
        times = f"{layers} layers × " if layers else ""
        return rows.row(
            name, kind, phase, f"{times}{self.tokens:,} tokens × {size:,} B", (layers or 1) * self.tokens * size
        )


def _persistent(step: _Step) -> list[Row]:
    kind = "weights" if step.itemsize == FLOAT32 else "master weights"
    weights = rows.row(kind, kind, PERSISTENT, f"{step.parameters:,} × 4 B", step.parameters * FLOAT32)
    return [weights, *slot_rows(step.config.optimizer.name, step.specs)]


def _batch(step: _Step, phase: str) -> Row:
    size = step.step_tokens * BATCH_BYTES_PER_TOKEN
    return rows.row("batch", "batch", phase, f"{step.step_tokens:,} tokens × {BATCH_BYTES_PER_TOKEN} B", size)


def _between_passes(step: _Step, phase: str) -> list[Row]:
    """What lives from the forward pass to the end of the backward pass."""
    P, model = step.parameters, step.model
    made = [_batch(step, phase)]
    if step.itemsize != FLOAT32:
        made.append(rows.row("compute copy of weights", "weights", phase, f"{P:,} × {step.held} B", P * step.held))
    if step.config.train.accumulate > 1:
        made.append(rows.row("accumulated gradients", "gradient accumulator", phase, f"{P:,} × 4 B", P * FLOAT32))
    if step.config.remat.policy == "full":
        size = model.width * step.itemsize
        made.append(step.per_token("block_input", "activations", phase, size, model.layers))
        return made
    for tag, size in kept_per_token(model, step.config.data.sequence_length, step.held, step.scanned).items():
        made.append(step.per_token(tag, "activations", phase, size, model.layers))
    if step.scanned:
        # Attention's products want its weights as plain matrices: reshaped, they are residuals like any other.
        size = 2 * model.width * (model.heads + model.kv_heads) * model.head_dim
        formula = f"{model.layers} layers × {size:,} × {step.itemsize} B"
        made.append(rows.row("attn_weights", "activations", phase, formula, model.layers * size * step.itemsize))
    if model.positions == "rotary":
        kinds = len({*model.pattern, *model.tail})
        made.append(step.per_token("rotary angles", "activations", phase, kinds * model.head_dim * FLOAT32))
    return made


def _boundary(step: _Step) -> list[Row]:
    """The loss: a chunk's logits, float32, and their gradient; the head's gradient over the chunks so far."""
    D, V, c = step.model.width, step.model.vocab_size, step.itemsize
    chunk = min(step.config.train.loss_chunk, step.tokens)
    logits, one_head = chunk * V * FLOAT32, V * D * c
    made = _between_passes(step, BOUNDARY)
    made.append(step.per_token("final hidden states", "activations", BOUNDARY, 4 * D * FLOAT32))
    if logits >= one_head:
        made.append(rows.row("logits", "logits and loss", BOUNDARY, f"2 × {chunk:,} × {V:,} × 4 B", 2 * logits))
    else:  # the logits are gone once their gradient is there, and the head's gradient takes their place
        made.append(rows.row("logits", "logits and loss", BOUNDARY, f"{chunk:,} × {V:,} × 4 B", logits))
        formula = f"{V:,} × {D:,} × {c} B"
        made.append(rows.row("gradient of the head", "gradients", BOUNDARY, formula, one_head))
    if chunk < step.tokens:
        formula = f"{V:,} × {D:,} × 4 B"
        made.append(rows.row("gradient of the head, summed", "gradients", BOUNDARY, formula, V * D * FLOAT32))
    return made


def _backward(step: _Step) -> list[Row]:
    model, P, c = step.model, step.parameters, step.itemsize
    length = step.config.data.sequence_length
    stacked = step.scanned and step.config.remat.policy == "none"
    made = [
        *_between_passes(step, BACKWARD),
        rows.row("gradients", "gradients", BACKWARD, f"{P:,} × {c} B", P * c),
    ]
    if step.config.remat.policy == "full":
        # One scan iteration runs the whole layer pattern, and XLA recomputes all of its blocks before the first
        # gradient; outside a loop it finds that every block has been computed before, and keeps them all.
        blocks = len(model.pattern) if step.scanned else model.layers
        size = sum(kept_per_token(model, length, step.held, stacked=False).values())
        made.append(step.per_token("blocks, recomputed", "activations", BACKWARD, size, blocks))
    work = workspace_per_token(model, length, step.held, stacked)
    made.append(step.per_token("backward workspace", "activations", BACKWARD, work))
    if model.experts and step.platform == "cpu":
        expanded = expanded_experts_per_token(model)
        made.append(step.per_token("experts, expanded", "activations", BACKWARD, expanded))
    if step.scanned:
        one = sum(spec.size for spec in step.specs if spec.axes[0] == "layers") // model.repeats
        made.append(rows.row("weights of one repeat", "weights", BACKWARD, f"{one:,} × {step.held} B", one * step.held))
    return made


def _update(step: _Step) -> list[Row]:
    P, name = step.parameters, step.config.optimizer.name
    c = step.itemsize if step.config.train.accumulate == 1 else FLOAT32  # an accumulator is float32
    made = [
        _batch(step, UPDATE),
        rows.row("gradients", "gradients", UPDATE, f"{P:,} × {c} B", P * c),
        rows.row("gradients, averaged", "gradients", UPDATE, f"{P:,} × 4 B", P * FLOAT32),
    ]
    largest = max(spec.size for spec in step.specs)
    copies = {"lion": 1, "muon": 1, "adafactor": 2}.get(name, 0)  # arrays of the direction that are made at a time
    if copies:
        size = copies * largest * FLOAT32
        made.append(rows.row("directions", "optimizer", UPDATE, f"{copies} × {largest:,} × 4 B", size))
    if name == "muon":
        grams = sum(_gram_numbers(spec) for spec in step.specs if spec.role == "matrix")
        made.append(rows.row("Gram matrices", "optimizer", UPDATE, f"2 × {grams:,} × 4 B", 2 * grams * FLOAT32))
    return made


def _gram_numbers(spec: ParamSpec) -> int:
    """Muon's Newton–Schulz steps square each matrix of an array over its shorter side."""
    inputs = math.prod(spec.shape[i] for i in spec.fan_in)
    counted = [i for i, axis in enumerate(spec.axes) if axis in ("layers", "experts") and i < min(spec.fan_in)]
    matrices = math.prod(spec.shape[i] for i in counted)
    return matrices * min(inputs, spec.size // (matrices * inputs)) ** 2
