"""Records of the suite's sections, and the text table of them.

A record is one JSON line, so that a killed section keeps its finished records.
"""

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WIDTH = 100  # columns of the table
_MARK = {True: "ok", False: "WRONG", None: ""}


@dataclasses.dataclass(frozen=True)
class Record:
    """Measurement or check: one row of the table.

    Attributes:
      section: the section that produced it.
      name: quantity and shapes measured.
      value: the figure, the median if repeated; None if there is none, with the reason in `note`.
      unit: unit of `value`, `low`, `high` and `beside`.
      low, high: smallest and largest of the repeats.
      repeats: number of repeats; 0 if not repeated.
      beside: other figures in the same unit, by name.
      detail: any other data.
      note: text shown in the table.
      ok: result of a check; None if nothing is checked.
    """

    section: str
    name: str
    value: float | None = None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    repeats: int = 0
    beside: Mapping[str, float] = dataclasses.field(default_factory=dict)
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    ok: bool | None = None


@dataclasses.dataclass(frozen=True)
class Context:
    """Arguments of a section, and the methods that add its records.

    Attributes:
      section: name of the section.
      tiny: small sizes for a CPU, with interpreted kernels.
      deadline: end of its time, on the clock of `time.monotonic`.
      path: file that receives the section's records.
    """

    section: str
    tiny: bool
    deadline: float
    path: pathlib.Path

    def left(self) -> float:
        """Returns the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def add(self, name: str, **fields: Any) -> None:
        """Appends a record to the file immediately."""
        line = json.dumps(dataclasses.asdict(Record(self.section, name, **fields)))
        with self.path.open("a") as out:
            out.write(line + "\n")

    def attempt(self, name: str, seconds: float, act: Callable[[], None], required: bool = False) -> bool:
        """Calls `act` if `seconds` are left; records a skip or failure and lets the section continue.

        Args:
          name: of the record.
          seconds: time that `act` may take.
          act: adds its own records.
          required: a skip or failure counts as a failed check.

        Returns:
          True if `act` completed.
        """
        ok = False if required else None
        if self.left() < seconds:
            left = max(self.left(), 0)
            self.add(name, note=f"skipped: it may take {seconds:.0f} s; {left:.0f} s are left", ok=ok)
            return False
        try:
            act()
        except Exception as error:  # from any library, down to the driver
            self.add(name, note=f"failed: {one_line(error)}", ok=ok)
            return False
        return True


def one_line(error: BaseException) -> str:
    """Returns an error as one line of at most 160 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def read(path: pathlib.Path) -> list[Record]:
    """Reads the records of a file, up to a line that was truncated by a kill."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(Record(**json.loads(line)))
        except ValueError:
            break
    return found


DOCUMENT = {
    "device": str,
    "platform": str,
    "driver": str,
    "jax": str,
    "python": str,
    "date": str,
    "tiny": bool,
    "seconds": (int, float),
    "correct": bool,
    "records": list,
}


def check(document: Mapping[str, Any]) -> None:
    """Validates the JSON document of a run.

    Raises:
      ValueError: a field is missing or invalid; the message names the first one.
    """
    for name, kind in DOCUMENT.items():
        if not isinstance(document.get(name), kind):
            raise ValueError(f"{name} is {document.get(name)!r}")
    fields = {field.name for field in dataclasses.fields(Record)}
    for row in document["records"]:
        if set(row) != fields:
            raise ValueError(f"fields of a record: {sorted(set(row) ^ fields)}")
        measured = row["value"] is not None
        if measured and not (isinstance(row["value"], (int, float)) and row["unit"]):
            raise ValueError(f"{row['name']}: a figure without a unit, or no number: {row['value']!r}")
        if not measured and not row["note"]:
            raise ValueError(f"{row['name']}: neither a figure nor why there is none")


def _number(value: float) -> str:
    """Formats a number with three significant digits, or as an integer from 1000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _spread(record: Record) -> str:
    """Formats half of the repeats' range as a percentage of the median; "" if not repeated."""
    if not record.repeats or record.low is None or record.high is None or not record.value:
        return ""
    return f"±{50 * (record.high - record.low) / record.value:.0f} %"


def _wrapped(text: str, width: int) -> list[str]:
    """Wraps text to lines of at most `width`, between words where possible; returns at least one line."""
    lines, line = [], ""
    for word in text.split():
        while len(word) > width:
            word, rest = word[:width], word[width:]
            lines, line = [*lines, line, word] if line else [*lines, word], ""
            word = rest
        if line and len(line) + 1 + len(word) > width:
            lines, line = [*lines, line], word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line] if line or not lines else lines


def table_lines(records: Sequence[Record]) -> list[str]:
    """Returns the table's lines: name, figure with spread, and note, with a heading per section."""
    what, figure = 40, 22
    note = WIDTH - what - figure - 4
    out = []
    for section, group in itertools.groupby(records, key=lambda record: record.section):
        out += ["", f"{section} ".ljust(WIDTH, "─")]
        for record in group:
            value = "–" if record.value is None else f"{_number(record.value)} {record.unit} {_spread(record)}"
            text = f"{_MARK[record.ok]} {record.note}".strip()
            columns = [_wrapped(record.name, what), _wrapped(value, figure), _wrapped(text, note)]
            for a, b, c in itertools.zip_longest(*columns, fillvalue=""):
                out.append(f"{a.ljust(what)}  {b.rjust(figure)}  {c}".rstrip())
    return out
