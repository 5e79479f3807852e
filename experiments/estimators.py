"""Peak memory of a training run by four widely used estimators, in bytes on one device.

The rules are transcribed from each tool's source at the commits below, with the options that its documentation
recommends for such a run. Where a tool does not support the run, the result is Unknown with the reason.

    accelerate   `accelerate estimate-memory`, column "Training using Adam": huggingface/accelerate
                 src/accelerate/commands/estimate.py at 00e4d26, docs/source/usage_guides/model_size_estimator.md
    deepspeed    `estimate_zero2_model_states_mem_needs` and its ZeRO-3 counterpart, states only: deepspeedai/DeepSpeed
                 deepspeed/runtime/zero/{stage_1_and_2,stage3}.py, docs/code-docs/source/memory.rst at 0cca539
    megatron     `report_theoretical_memory`: NVIDIA/Megatron-LM
                 megatron/training/theoretical_memory_usage.py at 00caa53
    cookbook     EleutherAI/cookbook calc/calc_transformer_mem.py at 827ee3b
"""

import math
from collections.abc import Callable

from jaxllm.config import Architecture, Config
from jaxllm.hardware import detect
from jaxllm.ledger.rows import Figure, Unknown
from jaxllm.model.specs import parameter_count
from jaxllm.parallel import mesh as mesh_lib

_ADAM = ("adam", "adamw")
_MASTERS = ("bf16", "fp16")  # policies with 16-bit compute weights and float32 masters


def estimates(model: Architecture, config: Config, policy: str, device: str) -> dict[str, Figure]:
    """Returns each estimator's peak bytes for one device of a run, or Unknown with the reason.

    Args:
      model: the run's model.
      config: the run's configuration.
      policy: resolved precision policy: fp32 | bf16 | fp16 | bf16_pure.
      device: device name, as for `--device`.
    """
    found: dict[str, Figure] = {name: estimate(model, config, policy) for name, estimate in ESTIMATORS.items()}
    if detect.by_name(device).platform == "tpu":
        found |= {name: Unknown(f"{name} does not run on TPUs") for name in ("deepspeed", "megatron")}
    return found


def _unsupported_axes(config: Config, *allowed: str) -> str:
    """Lists the mesh axes larger than 1, except the allowed ones; "" if there are none."""
    return ", ".join(
        f"{axis} {size}" for axis, size in mesh_lib.axis_sizes(config.mesh).items() if size > 1 and axis not in allowed
    )


def _tokens(config: Config) -> int:
    """Returns the tokens of one micro-batch on one device, as passed to every estimator."""
    ways = config.train.accumulate * config.mesh.replica * config.mesh.data
    return config.train.batch_size // ways * config.data.sequence_length


def accelerate(model: Architecture, config: Config, policy: str) -> Figure:
    """Estimate of accelerate: the base model without an untied head, Adam, one device, independent of the batch."""
    if config.optimizer.name not in _ADAM:
        return Unknown(f"accelerate counts Adam only, not {config.optimizer.name}")
    if policy == "bf16_pure":
        return Unknown("accelerate counts 16-bit training with float32 weights only")
    axes = _unsupported_axes(config, "replica", *([] if config.mesh.zero else ["data"]))
    if axes or config.optimizer.offload != "none":
        return Unknown(f"accelerate supports no sharding and no offload: {axes or config.optimizer.offload}")
    head = 0 if model.tied_embeddings else model.vocab_size * model.width
    return accelerate_bytes(4 * (parameter_count(model) - head), mixed=policy != "fp32")


def accelerate_bytes(weights: int, mixed: bool) -> int:
    """Returns the largest of accelerate's model, gradient, optimizer and step figures, in bytes.

    Args:
      weights: bytes of the float32 model.
      mixed: mixed precision rather than float32.
    """
    # Multiples of the model: 1, 1, 2 and 4 in float32; 1, 1½, 2 and 2 in mixed precision.
    return (2 if mixed else 4) * weights


