"""Parser of optimized HLO, the text of `compiled.as_text()`, into computations and instructions.

`ledger.compiled.hlo_runs` counts how often each computation runs; `ledger.compiled.collectives` and
`ledger.compiled.matmuls` count communication and FLOPs.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

# Bits per element of dtypes whose name does not give them (4-bit elements are packed two per byte).
# token[] and opaque[] are empty.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dtype and dimensions of one array."""

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
    """One HLO instruction, a line of the text.

    Attributes:
      name, opcode: As in the text, without the percent sign.
      type: Result type as in the text: that of an array, or of a tuple in parentheses.
      operands: Names of the operands, in order; the literal of a constant, the number of a parameter.
      attributes: Text after the operands, unparsed.
      root: True if its computation returns it.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of the result: one for an array, those of the leaves for a tuple."""
        return shapes(self.type)

    def called(self, *attributes: str) -> list[str]:
        """Returns the names of the computations that the given attributes refer to."""
        found = []
        for attribute in attributes:
            match = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
            found += re.findall(r"%?([\w.\-]+)", match[1]) if match else []
        return found


@dataclasses.dataclass(frozen=True)
class Computation:
    """One HLO computation: its instructions by name, in the order of the text."""

    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed HLO module.

    Attributes:
      header: The `HloModule` line.
      computations: Computations by name.
      entry: Name of the entry computation.
    """

    header: str
    computations: Mapping[str, Computation]
    entry: str

    @property
    def devices(self) -> int:
        """Number of devices that the program runs on: partitions × replicas."""
        counts = dict(re.findall(r"\b(num_partitions|replica_count)=(\d+)", self.header))
        return math.prod(int(count) for count in counts.values())

    @property
    def aliased_parameters(self) -> frozenset[int]:
        """Parameter numbers whose buffers an output aliases: the donations that XLA could use."""
        match = re.search(r"input_output_alias=\{((?:[^{}]|\{[^{}]*\})*)\}", self.header)
        return frozenset(int(n) for n in re.findall(r":\s*\((\d+),", match[1])) if match else frozenset()


def shapes(text: str) -> list[Shape]:
    """Returns the shape in an array type, or the shapes of the leaves in a tuple type."""
    found = re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]", text)
    return [Shape(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)) for dtype, dims in found]


def parse(text: str) -> Module:
    """Parses an HLO text.

    Raises:
      ValueError: The text has no entry computation, or a line of a computation is not an instruction.
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
        # Constants, parameters, and texts printed without percent signs.
        names = (inside.strip(),) if opcode in ("constant", "parameter") else tuple(re.split(r",\s*", inside))
    return Instruction(start["name"], opcode, result, names, rest[end:].lstrip(", "), bool(start["root"]))


def _closing(text: str, start: int) -> int:
    """Returns the index after the bracket that closes the first one from `start` on; quoted brackets do not count."""
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
