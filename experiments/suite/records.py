"""What a section of the suite leaves: one record a figure, a line of JSON each, so that a section that is killed keeps
what it had."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Record:
    """One row of the table.

    Attributes:
      name: what was measured, of which shapes.
      value: the figure, a median where it was repeated; None where there is none, and `note` says why.
      unit: of `value`, `low`, `high` and `beside`.
      low, high: the least and the largest of the repeats.
      repeats: how many there were; 0 where nothing is repeated.
      beside: other figures of the same unit, by name.
      detail: anything else that is worth keeping.
      ok: whether a check held; None where nothing is checked.
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
    """What a section is given.

    Attributes:
      tiny: sizes for a CPU, kernels interpreted.
      deadline: of `time.monotonic`.
      path: where the section's records go.
    """

    section: str
    tiny: bool
    deadline: float
    path: pathlib.Path

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def add(self, name: str, **fields: Any) -> None:
        """Keeps a record, at once."""
        line = json.dumps(dataclasses.asdict(Record(self.section, name, **fields)))
        with self.path.open("a") as out:
            out.write(line + "\n")

    def attempt(self, name: str, seconds: float, act: Callable[[], None], required: bool = False) -> bool:
        """Does it where `seconds` are left; its failure is a record, and the section goes on.

        Args:
          required: not done is a check that does not hold.
        Returns:
          whether it was done.
        """
        ok = False if required else None
        if self.left() < seconds:
            left = max(self.left(), 0)
            self.add(name, note=f"skipped: it may take {seconds:.0f} s and {left:.0f} s are left", ok=ok)
            return False
        try:
            act()
        except Exception as error:  # of any library below, down to the driver
            self.add(name, note=f"failed: {told(error)}", ok=ok)
            return False
        return True


def told(error: BaseException) -> str:
    """An error in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:160]


def read(path: pathlib.Path) -> list[Record]:
    """The records of a file; the last line may have been cut off by a kill."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(Record(**json.loads(line)))
        except ValueError:
            break
    return found


HEAD = {
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
    """The JSON is what its readers expect.

    Raises:
      ValueError: names the first field that is not.
    """
    for name, kind in HEAD.items():
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
