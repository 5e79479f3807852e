"""Data model of a bill: rows of memory (bytes per device and live phase), their totals and number formatting.

Bytes are integers. An unavailable figure is an `Unknown` with the reason, never 0.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.ledger.formula.exact.shard_sizes import format_count

if TYPE_CHECKING:
    from jaxllm.ledger.formula.roofline import Roofline

# Phases in the order in which a step or a request runs. Rows of one phase are live together; PERSISTENT rows are live
# in all phases. HOST rows are in host memory and do not count toward device memory.
PERSISTENT = "persistent"
FORWARD = "forward"
BOUNDARY = "forward/backward boundary"
BACKWARD = "mid-backward"
UPDATE = "update"
PREFILL = "prefill"
DECODE = "decode"
HOST = "host memory"
PHASES = (PERSISTENT, FORWARD, BOUNDARY, BACKWARD, UPDATE, PREFILL, DECODE, HOST)

# Every kind of row -> its group in plots and comparisons.
KINDS: dict[str, str] = {
    "weights": "weights",
    "master weights": "weights",
    "gathered parameters": "weights",
    "gradients": "gradients",
    "gradient accumulator": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits and loss": "logits and loss",
    "logits": "logits and loss",
    "KV cache": "KV cache",
    "batch": "workspace",
    "state": "workspace",
    "decode state": "workspace",
    "tile padding": "workspace",
    "workspace": "workspace",
    "prefill workspace": "workspace",
    "decode workspace": "workspace",
}

# Power of 1000 -> SI prefix.
_PREFIXES = dict(enumerate(("µ", "m", "", "k", "M", "G", "T", "P", "E", "Z", "Y"), -2))


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Unavailable figure, with the reason."""

    why: str

    def __str__(self) -> str:
        return "unknown"


Figure = int | Unknown


class Row(NamedTuple):
    """One buffer, or group of buffers, that is live in one phase.

    Attributes:
      name: Name, unique within its phase.
      kind: One of KINDS.
      phase: One of PHASES; a buffer that is live in several phases has one row per phase.
      bytes_per_device: Bytes on one device.
      arithmetic: How the bytes are computed: a text, or (elements, bytes per element).
    """

    name: str
    kind: str
    phase: str
    bytes_per_device: int
    arithmetic: str | tuple[int, int]

    @property
    def derivation(self) -> str:
        """The arithmetic with its values: `8,030,261,248 / 8 × 4 B`.

        It is formatted on demand: a plan creates half a million rows and reads few of their formulas.
        """
        if isinstance(self.arithmetic, str):
            return self.arithmetic
        count, itemsize = self.arithmetic
        return f"{format_count(count)} × {itemsize} B"

    @property
    def formula(self) -> str:
        """The derivation and its result: `8,030,261,248 / 8 × 4 B = 3.74 GiB`."""
        return f"{self.derivation} = {format_bytes(self.bytes_per_device)}"


