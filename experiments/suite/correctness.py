"""Section a: checks the device's kernels against float64 with the tolerances of tests/kernels; ten repeats must match.

Long sequences are checked against the float32 reference on the device, at its highest matmul precision.
"""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import UserError
from jaxllm.kernels import reference
from jaxllm.kernels.decode import common as decode_common
from jaxllm.kernels.decode.api import decode_attention
from suite import exact, implementations, performance
from suite.cells import Cell, grid
from suite.records import Context, one_line

FLASH_LIMITS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
DECODE_LIMITS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
REPEATS = 10
BATCH, KEY_HEADS, WINDOW = 2, 2, 37
_WORST = 1e9  # replaces infinity, which JSON cannot represent
_CELL_SECONDS = 4  # reserved for one cell's float64 reference on the host
NAMES = ("output", "dq", "dk", "dv")

Attend = Callable[..., jax.Array]


def flash_arrays(cell: Cell) -> tuple[tuple[jax.Array, ...], np.ndarray, np.ndarray]:
    """Returns (q, k, v, d_out) and the segment ids of queries and keys, all 1 if the cell is not segmented."""
    (T, S), H = cell["lengths"], cell["head_dim"]
    generator = np.random.default_rng(T + S + H)
    shapes = [(BATCH, T, KEY_HEADS * cell["group"], H), *[(BATCH, KEY_HEADS, S, H)] * 2]
    arrays = tuple(jnp.asarray(generator.standard_normal(s), cell["dtype"]) for s in (*shapes, shapes[0]))
    of_keys = np.sort(generator.integers(0, 3, (BATCH, S)), 1) if cell["segmented"] else np.ones((BATCH, S), int)
    before = np.full((BATCH, max(T - S, 0)), 0 if cell["segmented"] else 1)
    of_queries = np.concatenate([before, of_keys], 1)[:, -T:]
    return arrays, of_queries.astype(np.int32), of_keys.astype(np.int32)


