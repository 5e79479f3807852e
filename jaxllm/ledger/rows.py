"""The lines of a bill: what holds memory, how much on one device, and when it lives.

Bytes are integers. A figure that cannot be had is `Unknown` with the reason, never 0.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxllm.ledger.formula.exact.shard_sizes import told

# In the order a step or a request runs through them. Rows of a phase are alive together; those of
# PERSISTENT are alive in all of them. Rows of HOST are in the memory of the device's host, and no part of its own.
PERSISTENT = "persistent"
FORWARD = "forward"
BOUNDARY = "forward/backward boundary"
BACKWARD = "mid-backward"
UPDATE = "update"
PREFILL = "prefill"
DECODE = "decode"
HOST = "host memory"
PHASES = (PERSISTENT, FORWARD, BOUNDARY, BACKWARD, UPDATE, PREFILL, DECODE, HOST)

# Power of 1000 -> prefix of a decimal unit.
_PREFIXES = dict(enumerate(("µ", "m", "", "k", "M", "G", "T", "P", "E", "Z", "Y"), -2))


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A figure that is not there, and why."""

    why: str

    def __str__(self) -> str:
        return "unknown"


Figure = int | Unknown


@dataclasses.dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
      name: what it is; unique within its phase.
      kind: weights, master weights, gradients, optimizer, activations, …
      phase: one of PHASES; what lives in several has a row in each.
      bytes_per_device: on one device.
      formula: the arithmetic with its numbers, `8,030,261,248 / 8 × 4 B = 3.74 GiB`.
    """

    name: str
    kind: str
    phase: str
    bytes_per_device: int
    formula: str

    def __post_init__(self) -> None:
        assert self.phase in PHASES, self.phase

    def __getattr__(self, attribute: str) -> str:
        """The formula of a row of `row` or `numbers`, which is written when it is read for the first time."""
        if attribute != "formula" or "_arithmetic" not in self.__dict__:
            raise AttributeError(attribute)
        arithmetic = self.__dict__["_arithmetic"]
        if not isinstance(arithmetic, str):
            count, size = arithmetic
            arithmetic = f"{told(count)} × {size} B"
        written = f"{arithmetic} = {format_bytes(self.bytes_per_device)}"
        self.__dict__["formula"] = written
        return written


def row(name: str, kind: str, phase: str, formula: str, bytes_per_device: int) -> Row:
    """A row whose formula ends with its value.

    A plan makes half a million rows and reads a few, so the value is not put into words here.
    """
    assert phase in PHASES, phase
    made = object.__new__(Row)
    made.__dict__.update(name=name, kind=kind, phase=phase, bytes_per_device=bytes_per_device, _arithmetic=formula)
    return made


def numbers(name: str, kind: str, phase: str, count: int, size: int) -> Row:
    """A row of so many numbers of so many bytes each; where it is a `Count`, the formula has its division."""
    assert phase in PHASES, phase
    made = object.__new__(Row)
    made.__dict__.update(name=name, kind=kind, phase=phase, bytes_per_device=count * size, _arithmetic=(count, size))
    return made


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The bill of one task on one kind of device.

    Attributes:
      task: "train" or "infer".
      model: name of the architecture.
      parameters: of the whole model.
      device: name of the device.
      count: devices.
      rows: see Row.
      capacity_bytes: memory of one device; Unknown where nothing is known of the device.
      compute: JSON of `ledger.compute`: {"flops", "bytes", "roofline_seconds", "bound"}.
      trained: parameters that a training run updates, of all; None where nothing is trained.
      attention: which code computes it, and why, in a line.
    """

    task: str
    model: str
    parameters: int
    device: str
    count: int
    rows: tuple[Row, ...]
    capacity_bytes: Figure = Unknown("no device was named")
    compute: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trained: int | None = None
    attention: str = ""

    @functools.cached_property
    def _sums(self) -> dict[str, int]:
        """Phase -> bytes of its rows; phases without any are not there."""
        sums: dict[str, int] = {}
        for row in self.rows:
            sums[row.phase] = sums.get(row.phase, 0) + row.bytes_per_device
        return sums

    def phase_bytes(self, phase: str) -> int:
        return self._sums.get(phase, 0)

    def kind_bytes(self, kind: str, phase: str = PERSISTENT) -> int:
        """Bytes of a kind in a phase."""
        return sum(row.bytes_per_device for row in self.rows if row.kind == kind and row.phase == phase)

    @property
    def host_bytes(self) -> int:
        """In the host's memory, for each of its devices."""
        return self.phase_bytes(HOST)

    @property
    def persistent_bytes(self) -> int:
        """What lives between steps, on one device: exact."""
        return self.phase_bytes(PERSISTENT)

    @property
    def peak_phase(self) -> str:
        """The phase that needs most; PERSISTENT where there is no other."""
        elsewhere = (PERSISTENT, HOST)
        phases = [phase for phase in PHASES if phase not in elsewhere and phase in self._sums]
        return max(phases, key=self.phase_bytes, default=PERSISTENT)

    @property
    def peak_bytes(self) -> int:
        """Persistent bytes and those of the largest phase."""
        phase = self.peak_phase
        return self.persistent_bytes + (self.phase_bytes(phase) if phase != PERSISTENT else 0)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's memory; None where that is not known."""
        return None if isinstance(self.capacity_bytes, Unknown) else self.peak_bytes <= self.capacity_bytes

    def to_json(self) -> dict[str, Any]:
        """The ledger JSON. Columns other than the formula are filled in by `ledger.reconcile`."""
        unknown = figure_to_json(Unknown("not measured: nothing was traced, compiled or run"))
        return {
            "task": self.task,
            "model": self.model,
            "parameters": self.parameters,
            **({} if self.trained is None else {"trained_parameters": self.trained}),
            "device": self.device,
            "count": self.count,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "peak_bytes_per_device": self.peak_bytes,
            "capacity_bytes": figure_to_json(self.capacity_bytes),
            "fits": self.fits,
            "columns": {
                "formula": {"persistent": self.persistent_bytes, "peak": self.peak_bytes},
                **dict.fromkeys(("trace", "compiled", "device"), unknown),
            },
            "gaps": {},
            "compute": dict(self.compute),
            "attention": self.attention,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Ledger":
        """Inverse of `to_json`; sums and columns are made from the rows again."""
        return cls(
            task=value["task"],
            model=value["model"],
            parameters=value["parameters"],
            device=value["device"],
            count=value["count"],
            rows=tuple(Row(**row) for row in value["rows"]),
            capacity_bytes=figure_from_json(value["capacity_bytes"]),
            compute=dict(value["compute"]),
            trained=value.get("trained_parameters"),
            attention=value["attention"],
        )


def figure_to_json(figure: Any) -> Any:
    """A number as it is; an Unknown as {"unknown": why}."""
    return {"unknown": figure.why} if isinstance(figure, Unknown) else figure


def figure_from_json(value: Any) -> Any:
    return Unknown(value["unknown"]) if isinstance(value, Mapping) else value


def format_bytes(count: Figure) -> str:
    """In binary units, always named: 512 B, 4.00 KiB, 29.92 GiB."""
    if isinstance(count, Unknown):
        return str(count)
    size, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units:
        if abs(size) < 1024 or unit == units[-1]:
            break
        size /= 1024
    return f"{count:,} B" if unit == "B" else f"{size:,.2f} {unit}"


def format_si(value: float | Unknown, unit: str) -> str:
    """In decimal units: 1.5 TFLOP/s, 819 GB/s, 4.8 ms."""
    if isinstance(value, Unknown):
        return str(value)
    power = 0
    # Of three digits: 999.9 is 1 of the next unit.
    while abs(value) >= 999.5 and power < max(_PREFIXES):
        value, power = value / 1000, power + 1
    while 0 < abs(value) < 0.9995 and power > min(_PREFIXES):
        value, power = value * 1000, power - 1
    return f"{value:.3g} {_PREFIXES[power]}{unit}"
