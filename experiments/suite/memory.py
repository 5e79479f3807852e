"""Section e: peak memory by the ledger, by XLA and on the device, for ten training and inference configurations.

Each runs in a separate process, whose allocator allocates on demand and reports its peak.
"""

import concurrent.futures
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.hardware import detect
from jaxllm.ledger import bill
from jaxllm.ledger import device as device_lib
from jaxllm.ledger.compiled import inspection
from jaxllm.ledger.rows import Figure, Unknown, figure_to_json, format_bytes
from jaxllm.parallel.mesh import make_mesh
from suite import records, steps
from suite.records import Context, Record

# Training: model, tokens per sequence, sequences, optimizer, remat, micro-batches.
TRAINING = (
    ("gpt2", 1024, 8, "adamw", "none", 1),
    ("gpt2-medium", 1024, 8, "adamw", "full", 1),
    ("smollm2-135m", 2048, 4, "adamw", "dots", 1),
    ("smollm2-360m", 2048, 4, "lion", "full", 2),
    ("qwen2.5-0.5b", 1024, 8, "adafactor", "full", 1),
    ("llama3.2-1b", 2048, 2, "adamw", "full", 1),
)
# Inference: model, sequences, tokens of context, prompt tokens per prefill call.
INFERENCE = (
    ("llama3.2-1b", 1, 2048, 128),
    ("llama3.2-1b", 16, 4096, 128),
    ("qwen3-0.6b", 8, 4096, 256),
    ("gemma3-1b", 4, 8192, 128),
)
COUNT = len(TRAINING) + len(INFERENCE)
CONCURRENT_PROCESSES = 4  # processes; their total memory is far below a device's
_SECONDS = 60  # time limit per process
# Allocate on demand, so that processes can use the device concurrently.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def name_of(index: int) -> str:
    if index < len(TRAINING):
        model, length, batch, optimizer, remat, parts = TRAINING[index]
        return f"train {model} {batch} × {length}, {optimizer}, remat {remat}" + (f", {parts} parts" * (parts > 1))
    model, batch, context, chunk = INFERENCE[index - len(TRAINING)]
    return f"infer {model} {batch} × {context}, chunks of {chunk}"


def peak(device: jax.Device | None = None) -> Figure:
    return device_lib.peak_bytes(device)


def train(index: int, tiny: bool) -> dict[str, Any]:
    """Returns the formula's and XLA's peaks of a train step, and the device's before the first step and after two."""
    model, length, batch, optimizer, remat, parts = TRAINING[index]
    config = steps.configured(model, length, batch, remat, tiny)
    config.optimizer.name, config.train.accumulate = optimizer, parts
    training_run = steps.Run(config)
    training_run.initialize()
    before = peak()
    jax.block_until_ready([training_run.step_once() for _ in range(2)])
    ledger = bill.training(config, training_run.model, detect.this_machine())
    return figures(ledger.peak_bytes, inspection.figures(training_run.compiled)["peak"], before, peak())


def infer(index: int, tiny: bool) -> dict[str, Any]:
    """Returns the formula's and XLA's peaks of sampling, and the device's before prefill and after decode."""
    model_name, batch, context, chunk = INFERENCE[index - len(TRAINING)]
    config = steps.configured(model_name, 1, 1, "none", tiny)
    batch, context, chunk = (2, 64, 16) if tiny else (batch, context, chunk)
    model = architectures.resolve_config(config)
    sizes = inspection.SamplingSpec(batch, context, chunk, steps=8)
    task_programs = inspection.task_programs(config, model, jax.default_backend(), make_mesh(Config().mesh), sizes)
    executables = {name: program.compile() for name, program in task_programs.items()}
    params, state = (jax.jit(lambda tree=tree: filled(tree))() for tree in task_programs["prefill"].inputs[:2])
    jax.block_until_ready((params, state))
    before = peak()
    tokens = jnp.zeros((batch, chunk), jnp.int32)
    state = executables["prefill"](params, state, tokens, jnp.ones((batch, chunk), bool))
    jax.block_until_ready(executables["decode"](params, state, jnp.int32(8)))
    ledger = bill.sampling(model_name, model, detect.this_machine(), batch, context, chunk)
    peaks = [inspection.figures(executable)["peak"] for executable in executables.values()]
    unknown = [figure for figure in peaks if isinstance(figure, Unknown)]
    return figures(ledger.peak_bytes, unknown[0] if unknown else max(peaks), before, peak())


