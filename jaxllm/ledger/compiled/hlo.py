"""Reads optimized HLO, the text of `compiled.as_text()`: computations and their instructions.

How often each of them runs is in `ledger.hlo_runs`; what they do is counted by `ledger.collectives` and
`ledger.products`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

# Bits of a number; XLA packs two of the 4-bit ones in a byte. token[] and opaque[] hold nothing.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        bits = _BITS[self.dtype] if self.dtype in _BITS else int(re.findall(r"\d+", self.dtype)[0])
        return -(-self.elements * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line.

    Attributes:
      name, opcode: as written, without the percent sign.
      type: of the result, as written: an array's, or a tuple's in parentheses.
      operands: names, in order; of constants and parameters the literal or number.
      attributes: all that follows the operands, as written.
      root: whether it is what its computation returns.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def shapes(self) -> list[Shape]:
        """Of the result; of a tuple, those of its leaves."""
        return shapes(self.type)

    def called(self, *attributes: str) -> list[str]:
        """Computations that these attributes name."""
        found = []
        for attribute in attributes:
            match = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
            found += re.findall(r"%?([\w.\-]+)", match[1]) if match else []
        return found


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in their order."""

    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
      header: its first line.
      computations: by name.
      entry: name of the one that runs.
    """

    header: str
    computations: Mapping[str, Computation]
    entry: str

    @property
    def devices(self) -> int:
        """Devices that it runs on together."""
        counts = dict(re.findall(r"\b(num_partitions|replica_count)=(\d+)", self.header))
        return math.prod(int(count) for count in counts.values())

    @property
    def aliased_parameters(self) -> frozenset[int]:
        """Arguments whose buffers an output takes over, by number: what donation came to."""
        match = re.search(r"input_output_alias=\{((?:[^{}]|\{[^{}]*\})*)\}", self.header)
        return frozenset(int(n) for n in re.findall(r":\s*\((\d+),", match[1])) if match else frozenset()


def shapes(text: str) -> list[Shape]:
    """Of an array's type, or of the leaves of a tuple's."""
    found = re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]", text)
    return [Shape(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)) for dtype, dims in found]


def parse(text: str) -> Module:
    """The program of an HLO text.

    Raises:
      ValueError: the text has no entry computation, or a line in a computation that is no instruction.
    """
    computations, entry, current = {}, "", None
    header = next((line for line in text.splitlines() if line.startswith("HloModule")), "")
    for line in text.splitlines():
        if match := _HEADER.match(line):
            current = Computation(match["name"], {})
            computations[current.name] = current
            entry = current.name if match["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and line.strip():
            instruction = _instruction(line)
            current.instructions[instruction.name] = instruction  # type: ignore[index]
    if not entry:
        raise ValueError("the HLO text has no ENTRY computation")
    return Module(header, computations, entry)


_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_START = re.compile(r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")


def _instruction(line: str) -> Instruction:
    line = re.sub(r"/\*.*?\*/", "", line)
    start = _START.match(line)
    if not start:
        raise ValueError(f"not an HLO instruction: {line.strip()[:80]!r}")
    rest = line[start.end() :]
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opcode, bracket, _ = rest.partition("(")
    if end < 0 or not bracket or not re.fullmatch(r"[\w\-]+", opcode):
        raise ValueError(f"not an HLO instruction: {line.strip()[:80]!r}")
    end = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : end - 1]
    names = tuple(re.findall(r"%([\w.\-]+)", inside))
    if not names and inside.strip():
        # Constants and parameters; and texts that are printed without percent signs.
        names = (inside.strip(),) if opcode in ("constant", "parameter") else tuple(re.split(r",\s*", inside))
    return Instruction(start["name"], opcode, result, names, rest[end:].lstrip(", "), bool(start["root"]))


def _closing(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`; brackets in quotes do not count."""
    depth, quoted, i = 0, False, start
    while i < len(text):
        letter = text[i]
        if letter == "\\" and quoted:
            i += 1
        elif letter == '"':
            quoted = not quoted
        elif not quoted:
            depth += (letter == "(") - (letter == ")")
            if not depth:
                return i + 1
        i += 1
    raise ValueError(f"an open bracket in {text[:80]!r}")
