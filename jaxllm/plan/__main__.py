"""The planner: python -m jaxllm.plan --model llama3-70b --task train --device h100 --count 64
or --task infer --device l4 [--count 2 --batch 8 --context 8192]; or --config FILE.py instead of --model.

Searches for the fastest run that fits. For training it chooses mesh, ZeRO stage, remat policy,
micro-batches, chunks and offloading; for inference, formats and batch size. Closed-form formulas evaluate every
candidate; with --confirm K, XLA also compiles the best K. Without --task it reports what both tasks would need.
"""

import difflib
import json
import math
import pathlib
from collections.abc import Sequence

import jax
from absl import flags
from rich.console import Console

from jaxllm import architectures, commandline
from jaxllm.checkpoints import open_any
from jaxllm.config import CHOICES, Config
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.hardware.detect import Device
from jaxllm.ledger.formula.exact import formats
from jaxllm.parallel import mesh
from jaxllm.plan import render, tasks
from jaxllm.plan.request import PlanRequest
from jaxllm.plan.training import base_config
from jaxllm.step.precision import policy_for

# Defaults of a run of a published model: tokens per step, and per sequence; less if the model's context is shorter.
BATCH_TOKENS = 2**20
LENGTH = 8192

_MODEL = flags.DEFINE_string("model", None, "Name of a published model (jaxllm.architectures).")
_TASK = flags.DEFINE_string("task", None, "train | infer | both.")
_DEVICE = flags.DEFINE_string("device", "auto", f"auto (this machine's) | {' | '.join(detect.DEVICES)}.")
_COUNT = flags.DEFINE_integer(
    "count", None, "Number of devices (default: that of config.mesh, all attached devices, or 1).", lower_bound=1
)
_TOKENS = flags.DEFINE_integer(
    "batch_tokens", None, f"train: tokens per step, all devices (default: about {BATCH_TOKENS:,}).", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "train: sequences per step; or --batch_tokens.", lower_bound=1)