def array_row(name: str, kind: str, phase: str, count: int, itemsize: int) -> Row:
    """Creates a row of `count` elements of `itemsize` bytes; a `Count` shows its division in the formula."""
    return Row(name, kind, phase, count * itemsize, (count, itemsize))


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The bill of one task on one kind of device.

    Attributes:
      task: "train" or "infer".
      model: Name of the architecture.
      parameters: Number of parameters of the whole model.
      device: Name of the device.
      count: Number of devices.
      rows: Memory rows; see Row.
      capacity_bytes: Memory of one device in bytes; Unknown if no figure is available.
      compute: Work of one step or token and the least time it takes; None if the bill is of memory alone.
      trained: Number of parameters that training updates; None if nothing is trained.
      attention: One line naming the attention implementation and why it was chosen.
    """

    task: str
    model: str
    parameters: int
    device: str
    count: int
    rows: tuple[Row, ...]
    capacity_bytes: Figure = Unknown("no device was named")
    compute: "Roofline | None" = None
    trained: int | None = None
    attention: str = ""

    def __post_init__(self) -> None:
        unknown = [row for row in self.rows if row.kind not in KINDS or row.phase not in PHASES]
        assert not unknown, f"rows of an unknown kind or phase: {unknown}"

    @functools.cached_property
    def _sums(self) -> dict[str, int]:
        """Bytes per phase; phases without rows are absent."""
        sums: dict[str, int] = {}
        for row in self.rows:
            sums[row.phase] = sums.get(row.phase, 0) + row.bytes_per_device
        return sums

    def phase_bytes(self, phase: str) -> int:
        return self._sums.get(phase, 0)

    def kind_bytes(self, kind: str, phase: str = PERSISTENT) -> int:
        """Returns the bytes per device of the rows of a kind in a phase."""
        return sum(row.bytes_per_device for row in self.rows if row.kind == kind and row.phase == phase)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory per device."""
        return self.phase_bytes(HOST)

    @property
    def persistent_bytes(self) -> int:
        """Bytes on one device that stay live between steps; exact."""
        return self.phase_bytes(PERSISTENT)

    @property
    def peak_phase(self) -> str:
        """Phase with the most bytes, PERSISTENT and HOST excluded; PERSISTENT if there is no other."""
        elsewhere = (PERSISTENT, HOST)
        phases = [phase for phase in PHASES if phase not in elsewhere and phase in self._sums]
        return max(phases, key=self.phase_bytes, default=PERSISTENT)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on one device: persistent bytes plus those of the largest phase."""
        phase = self.peak_phase
        return self.persistent_bytes + (self.phase_bytes(phase) if phase != PERSISTENT else 0)

    def largest_rows(self, count: int) -> list[Row]:
        """Returns the `count` largest rows that are live at the peak, largest first."""
        alive = [row for row in self.rows if row.phase in (PERSISTENT, self.peak_phase) and row.bytes_per_device]
        return sorted(alive, key=lambda row: -row.bytes_per_device)[:count]

    @property
    def fits(self) -> bool | None:
        """True if the peak is within the device's memory; None if its capacity is unknown."""
        return None if isinstance(self.capacity_bytes, Unknown) else self.peak_bytes <= self.capacity_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the ledger JSON; `ledger.reconcile` fills in the columns other than the formula."""
        unknown = figure_to_json(Unknown("not measured: nothing was traced, compiled or run"))
        return {
            "task": self.task,
            "model": self.model,
            "parameters": self.parameters,
            **({} if self.trained is None else {"trained_parameters": self.trained}),
            "device": self.device,
            "count": self.count,
            "rows": [_row_to_json(row) for row in self.rows],
            "peak_bytes_per_device": self.peak_bytes,
            "capacity_bytes": figure_to_json(self.capacity_bytes),
            "fits": self.fits,
            "columns": {
                "formula": {"persistent": self.persistent_bytes, "peak": self.peak_bytes},
                **dict.fromkeys(("trace", "compiled", "device"), unknown),
            },
            "gaps": {},
            "compute": {} if self.compute is None else self.compute.to_json(),
            "attention": self.attention,
        }


def _row_to_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "kind": row.kind,
        "phase": row.phase,
        "bytes_per_device": row.bytes_per_device,
        "formula": row.formula,
    }


def figure_to_json(figure: Any) -> Any:
    """Converts an Unknown to {"unknown": why}; returns any other figure unchanged."""
    return {"unknown": figure.why} if isinstance(figure, Unknown) else figure


def figure_from_json(value: Any) -> Any:
    return Unknown(value["unknown"]) if isinstance(value, Mapping) else value


def format_bytes(count: Figure) -> str:
    """Formats bytes with a binary unit: 512 B, 4.00 KiB, 29.92 GiB."""
    if isinstance(count, Unknown):
        return str(count)
    size, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units:
        if abs(size) < 1024 or unit == units[-1]:
            break
        size /= 1024
    return f"{count:,} B" if unit == "B" else f"{size:,.2f} {unit}"


def format_si(value: float | Unknown, unit: str) -> str:
    """Formats a value with an SI prefix: 1.5 TFLOP/s, 819 GB/s, 4.8 ms."""
    if isinstance(value, Unknown):
        return str(value)
    power = 0
    # Values are shown with three digits, so 999.9 rounds to 1 of the next unit.
    while abs(value) >= 999.5 and power < max(_PREFIXES):
        value, power = value / 1000, power + 1
    while 0 < abs(value) < 0.9995 and power > min(_PREFIXES):
        value, power = value * 1000, power - 1
    return f"{value:.3g} {_PREFIXES[power]}{unit}"
