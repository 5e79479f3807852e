"""PNG plot of a bill: memory by kind in each phase, and over a step or a request, against the capacity."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.ledger.report import groups
from jaxllm.ledger.rows import Ledger, Unknown, format_bytes

_INK, _QUIET, _LIMIT = "#16191d", "#5b6470", "#b3380b"
_WIDTH = 11.0  # inches, at 150 dpi
_TITLES = {"train": "Training", "infer": "Inference"}


def require() -> None:
    """Checks that Matplotlib is installed.

    Raises:
      UserError: Matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--png needs Matplotlib, which is not installed: pip install 'jaxllm[plots]'")


def write(ledgers: Sequence[Ledger], path: str) -> None:
    """Writes a PNG of the bills, one below the other, to `path`.

    Raises:
      UserError: Matplotlib is not installed.
    """
    figure = draw(ledgers)
    # Omit the Matplotlib version, so the same bill gives the same bytes.
    figure.savefig(path, format="png", dpi=150, metadata={"Software": None})


def draw(ledgers: Sequence[Ledger]) -> Any:
    """Returns a Matplotlib figure of the bills, one below the other.

    Raises:
      UserError: Matplotlib is not installed.
    """
    require()
    from matplotlib.figure import Figure  # optional dependency

    heights = [max(2.6, 0.52 * len(groups.phases(ledger)) + 1.3) for ledger in ledgers]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 1.25 * len(ledgers)), facecolor="white")
    total = figure.get_figheight()
    below = total
    for ledger, height in zip(ledgers, heights, strict=True):
        head = below
        below -= height + 1.25
        bottom, high = (below + 0.72) / total, (height - 0.5) / total
        _title(figure, ledger, head, total)
        _bars(figure.add_axes((0.185, bottom, 0.36, high)), ledger)
        _course(figure.add_axes((0.625, bottom, 0.355, high)), ledger)
    return figure


def _title(figure: Any, ledger: Ledger, head: float, total: float) -> None:
    what = f"{_TITLES[ledger.task]}: {ledger.model}, {ledger.count} × {ledger.device}"
    figure.text(0.02, (head - 0.34) / total, _cut(what, 90), fontsize=14, fontweight="bold", color=_INK)
    figure.text(0.02, (head - 0.62) / total, _verdict(ledger), fontsize=11, color=_colour(ledger))


def _verdict(ledger: Ledger) -> str:
    need, capacity = format_bytes(ledger.peak_bytes), ledger.capacity_bytes
    if isinstance(capacity, Unknown):
        return f"peak {need} on one device; whether that fits is unknown"
    fits = "fits" if ledger.fits else "does not fit"
    return f"{fits}: peak {need} of {format_bytes(capacity)} on one device"


def _colour(ledger: Ledger) -> str:
    return _QUIET if ledger.fits is None else "#08734f" if ledger.fits else _LIMIT


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _scale(ledger: Ledger) -> tuple[float, str, float | None]:
    """Returns (bytes of the axis's unit, its name, capacity in that unit or None if unknown)."""
    size, unit = (2**30, "GiB") if ledger.peak_bytes >= 2**29 else (2**20, "MiB")
    capacity = ledger.capacity_bytes
    return size, unit, None if isinstance(capacity, Unknown) else capacity / size


def _far(ledger: Ledger) -> bool:
    """Returns True if the capacity is above 8 times the peak; the bars would be too small beside it."""
    capacity = ledger.capacity_bytes
    return not isinstance(capacity, Unknown) and capacity > 8 * ledger.peak_bytes


def _name(phase: str) -> str:
    return phase.replace("backward boundary", "backward\nboundary")


def _narrow(phase: str) -> str:
    for sign in ("/", "-", " "):
        phase = phase.replace(sign, f"{sign.strip()}\n")
    return phase


def _bars(axes: Any, ledger: Ledger) -> None:
    size, unit, capacity = _scale(ledger)
    phases = groups.phases(ledger)
    shown = set()
    for i, phase in enumerate(phases):
        start = 0.0
        for group, count in phase.groups.items():
            label = None if group in shown else group
            shown.add(group)
            axes.barh(i, count / size, 0.62, start, color=groups.COLOURS[group], edgecolor="white", lw=0.5, label=label)
            start += count / size
        axes.annotate(f"{start:.3g}", (start, i), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(phases)), [_name(phase.name) for phase in phases])
    axes.invert_yaxis()
    most = max(phase.total for phase in phases) / size
    top = most if capacity is None or _far(ledger) else max(most, capacity)
    axes.set_xlim(0, top * 1.12)
    axes.set_title("by kind, in each phase", fontsize=10, color=_QUIET, loc="left")
    if capacity is not None and not _far(ledger):
        axes.axvline(capacity, color=_LIMIT, ls=(0, (4, 3)), lw=1.3)
    axes.set_xlabel(f"{unit} on one device")
    _plain(axes, "x")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.figure.legend(
        [handles[group] for group in groups.GROUPS if group in handles],
        [group for group in groups.GROUPS if group in handles],
        loc="lower left",
        bbox_to_anchor=(0.012, axes.get_position().y0 - 0.74 / axes.figure.get_figheight()),
        ncols=len(groups.GROUPS),
        frameon=False,
        fontsize=9,
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.3,
        borderaxespad=0,
    )


def _course(axes: Any, ledger: Ledger) -> None:
    size, unit, capacity = _scale(ledger)
    always, *rest = groups.phases(ledger)
    course = [always, *rest, always]
    totals = [phase.total / size for phase in course]
    edges = list(range(len(course) + 1))
    axes.stairs(totals, edges, fill=True, color="#0072b2", alpha=0.14, lw=0)
    axes.stairs(totals, edges, color="#0072b2", lw=2, baseline=None)
    axes.axhspan(0, always.total / size, color="#999999", alpha=0.25, lw=0)
    most = max(totals)
    far = _far(ledger)
    top = (most if capacity is None or far else max(most, capacity)) * 1.16
    for i, total in enumerate(totals):
        axes.annotate(f"{total:.3g}", (i + 0.5, total), (0, 3), textcoords="offset points", ha="center", fontsize=8.5)
    if capacity is not None and not far:
        axes.axhline(capacity, color=_LIMIT, ls=(0, (4, 3)), lw=1.3)
        axes.annotate(
            f"capacity {capacity:.4g}",
            (len(course), capacity),
            (-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=_LIMIT,
        )
    elif capacity is not None:
        axes.set_title(f"capacity {capacity:,.4g} {unit}, far above", fontsize=8.5, color=_LIMIT, loc="right")
    axes.set_ylim(0, top)
    axes.set_title("over a step" if ledger.task == "train" else "over a request", fontsize=10, color=_QUIET, loc="left")
    axes.set_xlim(0, len(course))
    names = ["before", *(phase.name for phase in rest), "after"]
    axes.set_xticks([i + 0.5 for i in range(len(course))], [_narrow(name) for name in names])
    axes.tick_params(axis="x", labelsize=8 if len(course) > 5 else 9)
    axes.set_ylabel(unit)
    _plain(axes, "y")


def _plain(axes: Any, grid: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c3c9d0")
    axes.grid(axis=grid, color="#e6e9ed", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET, labelcolor=_INK, length=0, labelsize=9)
