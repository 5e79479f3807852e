"""Parses optimized HLO, the text of `compiled.as_text()`, and counts how often each computation is executed.

A computation is executed as often as the product of the trip counts of its enclosing `while` loops. A trip count is
XLA's `known_trip_count`, or is derived from the loop's induction variable if its start, step and limit are constants.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Bits per element of dtypes whose name does not give them (4-bit elements are packed two per byte).
# token[] and opaque[] are empty.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
# Opcodes whose result has the value of their first operand.
_FORWARDING = ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape", "opt-barrier")
# Opcode -> attributes that name the computations that it calls.
_CALLED_BY = {
    "while": ("body",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply",),
    **dict.fromkeys(("fusion", "async-start", "custom-call"), ("calls", "called_computations")),
}
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|[^\s(]\S*) (?P<opcode>[\w\-]+)\("
)
_PARENTHESIS = re.compile(r'"(?:\\.|[^"\\])*"|[()]')


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

    @property
    def tuple_index(self) -> int:
        """Index of the element that a `get-tuple-element` returns."""
        return int(re.findall(r"index=(\d+)", self.attributes)[0])

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
        if match := _COMPUTATION.match(line):
            current = computations[match["name"]] = Computation(match["name"], {})
            entry = current.name if match["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and line.strip():
            instruction = _instruction(line)
            current.instructions[instruction.name] = instruction  # type: ignore[index]
    if not entry:
        raise ValueError("the HLO text has no ENTRY computation")
    return Module(header, computations, entry)


def _instruction(line: str) -> Instruction:
    line = re.sub(r"/\*.*?\*/", "", line)
    match = _INSTRUCTION.match(line)
    if not match:
        raise ValueError(f"not an HLO instruction: {line.strip()[:80]!r}")
    name, opcode, root = match["name"], match["opcode"], bool(match["root"])
    end = _closing(line, match.end() - 1)
    inside = line[match.end() : end - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    if not operands and inside.strip():
        # Constants, parameters, and texts printed without percent signs.
        operands = (inside.strip(),) if opcode in ("constant", "parameter") else tuple(re.split(r",\s*", inside))
    return Instruction(name, opcode, match["type"], operands, line[end:].lstrip(", "), root)


def _closing(text: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`; those in quotes do not count."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if not depth:
            return match.end()
    raise ValueError(f"an open bracket in {text[:80]!r}")


@dataclasses.dataclass(frozen=True)
class ExecutionCount:
    """How often a computation is executed in one run of the program.

    Attributes:
      count: Product of the trip counts of the enclosing loops.
      unknown_loops: Enclosing loops with unknown trip count; `count` includes one trip of each.
      conditional: True inside a branch of a conditional; `count` is then an upper bound.
    """

    count: int
    unknown_loops: tuple[str, ...]
    conditional: bool


def execution_counts(module: Module) -> dict[str, list[ExecutionCount]]:
    """Returns the counts per computation: one entry per combination of `unknown_loops` and `conditional`.

    Scalar computations (of reductions, sorts, scatters) are not included.
    """
    totals: dict[str, dict[tuple[tuple[str, ...], bool], int]] = collections.defaultdict(collections.Counter)

    def visit(name: str, count: int, unknown_loops: tuple[str, ...], conditional: bool) -> None:
        totals[name][unknown_loops, conditional] += count
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            trips = trip_count(module, computation, instruction) if instruction.opcode == "while" else 1
            unknown = unknown_loops if trips is not None else (*unknown_loops, instruction.name)
            in_branch = conditional or instruction.opcode == "conditional"
            for callee in instruction.called(*_CALLED_BY.get(instruction.opcode, ())):
                visit(callee, count * (1 if trips is None else trips), unknown, in_branch)

    visit(module.entry, 1, (), False)
    return {name: [ExecutionCount(count, *key) for key, count in by_key.items()] for name, by_key in totals.items()}


def executed_instructions(module: Module) -> Iterator[tuple[Computation, Instruction, ExecutionCount]]:
    """Yields every executed instruction with its computation and execution count."""
    for name, counts in execution_counts(module).items():
        for instruction in module.computations[name].instructions.values():
            for executions in counts:
                yield module.computations[name], instruction, executions


class _Affine(NamedTuple):
    """Affine function of a loop's induction variable: slope · variable + offset."""

    slope: int
    offset: int


class _Frame(NamedTuple):
    """A computation with the operands that its caller binds to its parameters."""

    computation: Computation
    caller: "_Frame | None" = None
    operands: tuple[str, ...] = ()


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a `while` in a computation; None if the loop depends on data or is not understood."""
    if known := re.search(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)', loop.attributes):
        return int(known[1])
    (condition,), (body,) = ([module.computations[n] for n in loop.called(part)] for part in ("condition", "body"))
    # The elements of the loop state that the condition reads may be the induction variable.
    for index in [i.tuple_index for i in condition.instructions.values() if i.opcode == "get-tuple-element"]:
        start = _value(module, _Frame(computation), loop.operands[0], None, index)
        step = _value(module, _Frame(body), body.root.name, index, index)
        limit = _limit(module, _Frame(condition), index)
        if start and step and limit and not start.slope and step.slope == 1 and step.offset > 0:
            return max(-(-(limit.offset - start.offset) // step.offset), 0)
    return None


def _limit(module: Module, frame: _Frame, variable: int) -> _Affine | None:
    """Returns n if the condition is `variable < n` (or `n > variable`) with constant n, else None."""
    root = frame.computation.root
    while root.opcode in ("fusion", "call"):
        frame = _Frame(module.computations[root.called("calls", "to_apply")[0]], frame, root.operands)
        root = frame.computation.root
    if root.opcode != "compare":
        return None
    left, right = (_value(module, frame, name, variable) for name in root.operands)
    direction = re.findall(r"direction=(\w+)", root.attributes)[0]
    if direction == "GT":
        left, right = right, left
    if direction not in ("LT", "GT") or left != _Affine(1, 0) or right is None or right.slope:
        return None
    return right


def _value(module: Module, frame: _Frame, name: str, variable: int | None, index: int | None = None) -> _Affine | None:
    """Returns a scalar, or element `index` of a tuple, as a function of the induction variable; None if unknown.

    The induction variable is element `variable` of the loop state.
    """
    instruction = frame.computation.instructions[name]
    operands = instruction.operands
    if instruction.opcode in _FORWARDING:
        return _value(module, frame, operands[0], variable, index)
    if index is not None:
        return _value(module, frame, operands[index], variable) if instruction.opcode == "tuple" else None
    if instruction.opcode == "constant":
        return _Affine(0, int(operands[0])) if re.fullmatch(r"-?\d+", operands[0]) else None
    if instruction.opcode == "parameter" and frame.caller:
        return _value(module, frame.caller, frame.operands[int(operands[0])], variable)
    if instruction.opcode == "get-tuple-element":
        source = frame.computation.instructions[operands[0]]
        if source.opcode == "parameter" and not frame.caller:
            return _Affine(1, 0) if instruction.tuple_index == variable else None
        return _value(module, frame, source.name, variable, instruction.tuple_index)
    if instruction.opcode in ("add", "subtract"):
        left, right = (_value(module, frame, operand, variable) for operand in operands)
        if left is None or right is None:
            return None
        sign = 1 if instruction.opcode == "add" else -1
        return _Affine(left.slope + sign * right.slope, left.offset + sign * right.offset)
    if instruction.opcode in ("fusion", "call"):
        callee = module.computations[instruction.called("calls", "to_apply")[0]]
        return _value(module, _Frame(callee, frame, operands), callee.root.name, variable)
    return None
