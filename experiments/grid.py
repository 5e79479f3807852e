"""Grid cells: training runs of published models, drawn with a fixed seed, that fit or nearly fit a device.

A draw picks a model, mesh, ZeRO stage, optimizer, precision, remat policy, attention and batch shape at random from
values in common use. Draws are skipped if the configuration's checks refuse them, or if state and saved activations,
which the ledger computes to the byte, are under 1 % or over 90 % of the device's memory.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.config import overrides as config_tree
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.ledger.formula import training_memory
from jaxllm.ledger.rows import BOUNDARY

SEED = 20261129
TARGETS = ("cpu", "h100", "v5e")
# Devices per run; on a CPU they are virtual, in one process.
COUNTS = {"cpu": (1, 1, 2, 4, 8), "h100": (1, 1, 2, 8, 8, 16, 64, 256, 1024), "v5e": (1, 1, 4, 8, 16, 64, 256)}
# Models of the first draw; adding one would change every draw.
_MODELS = (
    *("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-175b", "llama2-7b", "llama2-13b"),
    *("llama2-70b", "llama3-8b", "llama3-70b", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "llama3.2-1b"),
    *("llama3.2-3b", "mistral-7b", "mixtral-8x7b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"),
    *("qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"),
    *("qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "gemma2-2b", "gemma2-9b", "gemma2-27b", "gemma3-1b"),
    *("gemma3-4b", "gemma3-12b", "gemma3-27b", "smollm2-135m", "smollm2-360m", "smollm2-1.7b"),
)
# Largest parameter count per target: models trained on a CPU are small.
_LARGEST = {"cpu": 0.6e9, "h100": 200e9, "v5e": 80e9}
# Published memory of each device, bytes; the CPU's is that of an assumed machine.
MEMORY = {"cpu": 24 * 2**30, "h100": 80 * 10**9, "v5e": 16 * 10**9}
_OPTIMIZERS = ("adamw", "adamw", "adamw", "adam", "sgd", "momentum", "lion", "adafactor", "muon")
# CPU training mostly uses float32, since bfloat16 matmuls are slow there.
_POLICIES = {
    "cpu": ("fp32", "fp32", "fp32", "fp32", "fp32", "bf16"),
    "h100": ("bf16", "bf16", "bf16", "fp32", "fp16", "bf16_pure"),
    "v5e": ("bf16", "bf16", "bf16", "bf16", "bf16_pure", "fp32"),
}
_REMATS = (
    "full",
    "full",
    "full",
    "none",
    "dots",
    "sqrt",
    "names:attn_qkv,attn_context,resid_mid",
    "names:attn_context,mlp_up,mlp_gate",
    "names:resid_mid",
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """Training run on a number of devices of one kind.

    Attributes:
      name: target and number of the draw, such as `h100-00017`.
      target: one of TARGETS.
      config: the run's configuration.
    """

    name: str
    target: str
    config: Config


def overrides(config: Config) -> dict[str, Any]:
    """Returns the fields that differ from their defaults, by dotted path."""
    default = config_tree.field_paths(Config())
    return {path: value for path, value in config_tree.field_paths(config).items() if value != default[path]}


def configured(fields: dict[str, Any]) -> Config:
    """Returns the configuration with the given fields set; inverse of `overrides`."""
    config = Config()
    for path, value in fields.items():
        section, name = path.split(".")
        setattr(getattr(config, section), name, value)
    return config


def description(config: Config) -> str:
    """Returns a short description of a run: model, mesh, optimizer, precision, remat policy and micro-batch."""
    mesh, train = config.mesh, config.train
    rows = train.batch_size // (train.accumulate * mesh.replica * mesh.data)
    return (
        f"{config.model.name} r{mesh.replica} d{mesh.data} t{mesh.tensor} z{mesh.zero} {config.optimizer.name} "
        f"{config.precision.policy} {config.remat.policy} {rows}×{config.data.sequence_length} "
        f"acc {train.accumulate} chunks {train.attention_chunk}/{train.loss_chunk}"
    )


def platform(target: str) -> str:
    return "cpu" if target == "cpu" else detect.by_name(target).platform


def cells(target: str, count: int) -> Iterator[Cell]:
    """Yields the first `count` cells of a target; a smaller count yields a prefix of a larger one."""
    draw = random.Random(f"{SEED} {target}")
    made = 0
    for attempt in itertools.count():
        config = _draw(draw, target)
        if made < count and _is_possible(config, target):
            yield Cell(f"{target}-{attempt:05d}", target, config)
            made += 1
        if made == count:
            return


# Choices that differ for cells whose attention is computed by kernels.
_KERNEL_MODELS = ("gpt2", "gpt2-xl", "llama3-8b", "llama3.2-1b", "gemma2-2b", "gemma2-9b", "qwen3-0.6b", "qwen3-8b")
_KERNEL_COUNTS = {"h100": (1, 1, 2, 8, 8, 64), "v5e": (1, 4, 8, 16)}
_KERNEL_REMATS = (
    *("full", "none", "dots", "sqrt", "names:attn_context,attn_lse"),
    *("names:attn_qkv,attn_context,attn_lse,resid_mid", "names:attn_qkv,attn_context,attn_lse,mlp_up,mlp_gate"),
)


def kernel_cells(target: str, count: int) -> Iterator[Cell]:
    """Yields cells whose attention is computed by kernels, with no length × length array, from a separate draw."""
    draw = random.Random(f"{SEED} {target} kernels")
    made = 0
    for attempt in itertools.count():
        config = _draw(draw, target, _KERNEL_MODELS, _KERNEL_COUNTS[target], _KERNEL_REMATS)
        config.attention.implementation, config.train.attention_chunk = "pallas", 0
        if made < count and _is_possible(config, target):
            yield Cell(f"{target}-kernel-{attempt:05d}", target, config)
            made += 1
        if made == count:
            return


def _draw(
    draw: random.Random,
    target: str,
    models: Sequence[str] = _MODELS,
    counts: Sequence[int] = (),
    remats: Sequence[str] = _REMATS,
) -> Config:
    config = Config()
    config.model.name = draw.choice(models)
    count = draw.choice(counts or COUNTS[target])
    config.mesh.tensor = draw.choice([size for size in (1, 1, 1, 2, 4, 8) if count % size == 0])
    data_devices = count // config.mesh.tensor
    config.mesh.replica = draw.choice([size for size in (1, 1, 1, 1, 2) if data_devices % size == 0])
    config.mesh.data = data_devices // config.mesh.replica
    config.mesh.zero = draw.choice((0, 1, 2, 3)) if config.mesh.data > 1 else 0
    config.optimizer.name = draw.choice(_OPTIMIZERS)
    config.optimizer.moment_dtype = draw.choice(("float32", "float32", "float32", "bfloat16"))
    config.precision.policy = draw.choice(_POLICIES[target])
    config.remat.policy = draw.choice(remats)
    config.data.sequence_length = draw.choice(
        (128, 256, 512, 1024) if target == "cpu" else (512, 1024, 2048, 4096, 8192)
    )
    config.train.attention_chunk = draw.choice((0, 0, 128, 256, 512))
    config.train.loss_chunk = draw.choice((256, 512, 1024, 2048, 4096))
    config.train.accumulate = draw.choice((1, 1, 1, 2, 4, 8))
    config.attention.implementation = "xla"  # as the first draw was compiled; `kernel_cells` overrides it
    rows = draw.choice((1, 1, 2, 4, 8, 16))
    config.train.batch_size = rows * config.train.accumulate * config.mesh.replica * config.mesh.data
    return config


def _is_possible(config: Config, target: str) -> bool:
    try:
        model = architectures.resolve_config(config)
        ledger = training_memory.training(model, config, config.precision.policy, platform(target))
        kinds = ("activations", "gradient accumulator")
        known = ledger.persistent_bytes + sum(ledger.kind_bytes(kind, BOUNDARY) for kind in kinds)
        if ledger.parameters > _LARGEST[target] or not 0.01 < known / MEMORY[target] < 0.9:
            return False
    except UserError:
        return False
    return True
