"""Text table of the suite's records, 100 columns wide."""

import itertools
from collections.abc import Sequence

from suite.records import Record

WIDTH = 100
_MARK = {True: "ok", False: "WRONG", None: ""}


def number(value: float) -> str:
    """Formats a number with three significant digits, or as an integer from 1000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def spread(record: Record) -> str:
    """Formats half of the repeats' range as a percentage of the median; "" if not repeated."""
    if not record.repeats or record.low is None or record.high is None or not record.value:
        return ""
    return f"±{50 * (record.high - record.low) / record.value:.0f} %"


def wrapped(text: str, width: int) -> list[str]:
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


def lines(records: Sequence[Record]) -> list[str]:
    """Returns the table's lines: name, figure with spread, and note, with a heading per section."""
    what, figure = 40, 22
    note = WIDTH - what - figure - 4
    out = []
    for section, group in itertools.groupby(records, key=lambda record: record.section):
        out += ["", f"{section} ".ljust(WIDTH, "─")]
        for record in group:
            value = "–" if record.value is None else f"{number(record.value)} {record.unit} {spread(record)}"
            told = f"{_MARK[record.ok]} {record.note}".strip()
            columns = [wrapped(record.name, what), wrapped(value, figure), wrapped(told, note)]
            for a, b, c in itertools.zip_longest(*columns, fillvalue=""):
                out.append(f"{a.ljust(what)}  {b.rjust(figure)}  {c}".rstrip())
    return out