def flash_program(cell: Cell, attend: Attend) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted (q, k, v, d_out, *segments) -> output and gradients, and its arguments."""
    arrays, q_segments, k_segments = flash_arrays(cell)
    segments = (jnp.asarray(q_segments), jnp.asarray(k_segments)) if cell["segmented"] else ()
    options = {"causal": cell["causal"], "window": cell["window"], "softcap": cell["softcap"]}

    def run(q: Any, k: Any, v: Any, d_out: Any, *segments: Any) -> Any:
        out, pull = jax.vjp(
            lambda q, k, v: attend(q, k, v, *segments, **options, scale=cell["head_dim"] ** -0.5), q, k, v
        )
        return out, *pull(d_out)

    return jax.jit(run), (*arrays, *segments)


def flash_errors(cell: Cell, got: Iterable[Any]) -> dict[str, float]:
    """Returns the error of the output and of each gradient."""
    arrays, q_segments, k_segments = flash_arrays(cell)
    mask = exact.attention_mask(*cell["lengths"], cell["causal"], cell["window"])[None]
    mask = mask & (q_segments[:, :, None] == k_segments[:, None, :])
    want = exact.attention(*arrays, mask, cell["head_dim"] ** -0.5, cell["softcap"])
    return {name: exact.error(a, b) for name, a, b in zip(NAMES, got, want, strict=True)}


def decode_program(cell: Cell) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted (q, k, v, lengths, scales) -> output, and its arguments."""
    S, H, T = cell["slots"], cell["head_dim"], cell["tokens"]
    ring = cell["reach"] == "ring"
    lengths = [0, S + 1, 2 * S, max(S // 2, 1)] if ring else [0, S, max(S // 2, 1)]
    generator = np.random.default_rng(S + H)
    q = jnp.asarray(generator.standard_normal((len(lengths), T, KEY_HEADS * cell["group"], H)), cell["dtype"])
    k, v = (jnp.asarray(generator.standard_normal((len(lengths), KEY_HEADS, S, H)), cell["dtype"]) for _ in range(2))
    scales = {}
    if cell["int8"]:
        (k, k_scale), (v, v_scale) = decode_common.quantize(k), decode_common.quantize(v)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    options = {"window": decode_window(cell), "scale": H**-0.5, "softcap": cell["softcap"]}
    options |= {"capacity": 3 * S if ring else S, "platform": "gpu", "interpret": implementations.interpreted()}
    run = jax.jit(lambda q, k, v, lengths, scales: decode_attention(q, k, v, lengths, **scales, **options))
    return run, (q, k, v, jnp.asarray(lengths, jnp.int32), scales)


def decode_window(cell: Cell) -> int:
    """Returns the attention window of a decode cell, 0 for none; a ring is as long as its window."""
    return {"all": 0, "window": WINDOW, "ring": cell["slots"]}[cell["reach"]]


def decode_errors(cell: Cell, arguments: tuple[Any, ...], got: Any) -> dict[str, float]:
    q, k, v, lengths, scales = arguments
    k, v = (np.asarray(x, np.float64) for x in (k, v))
    if scales:
        k, v = (x * np.asarray(s, np.float64)[..., None] for x, s in zip((k, v), scales.values(), strict=True))
    want = exact.decode(q, k, v, np.asarray(lengths), decode_window(cell), cell["head_dim"] ** -0.5, cell["softcap"])
    return {"output": exact.error(got, want)}


def judge(
    context: Context,
    name: str,
    programs: dict[str, tuple[Cell, Any, tuple[Any, ...]]],
    errors: Callable[[Cell, tuple[Any, ...], Any], dict[str, float]],
    limits: dict[str, float],
    optional: bool = False,
) -> None:
    """Compiles and runs all cells; adds a record per dtype with worst error / limit (1 or less passes), and a total.

    Args:
      context: receives the records.
      name: of the kernel version.
      programs: (cell, jitted function, arguments) by label.
      errors: returns the errors of a cell's outputs, by name.
      limits: largest allowed error, by dtype.
      optional: a cell that the kernel refuses with a UserError, or that is skipped for lack of time, is not a failure.
    """
    begun = time.monotonic()
    lowered: dict[str, jax.stages.Lowered] = {}
    wrong: dict[str, str] = {}
    refused: list[str] = []
    right, left_out = 0, 0
    for label, (_, run, arguments) in programs.items():
        if context.left() < _CELL_SECONDS:
            left_out += 1
            continue
        try:
            lowered[label] = run.lower(*arguments)
        except Exception as error:  # a kernel that cannot be traced counts as wrong
            if optional and isinstance(error, UserError):
                refused.append(label)
            else:
                wrong[label] = one_line(error)
    compiled = performance.compile_all(lowered)
    worst: dict[str, tuple[float, str]] = {}
    for label, executable in compiled.items():
        cell, _, arguments = programs[label]
        if context.left() < _CELL_SECONDS:
            left_out += 1
            continue
        if isinstance(executable, Exception):
            wrong[label] = one_line(executable)
            continue
        try:
            fault, share = _cell(executable, cell, arguments, errors, limits[cell["dtype"]])
        except Exception as error:  # a device error; later cells may fail likewise
            wrong[label] = one_line(error)
            continue
        worst[cell["dtype"]] = max(worst.get(cell["dtype"], (0.0, "")), (share, label))
        if fault:
            wrong[label] = fault
        else:
            right += 1
    seconds = time.monotonic() - begun
    for dtype, (share, label) in worst.items():
        context.add(
            f"{name} {dtype}: worst error / limit",
            value=min(share, _WORST),
            unit="of limit",
            detail={"limit": limits[dtype], "cell": label},
            ok=share <= 1,
        )
    notes = [f"{seconds:.0f} s"]
    notes += [f"{len(refused)} not supported"] if refused else []
    notes += [f"{left_out} not run, no time was left"] if left_out else []
    notes += [f"{label}: {why}" for label, why in list(wrong.items())[:1]]
    context.add(
        f"{name}: cells that are right, and ten times the same",
        value=right,
        unit=f"of {len(programs) - len(refused)}",
        detail={"wrong": wrong, "refused": refused},
        note="; ".join(notes),
        ok=not wrong and (optional or (right > 0 and not left_out)),
    )


def _cell(executable: Any, cell: Cell, arguments: tuple[Any, ...], errors: Any, limit: float) -> tuple[str, float]:
    """Runs one cell; returns (a description of the fault or "", worst error / limit)."""
    first = jax.device_get(executable(*arguments))
    for _ in range(REPEATS - 1):
        again = jax.device_get(executable(*arguments))
        if any(a.tobytes() != b.tobytes() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)):
            return "repeats differ", float("inf")
    found = errors(cell, arguments, first)
    name, value = max(found.items(), key=lambda item: item[1])
    return ("" if value <= limit else f"{name} is off by {value:.2e}"), value / limit


def label(cell: Cell) -> str:
    return " ".join(f"{value}".replace(" ", "") for value in cell.values())


def flash(context: Context, name: str, attend: Attend, optional: bool = False) -> None:
    """Checks the grid of flash attention with one version of the kernels."""
    programs = {}
    for cell in grid("flash", context.tiny):
        programs[label(cell)] = (cell, *flash_program(cell, attend))
    judge(context, name, programs, lambda c, _, got: flash_errors(c, got), FLASH_LIMITS, optional)


def long_sequence(context: Context, length: int, window: int) -> None:
    """Checks output and gradients of a long bfloat16 causal sequence against the reference, chunked over queries."""
    H, N, K = 128, 4, 2
    keys = jax.random.split(jax.random.key(length), 4)
    shapes = [(1, length, N, H), *[(1, K, length, H)] * 2, (1, length, N, H)]
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    positions = jnp.arange(length)[None]
    rule = {"window": window, "scale": H**-0.5, "softcap": 0.0}

    def plain(q: Any, k: Any, v: Any) -> Any:
        places = (positions, positions, None, None)
        return reference.chunked_attention(q, k, v, *places, **rule, chunk=min(512, length))

    def both(function: Any, *arrays: Any) -> Any:
        out, pull = jax.vjp(function, *arrays[:3])
        return out, *pull(arrays[3])

    got = jax.jit(functools.partial(both, functools.partial(implementations.jaxllm_attention, causal=True, **rule)))(
        *arrays
    )
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(both, plain))(*(x.astype(jnp.float32) for x in arrays))
    found = {name: exact.error(a, np.asarray(b, np.float64)) for name, a, b in zip(NAMES, got, want, strict=True)}
    worst = max(found.values())
    context.add(
        f"flash, {length} tokens, window {window or 'none'}: worst error / limit",
        value=worst / FLASH_LIMITS["bfloat16"],
        unit="of limit",
        detail=found,
        ok=worst <= FLASH_LIMITS["bfloat16"],
    )


def run(context: Context) -> None:
    versions = implementations.jaxllm_versions(jax.devices()[0])
    flash(
        context,
        f"flash {implementations.TRITON}",
        functools.partial(implementations.jaxllm_attention, **versions.pop(implementations.TRITON)),
    )
    cells = grid("decode", context.tiny)
    judge(context, "decode", {label(c): (c, *decode_program(c)) for c in cells}, decode_errors, DECODE_LIMITS)
    for length, window in [(64, 0)] if context.tiny else [(8192, 0), (8192, 1000)]:
        act = functools.partial(long_sequence, context, length, window)
        context.attempt(f"flash, {length} tokens", 4 if context.tiny else 10, act, required=True)
    for name, version in versions.items():  # versions that are not the default
        flash(context, f"flash {name}", functools.partial(implementations.jaxllm_attention, **version), optional=True)
