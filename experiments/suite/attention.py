"""Section b: TFLOP/s of causal self-attention in bfloat16, ours beside cuDNN's and JAX's own kernels, over lengths."""

import functools
from typing import Any

import jax

from suite import ours, rivals, timing, work
from suite.records import Context, told

TOKENS, WIDTH = 32768, 2048  # of a batch, and of all heads together
LENGTHS = (4096, 1024, 32768, 8192, 2048, 16384)  # the first are measured first
HEAD_DIMS = (128, 64)
TINY_TOKENS, TINY_WIDTH, TINY_LENGTHS, TINY_HEADS = 64, 32, (64,), (16,)


def shapes(tiny: bool) -> list[tuple[int, int, int, int, bool]]:
    """(batch, length, heads, head dimension, with the backward pass), the most telling first."""
    tokens, width = (TINY_TOKENS, TINY_WIDTH) if tiny else (TOKENS, WIDTH)
    lengths, head_dims = (TINY_LENGTHS, TINY_HEADS) if tiny else (LENGTHS, HEAD_DIMS)
    return [
        (tokens // length, length, width // head_dim, head_dim, backward)
        for length in lengths
        for head_dim in head_dims
        for backward in (False, True)
    ]


def candidates(device: jax.Device, head_dim: int) -> dict[str, Any]:
    """Name -> (whether the arrays are in our layout, function of `backward` that makes attention)."""
    found: dict[str, Any] = {}
    for name, version in ours.versions(device).items():
        found[f"ours {name}"] = (True, lambda _, version=version: ours.causal(head_dim, **version))
    for name in rivals.names(device):
        found[name] = (False, functools.partial(rivals.made, name, head_dim))
    return found


def lowered(shape: tuple[int, int, int, int, bool]) -> tuple[dict[str, jax.stages.Lowered], dict[str, str]]:
    """Programs of a shape, by name; and why others could not be traced."""
    _, length, _, head_dim, backward = shape
    programs, failed = {}, {}
    for name, (is_ours, make) in candidates(jax.devices()[0], head_dim).items():
        if name == "xla" and length > rivals.XLA_LENGTH:
            continue
        arguments = jax.eval_shape(functools.partial(rivals.arrays, *shape[:4], is_ours))
        try:
            programs[name] = rivals.program(make(backward), backward).lower(*arguments)
        except Exception as error:  # this JAX, or this device, has not got it
            failed[name] = told(error)
    return programs, failed


def compare(context: Context, shape: tuple[int, int, int, int, bool]) -> None:
    """One record of a shape: ours, the others beside, and how many times theirs it is."""
    batch, length, heads, head_dim, backward = shape
    programs, failed = lowered(shape)
    seconds: dict[str, timing.Timing] = {}
    for name, executable in timing.compile_all(programs).items():
        if isinstance(executable, Exception):
            failed[name] = told(executable)
            continue
        try:
            arguments = rivals.arrays(*shape[:4], name.startswith("ours"))
            seconds[name] = timing.measure(functools.partial(executable, *arguments))
        except Exception as error:  # it compiles, and does not run
            failed[name] = told(error)
    name = f"{'forward + backward' if backward else 'forward'}, head {head_dim}, {batch} × {length}"
    best = min((x for x in seconds if x.startswith("ours")), key=lambda x: seconds[x].median, default=None)
    if best is None:
        context.add(name, note=f"failed: {failed}"[:200], detail={"failed": failed})
        return
    flops = work.attention_flops(batch, heads, length, head_dim, backward) / 1e12
    others = {x: flops / seconds[x].median for x in seconds if x != best}
    context.add(
        name,
        unit="TFLOP/s",
        **seconds[best].rate(flops),
        beside=others,
        detail={
            "version": best,
            "seconds": {x: vars(timed) for x, timed in seconds.items()},
            "failed": failed,
        },
        note=", ".join(
            [f"{flops / seconds[best].median / rate:.2f}× {x}" for x, rate in others.items()]
            + [f"no {x}" for x in failed]
        ),
    )


def run(context: Context) -> None:
    longest = 4.0
    for shape in shapes(context.tiny):
        before = context.left()
        context.attempt(f"attention {shape}", 1.2 * longest, functools.partial(compare, context, shape))
        longest = max(longest, before - context.left())