def deepspeed(model: Architecture, config: Config, policy: str) -> Figure:
    """Estimate of DeepSpeed: weights, gradients and Adam states in mixed precision; no activations."""
    stage, offload = config.mesh.zero, config.optimizer.offload
    if stage not in (2, 3):
        return Unknown(f"DeepSpeed has estimators for ZeRO 2 and 3, not for {stage}")
    if config.optimizer.name not in _ADAM or policy not in _MASTERS:
        return Unknown(
            f"DeepSpeed counts Adam with 16-bit weights and float32 masters, not {config.optimizer.name}, {policy}"
        )
    if offload == "moments":
        return Unknown("DeepSpeed offloads masters and moments together")
    axes = _unsupported_axes(config, "data")
    if axes:
        return Unknown(f"DeepSpeed shards over all devices of a run and does not support {axes}")
    # DeepSpeed's layer is the direct parameters of one torch module: an embedding or one matrix.
    largest = model.width * max(model.vocab_size, model.mlp_width, model.heads * model.head_dim)
    return deepspeed_bytes(parameter_count(model), largest, config.mesh.data, stage, offload == "all")


def deepspeed_bytes(parameters: int, largest: int, devices: int, stage: int, offload: bool) -> int:
    """Returns DeepSpeed's bytes of model states on one device.

    Args:
      parameters: of the whole model.
      largest: parameters of the largest layer.
      devices: number of devices that the states are sharded over.
      stage: ZeRO stage, 2 or 3.
      offload: the optimizer is offloaded to the host; parameters stay on the device.
    """
    if stage == 2:
        return 2 * parameters if offload else 4 * parameters + 16 * parameters // devices
    return 4 * largest + (2 if offload else 18) * parameters // devices


def megatron(model: Architecture, config: Config, policy: str) -> Figure:
    """Estimate of Megatron-LM: weights, gradients, Adam's state and activations.

    Tensor parallelism implies sequence parallelism; ZeRO 1 is its distributed optimizer. Full recomputation does not
    lower its report. Its selective recomputation, of attention scores, corresponds to our chunked and kernel attention.
    """
    data, tensor = config.mesh.data * config.mesh.replica, config.mesh.tensor
    if config.optimizer.name not in _ADAM or policy not in _MASTERS:
        return Unknown(
            f"Megatron-LM counts Adam with 16-bit weights and float32 masters, not {config.optimizer.name}, {policy}"
        )
    if config.mesh.zero > 1 or (config.mesh.zero and config.mesh.replica > 1):
        return Unknown(
            "Megatron-LM's report supports a distributed optimizer over all data ranks, and no further sharding"
        )
    axes = _unsupported_axes(config, "data", "replica", "tensor")
    if axes or config.optimizer.offload != "none":
        return Unknown(f"Megatron-LM's report supports no offload and no {axes or config.optimizer.offload}")
    state = 6 + 12 / data if config.mesh.zero else 18
    no_scores = config.train.attention_chunk > 0 or config.attention.implementation in ("pallas", "cudnn")
    selective = tensor > 1 and config.remat.policy == "none" and no_scores
    activations = (megatron_activations_selective if selective else megatron_activations)(
        model, _tokens(config), tensor
    )
    return math.ceil(megatron_parameters(model, tensor) / tensor * state + activations)


def megatron_parameters(model: Architecture, tensor: int = 1) -> int:
    """Parameter count by Megatron-LM: no biases, routers or positions; 2 vectors per LayerNorm, 1 per RMSNorm."""
    D, norm = model.width, 2 if model.norm == "layernorm" else 1
    attention = 2 * D * model.head_dim * (model.heads + model.kv_heads)
    mlp = (3 if model.gated else 2) * D * model.mlp_width * max(model.experts, 1)
    embedding = D * _megatron_vocabulary(model, tensor)
    tables = 1 if model.tied_embeddings else 2
    return model.layers * (attention + mlp + 2 * norm * D) + norm * D + tables * embedding


def _megatron_vocabulary(model: Architecture, tensor: int) -> int:
    """Vocabulary size padded to a multiple of 128 on each tensor rank."""
    return model.vocab_size + -model.vocab_size % (128 * tensor)


def megatron_activations(model: Architecture, tokens: int, tensor: int) -> float:
    """Activation bytes without sequence parallelism or without selective recomputation, including its extra 5 %."""
    D = model.width
    outside = tokens * (8 + D) + 2 * tokens * (_megatron_vocabulary(model, tensor) / tensor + D)
    return 1.05 * (model.layers * megatron_layer(model, tokens, tensor) + outside)


