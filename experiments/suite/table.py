"""The table of a suite's records, in 100 columns."""

import itertools
from collections.abc import Sequence

from suite.records import Record

WIDTH = 100
_MARK = {True: "ok", False: "WRONG", None: ""}


def number(value: float) -> str:
    """Three digits, or all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def spread(record: Record) -> str:
    """Half of the repeats' range, in per cent of the median."""
    if not record.repeats or record.low is None or record.high is None or not record.value:
        return ""
    return f"±{50 * (record.high - record.low) / record.value:.0f} %"


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width`, cut between words where they are; one line at least."""
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
    """Columns: what, figure with its spread, note; a heading for each section."""
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