def filled(tree: Any) -> Any:
    """Returns zeros in the shapes of a tree, since values do not change sizes; PRNG keys are real keys."""

    def one(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), x.shape)
        return jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(one, tree)


def figures(formula: int, xla: Figure, before: Figure, after: Figure) -> dict[str, Any]:
    """Returns bytes by column, and `hidden`: creating the inputs had at least the programs' peak."""
    hidden = not isinstance(after, Unknown) and not isinstance(before, Unknown) and after <= before
    columns = {"formula": formula, "xla": xla, "before": before, "device": after}
    return {"bytes": {name: figure_to_json(x) for name, x in columns.items()}, "hidden": hidden}


def record(index: int, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a configuration's record: the device's peak in GiB, or the formula's if it reports none."""
    sizes = found["bytes"]
    known = {name: x for name, x in sizes.items() if isinstance(x, int) and name != "before"}
    beside = {name: x / 2**30 for name, x in known.items()}
    value = beside.pop("device", None)
    notes = [
        f"{name} {format_bytes(sizes[name])} ({sizes['formula'] / sizes[name] - 1:+.1%})"
        for name in ("xla", "device")
        if name in known
    ]
    notes += [f"device: {sizes['device']['unknown']}"] if isinstance(sizes["device"], dict) else []
    notes += ["the device's peak is that of creating the inputs"] if found["hidden"] else []
    return {
        "name": name_of(index),
        "value": beside["formula"] if value is None else value,
        "unit": "GiB",
        "beside": beside,
        "detail": found,
        "note": f"formula {format_bytes(sizes['formula'])}; formula against " + ", ".join(notes),
    }


def cell(context: Context, index: int) -> None:
    """Measures one configuration in this process."""
    make: Callable[[int, bool], dict[str, Any]] = train if index < len(TRAINING) else infer
    context.add(**record(index, make(index, context.tiny)))


def run(context: Context) -> None:
    """Measures all configurations, several processes at a time; if tiny, only the first of each kind."""
    indices = [0, len(TRAINING)] if context.tiny else list(range(COUNT))
    script = pathlib.Path(__file__).parent.parent / "gpu_suite.py"

    def one(index: int) -> None:
        allowed = context.left() if context.tiny else min(_SECONDS, context.left())
        if allowed < 5:
            context.add(name_of(index), note="skipped: no time is left")
            return
        command = [sys.executable, str(script), "--cell", str(index), "--records", str(context.path)]
        command += ["--seconds", str(allowed)] + ["--tiny"] * context.tiny
        begun = time.monotonic()
        try:
            child = subprocess.run(
                command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=allowed, check=False
            )
        except subprocess.TimeoutExpired:
            context.add(name_of(index), note=f"stopped after {time.monotonic() - begun:.0f} s")
            return
        if child.returncode:
            last = [line for line in child.stderr.splitlines() if line.strip()][-1:] or ["no output"]
            context.add(name_of(index), note=f"failed: {last[0]}"[:200])

    with concurrent.futures.ThreadPoolExecutor(CONCURRENT_PROCESSES) as pool:
        list(pool.map(one, indices))
    context.add("the formula against the device", **summary(records.read(context.path)))


def summary(found: Sequence[Record]) -> dict[str, Any]:
    """Returns a record's fields: median and range of the formula's relative error against the device's peaks, in %."""
    peaks = [record.detail["bytes"] for record in found if "bytes" in record.detail]
    gaps = sorted(100 * abs(x["formula"] / x["device"] - 1) for x in peaks if isinstance(x["device"], int))
    if not gaps:
        return {"note": "the device reports no peak"}
    middle = statistics.median(gaps)
    return {"value": middle, "unit": "% off", "low": gaps[0], "high": gaps[-1], "note": f"of {len(gaps)}, median"}