def megatron_layer(model: Architecture, tokens: int, tensor: int) -> float:
    """Activation bytes of one layer by Megatron-LM's Table 2, which always assumes an MLP 4 times the model's width."""
    return tokens * model.width * (10 + 24 / tensor)


def megatron_activations_selective(model: Architecture, tokens: int, tensor: int) -> float:
    """Activation bytes with sequence parallelism and selective recomputation."""
    D, V = model.width, _megatron_vocabulary(model, tensor)
    layers = model.layers * tokens * (18 * D + 4 * model.mlp_width)
    return (layers + tokens * (8 + D) + 4 * tokens * (D + V)) / tensor


def cookbook(model: Architecture, config: Config, policy: str) -> Figure:
    """Estimate of the cookbook's calculator with its defaults, except `--num-mlp-linears=3` for gated MLPs."""
    optimizer, remat = config.optimizer.name, config.remat.policy
    if optimizer not in COOKBOOK_OPTIMIZERS:
        return Unknown(f"the cookbook's calculator has no {optimizer}")
    if policy == "bf16_pure":
        return Unknown("the cookbook's calculator has float32 master weights beside 16-bit ones")
    if remat not in ("none", "full"):
        return Unknown(f"the cookbook's calculator recomputes all or nothing, not {remat}")
    if config.optimizer.offload != "none":
        return Unknown("the cookbook's calculator supports no offload")
    axes = _unsupported_axes(config, "data", "replica", "tensor")
    if axes:
        return Unknown(f"the cookbook's calculator does not support {axes}")
    state = cookbook_state(
        cookbook_parameters(model, config.data.sequence_length),
        2 if policy in _MASTERS else 4,
        math.prod(mesh_lib.axis_sizes(config.mesh).values()),
        config.mesh.tensor,
        config.mesh.zero,
        optimizer,
    )
    sequences = _tokens(config) // config.data.sequence_length
    return math.ceil(state + cookbook_activations(model, sequences, config.data.sequence_length, remat == "full"))


# Optimizer bytes per parameter, including float32 weights, at any precision.
COOKBOOK_OPTIMIZERS = {"adam": 12, "adamw": 12, "muon": 8, "momentum": 8}


def cookbook_parameters(model: Architecture, length: int) -> float:
    """Parameter count by the cookbook: always two tables, learned positions, full-width queries and all experts."""
    D, L = model.width, model.layers
    attention = int(2 * (1 + model.kv_heads / model.heads) * L * D * D)
    mlp = (3 if model.gated else 2) * L * D * model.mlp_width * max(model.experts, 1)
    return 2 * model.vocab_size * D + D * length + 8 * D * L + 2 * D + attention + mlp


def cookbook_state(parameters: float, size: int, devices: int, tensor: int, stage: int, optimizer: str) -> float:
    """Returns bytes of weights, float32 gradients, optimizer state and communication buffers.

    Args:
      parameters: of the whole model.
      size: bytes of a compute weight.
      devices: of the whole run; ZeRO divides by all of them.
      tensor: tensor-parallel size; divides the weights only.
      stage: ZeRO stage.
      optimizer: a key of COOKBOOK_OPTIMIZERS.
    """
    weights = parameters * size / tensor / (devices if stage == 3 else 1)
    gradients = 4 * parameters / (devices if stage >= 2 else 1)
    moments = COOKBOOK_OPTIMIZERS[optimizer] * parameters / (devices if stage >= 1 else 1)
    buckets = 0.0
    if devices > 1:
        buckets = (5e8 if stage >= 1 else 0) + (1e9 if stage == 3 else 0)  # elements: gather bucket, live parameters
    return weights + gradients + moments + buckets * size


def cookbook_activations(model: Architecture, sequences: int, length: int, recompute: bool) -> float:
    """Activation bytes: 34 per token, layer and element of the width, plus 5 per score without recomputation."""
    D = model.width
    scores = 0 if recompute else 5 * model.heads * length
    return sequences * length * model.layers * (34 * D + scores)


ESTIMATORS: dict[str, Callable[[Architecture, Config, str], Figure]] = {
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "megatron": megatron,
    "cookbook": cookbook,
}