_LENGTH = flags.DEFINE_integer(
    "sequence_length", None, f"train: tokens per sequence (default: {LENGTH:,}, or the model's context).", lower_bound=2
)
_OPTIMIZER = flags.DEFINE_string("optimizer", "adamw", f"train: {' | '.join(CHOICES['optimizer.name'])}.")
_PRECISION = flags.DEFINE_string(
    "precision", None, "train: search, or a precision.policy (default: the config's; bf16 on accelerators, else fp32)."
)
_MOMENTS = flags.DEFINE_string(
    "moment_dtype", None, "train: search | float32 | bfloat16 (default: the config's, or float32)."
)
_BATCH = flags.DEFINE_integer("batch", None, "infer: number of concurrent sequences (default: search).", lower_bound=1)
_CONTEXT = flags.DEFINE_integer(
    "context", None, f"infer: tokens per sequence (default: {LENGTH:,}, or the model's context).", lower_bound=1
)
_WEIGHTS = flags.DEFINE_string("weights", "search", f"infer: search | {' | '.join(formats.FORMATS)}.")
_CACHE = flags.DEFINE_string("cache", "search", f"infer: search | {' | '.join(formats.CACHE_FORMATS)}.")
_MARGIN = flags.DEFINE_float(
    "margin", 0.05, "Fraction of memory to leave free: the formulas' error.", lower_bound=0, upper_bound=0.9
)
_CONFIRM = flags.DEFINE_integer(
    "confirm", None, "Candidates to compile with XLA (default: 1 if it can compile for the device).", lower_bound=0
)
_TOP = flags.DEFINE_integer("top", 10, "Maximum number of candidates to show.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "train: write the best run to a file for --config.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object to standard output, and nothing else.")


def main() -> int:
    task = _one_of("task", _TASK.value or "both", ("train", "infer", "both"))
    is_file = bool(commandline.FLAGS["config"].present)
    if is_file == bool(_MODEL.value):
        raise UserError("give one of --model NAME and --config FILE.py; for instance --model llama3-8b")
    device = detect.by_name(_DEVICE.value)
    if device.memory_bytes is None:
        raise UserError(f"--device {_DEVICE.value}: the memory of {device.name} is unknown; name another device")
    config = _config_of_file() if is_file else _config_of_model(_MODEL.value or "")
    request = PlanRequest(
        config=config,
        model=architectures.resolve_config(config),
        file=commandline.config_file() if is_file else "",
        typed=commandline.config_overrides() if is_file else None,
        device_name=_DEVICE.value,
        device=device,
        count=_count(config if is_file else None),
        budget=int(device.memory_bytes * (1 - _MARGIN.value)),
        margin=_MARGIN.value,
        precisions=_precisions(config, device),
        moments=_moments(config),
        batch=_BATCH.value,
        context=_context(config),
        weights=_one_of("weights", _WEIGHTS.value, ("search", *formats.FORMATS)),
        cache=_one_of("cache", _CACHE.value, ("search", *formats.CACHE_FORMATS)),
        confirm=_CONFIRM.value,
        out=pathlib.Path(_OUT.value) if _OUT.value else None,
    )
    # With --json, standard output carries nothing but the JSON object.
    console = Console(quiet=_JSON.value, width=render.WIDTH if not Console().is_terminal else None)
    planners = {"train": tasks.plan_training, "infer": tasks.plan_inference, "both": tasks.plan_both}
    plan = planners[task](request, render.Output(console, _TOP.value))
    if _JSON.value:
        print(json.dumps(plan, indent=1))
    return 0


def _one_of(flag: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0.0)[0]
        raise UserError(f"--{flag} is {value!r}; did you mean {near!r}? Known: {', '.join(known)}")
    return value


def _config_of_file() -> Config:
    for flag in (_TOKENS, _BATCH_SIZE, _LENGTH):
        if flag.present:
            raise UserError(
                f"--{flag.name} goes with --model; with --config, override the fields of the file: "
                "--config.data.sequence_length, --config.train.batch_size"
            )
    if _OPTIMIZER.present:
        raise UserError("--optimizer goes with --model; with --config, override --config.optimizer.name")
    return open_any.resolved(commandline.load_config())


def _config_of_model(name: str) -> Config:
    optimizer = _one_of("optimizer", _OPTIMIZER.value, CHOICES["optimizer.name"])
    named = Config()
    named.model.name = name
    length = _LENGTH.value or min(architectures.resolve(named.model).context_length, LENGTH)
    count = _count(None)
    if _TOKENS.value and _BATCH_SIZE.value:
        raise UserError("give one of --batch_tokens and --batch_size")
    if _TOKENS.value and _TOKENS.value % length:
        near = max(round(_TOKENS.value / length), 1) * length
        raise UserError(
            f"--batch_tokens ({_TOKENS.value}) is not a multiple of --sequence_length ({length}); the nearest: {near}"
        )
    batch = _BATCH_SIZE.value or (_TOKENS.value or 0) // length
    # By default every device gets at least one sequence.
    batch = batch or max(-(-BATCH_TOKENS // length // count), 1) * count
    return base_config(name, length, batch, optimizer)


def _count(file: Config | None) -> int:
    if _COUNT.value:
        return _COUNT.value
    if file is not None:
        return math.prod(mesh.axis_sizes(file.mesh).values())
    return jax.device_count() if _DEVICE.value == "auto" else 1


def _precisions(config: Config, device: Device) -> tuple[str, ...]:
    policies = CHOICES["precision.policy"]
    wanted = _one_of("precision", _PRECISION.value or config.precision.policy, ("search", *policies))
    if wanted == "search":
        return ("fp32", "bf16") if device.platform == "cpu" else ("bf16", "bf16_pure", "fp32")
    return (policy_for(wanted, device.platform).name,)


def _moments(config: Config) -> tuple[str, ...]:
    dtypes = CHOICES["optimizer.moment_dtype"]
    wanted = _one_of("moment_dtype", _MOMENTS.value or config.optimizer.moment_dtype, ("search", *dtypes))
    return dtypes if wanted == "search" else (wanted,)


def _context(config: Config) -> int:
    model = architectures.resolve(config.model)
    context = _CONTEXT.value or min(model.context_length, LENGTH)
    if context > model.context_length and model.positions == "learned":
        raise UserError(
            f"--context is {context} and the model has {model.context_length} learned positions; give at most that many"
        )
    return context


if __name__ == "__main__":
    commandline.define_config()
    commandline.run(main)
