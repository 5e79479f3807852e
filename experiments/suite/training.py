"""Section d: MFU of the real train step for 1B-class models, by attention implementation."""

import functools
import time

import jax

from jaxllm import architectures
from jaxllm.hardware import detect
from jaxllm.ledger import bill
from jaxllm.step.precision import policy_for
from suite import performance, steps
from suite.records import Context

# Model, tokens per sequence, sequences, attention, remat; the most informative first. `least` is the policy that
# recomputes least among those that fit by the ledger.
RUNS = (
    ("llama3.2-1b", 2048, 8, "pallas", "least"),
    ("llama3.2-1b", 2048, 8, "pallas", "full"),
    ("llama3.2-1b", 2048, 8, "cudnn", "full"),
    ("llama3.2-1b", 2048, 8, "xla", "full"),
    ("gpt2-xl", 1024, 16, "pallas", "full"),
    ("gpt2-xl", 1024, 16, "xla", "full"),
    ("qwen3-1.7b", 4096, 4, "pallas", "full"),
)
SHARE = 0.85  # fraction of the device's memory that a run may use by the ledger


def policy(model: str, length: int, batch: int, attention: str, tiny: bool) -> str:
    """Returns the first remat policy of none, dots and full with which the run fits."""
    device = detect.this_machine()
    for name in ("none", "dots"):
        config = steps.configured(model, length, batch, name, tiny, attention)
        peak = bill.training(config, architectures.resolve_config(config), device).peak_bytes
        if device.memory_bytes is not None and peak <= SHARE * device.memory_bytes:
            return name
    return "full"


def measure(context: Context, model: str, length: int, batch: int, attention: str, remat: str) -> None:
    chosen = policy(model, length, batch, attention, context.tiny) if remat == "least" else remat
    config = steps.configured(model, length, batch, chosen, context.tiny, attention)
    begun = time.monotonic()
    made = steps.Run(config)
    seconds = time.monotonic() - begun
    made.initialize()
    timed = performance.measure(made.step_once)
    rate = made.tokens / timed.median
    length = config.data.sequence_length
    dtype = policy_for(config.precision.policy, jax.default_backend()).compute_dtype.name
    measured = performance.matmul_rate(context.tiny)
    shares = {"of a measured product": performance.utilisation(made.model, length, rate, measured)}
    published = detect.this_machine().peak(dtype)
    if published:
        shares["of the published peak"] = performance.utilisation(made.model, length, rate, published)
    mfu = ", ".join(f"{share:.1%} {name}" for name, share in shares.items())
    context.add(
        f"{model} {config.train.batch_size} × {length}, {attention}, remat {chosen}",
        unit="tokens/s",
        **timed.rate(made.tokens),
        detail={"mfu": shares, "step_seconds": timed.median, "compile_seconds": seconds, "product_flops": measured},
        note=f"MFU {mfu}; compiled in {seconds:.0f} s",
    )


def run(context: Context) -> None:
    longest, done = 1.0 if context.tiny else 25.0, set()
    for model, length, batch, attention, remat in RUNS[: 2 if context.tiny else None]:
        if (model, attention, remat) in done:
            continue
        done.add((model, attention, remat))
        before = context.left()
        act = functools.partial(measure, context, model, length, batch, attention, remat)
        context.attempt(f"{model} {attention} remat {remat}", 1.2 * longest, act)
        longest = max(longest, before - context.left())
        jax.clear_caches()
