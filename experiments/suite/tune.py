"""Section b, tiles: the fastest sizes for `kernels/flash/common.py` on this device, one kernel at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxllm.kernels.flash.common import Tile, Tiles, tiles_for
from suite import implementations, performance
from suite.records import Context, one_line

LENGTH, BATCH, WIDTH = 4096, 4, 2048
# Per kernel: queries, keys, warps, stages. Each kernel's current choice is tried too.
FORWARD = ((128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 4, 4), (64, 128, 4, 2))
DQ = ((64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 3), (64, 128, 8, 2))
DKV = ((64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (32, 128, 8, 2), (64, 128, 8, 2), (32, 32, 4, 3))
CHOICES = {"forward": FORWARD, "dq": DQ, "dkv": DKV}


def choices(kernel: str, now: Tile) -> list[Tile]:
    """Returns the tiles to try, the current one first."""
    return list(dict.fromkeys([now, *(Tile(*numbers) for numbers in CHOICES[kernel])]))


def sweep(context: Context, head_dim: int, best: Tiles, kernel: str) -> Tiles:
    """Times attention with each tile for one kernel, adds one record, and returns `best` with the fastest tile."""
    length, batch, width = (64, 1, 32) if context.tiny else (LENGTH, BATCH, WIDTH)
    backward, heads = kernel != "forward", width // head_dim
    now = getattr(best, kernel)
    every = choices(kernel, now)[: 2 if context.tiny else None]
    arguments = implementations.arrays(batch, length, heads, head_dim, True)
    programs, failed = {}, {}
    for tile in every:
        ours_in_it = implementations.jaxllm_causal(head_dim, tiles=dataclasses.replace(best, **{kernel: tile}))
        try:
            programs[str(tile)] = implementations.program(ours_in_it, backward).lower(*arguments)
        except Exception as error:  # exceeds a multiprocessor's resources, or unsupported layout
            failed[str(tile)] = one_line(error)
    seconds: dict[str, performance.Timing] = {}
    for name, executable in performance.compile_all(programs).items():
        if isinstance(executable, Exception):
            failed[name] = one_line(executable)
            continue
        try:
            seconds[name] = performance.measure(functools.partial(executable, *arguments), repeats=3)
        except Exception as error:
            failed[name] = one_line(error)
    if not seconds:
        context.add(f"tiles of {kernel}, head {head_dim}", note=f"failed: {failed}"[:200], detail={"failed": failed})
        return best
    flops = performance.attention_flops(batch, heads, length, head_dim, backward) / 1e12
    fastest = min(seconds, key=lambda name: seconds[name].median)
    tile = next(tile for tile in every if str(tile) == fastest)
    gain = f", {seconds[str(now)].median / seconds[fastest].median:.2f}× of now" if str(now) in seconds else ""
    context.add(
        f"tiles of {kernel}, head {head_dim}: best",
        unit="TFLOP/s",
        **seconds[fastest].rate(flops),
        detail={
            "best": dataclasses.asdict(tile),
            "now": dataclasses.asdict(now),
            "rates": {name: flops / x.median for name, x in seconds.items()},
            "failed": failed,
        },
        note=f"Tile({tile.queries}, {tile.keys}, {tile.warps}, {tile.stages}){gain}",
    )
    return dataclasses.replace(best, **{kernel: tile})


def run(context: Context) -> None:
    for head_dim in (16,) if context.tiny else (128, 64):
        best = tiles_for(implementations.TRITON, head_dim, jnp.bfloat16)
        for kernel in ("forward", "dkv") if context.tiny else CHOICES:
            chosen: list[Tiles] = []
            context.attempt(
                f"tiles of {kernel}, head {head_dim}",
                1 if context.tiny else 10,
                lambda head_dim=head_dim, best=best, kernel=kernel, chosen=chosen: chosen.append(
                    sweep(context, head_dim, best, kernel)
                ),
            )
            best = chosen[0] if chosen else best
    jax.clear_caches()
