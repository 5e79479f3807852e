"""Section b: TFLOP/s of bfloat16 causal self-attention, ours compared with cuDNN's and JAX's kernels, by length."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from suite import implementations, performance
from suite.records import Context, one_line

TOKENS, WIDTH = 32768, 2048  # tokens per batch; width of all heads together
LENGTHS = (4096, 1024, 32768, 8192, 2048, 16384)  # in order of measurement
HEAD_DIMS = (128, 64)
# (batch, length, heads, head dimension, with the backward pass)
Shape = tuple[int, int, int, int, bool]
TINY_TOKENS, TINY_WIDTH, TINY_LENGTHS, TINY_HEADS = 64, 32, (64,), (16,)


def shapes(length: int, tiny: bool) -> list[Shape]:
    """Returns the shapes to measure at one length."""
    tokens, width = (TINY_TOKENS, TINY_WIDTH) if tiny else (TOKENS, WIDTH)
    head_dims = TINY_HEADS if tiny else HEAD_DIMS
    sizes = [(tokens // length, length, width // head_dim, head_dim) for head_dim in head_dims]
    return [(*size, backward) for size in sizes for backward in (False, True)]


def candidates(device: jax.Device, head_dim: int) -> dict[str, Any]:
    """Returns, by name, (True if the arrays are in our layout, function of `backward` that returns the attention)."""
    found: dict[str, Any] = {}
    for name, version in implementations.jaxllm_versions(device).items():
        found[f"ours {name}"] = (
            True,
            lambda _, version=version: implementations.jaxllm_causal(head_dim, **version),
        )
    for name in implementations.third_party_names(device):
        found[name] = (False, functools.partial(implementations.third_party, name, head_dim))
    return found


def lowered(shape: Shape) -> tuple[dict[str, jax.stages.Lowered], dict[str, str]]:
    """Returns the lowered programs of a shape, by name, and the errors of those that could not be traced."""
    _, length, _, head_dim, backward = shape
    programs, failed = {}, {}
    for name, (is_ours, make) in candidates(jax.devices()[0], head_dim).items():
        if name == "xla" and length > implementations.XLA_LENGTH:
            continue
        arguments = jax.eval_shape(functools.partial(implementations.arrays, *shape[:4], is_ours))
        try:
            programs[name] = implementations.program(make(backward), backward).lower(*arguments)
        except Exception as error:  # not available in this JAX or on this device
            failed[name] = one_line(error)
    return programs, failed


def compare(context: Context, shapes_: Sequence[Shape]) -> None:
    """Compiles the programs of some shapes in parallel, then times them one by one; adds one record per shape."""
    programs: dict[tuple[Shape, str], jax.stages.Lowered] = {}
    failed: dict[Shape, dict[str, str]] = {}
    for shape in shapes_:
        made, failed[shape] = lowered(shape)
        programs |= {(shape, name): program for name, program in made.items()}
    seconds: dict[Shape, dict[str, performance.Timing]] = {shape: {} for shape in shapes_}
    for (shape, name), executable in performance.compile_all(programs).items():
        if isinstance(executable, Exception):
            failed[shape][name] = one_line(executable)
            continue
        try:
            arguments = implementations.arrays(*shape[:4], name.startswith("ours"))
            seconds[shape][name] = performance.measure(functools.partial(executable, *arguments))
        except Exception as error:  # compiles but does not run
            failed[shape][name] = one_line(error)
    for shape in shapes_:
        context.add(**record(shape, seconds[shape], failed[shape]))


def record(shape: Shape, seconds: Mapping[str, performance.Timing], failed: Mapping[str, str]) -> dict[str, Any]:
    """Returns a record's fields: the rate of our fastest version, the others' rates, and its speedup over each."""
    batch, length, heads, head_dim, backward = shape
    fields: dict[str, Any] = {
        "name": f"{'forward + backward' if backward else 'forward'}, head {head_dim}, {batch} × {length}",
        "detail": {"failed": dict(failed), "seconds": {name: vars(timed) for name, timed in seconds.items()}},
    }
    best = min((x for x in seconds if x.startswith("ours")), key=lambda x: seconds[x].median, default=None)
    if best is None:
        return fields | {"note": f"failed: {dict(failed)}"[:200]}
    flops = performance.attention_flops(batch, heads, length, head_dim, backward) / 1e12
    others = {name: flops / timed.median for name, timed in seconds.items() if name != best}
    ratios = [f"{flops / seconds[best].median / rate:.2f}× {name}" for name, rate in others.items()]
    fields["detail"]["version"] = best
    fields["note"] = ", ".join([*ratios, *(f"no {name}" for name in failed)])
    return fields | {"unit": "TFLOP/s", "beside": others, **seconds[best].rate(flops)}


def run(context: Context) -> None:
    longest = 1.0 if context.tiny else 8.0
    for length in TINY_LENGTHS if context.tiny else LENGTHS:
        before = context.left()
        act = functools.partial(compare, context, shapes(length, context.tiny))
        context.attempt(f"attention over {length} tokens", 1.2 * longest, act)
        longest = max(longest, before - context.left())
