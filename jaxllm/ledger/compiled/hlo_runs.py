"""How often each computation of an HLO text runs: the product of the trip counts of the loops around it.

A trip count is what XLA notes with the loop, or it is read off the loop's counter, where that is plain to see.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxllm.ledger.compiled.hlo import Computation, Instruction, Module

# Instructions that give their operand's number on.
_SAME = ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape", "opt-barrier")


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often a computation runs.

    Attributes:
      times: the product of the trip counts of the loops around it.
      unknown: loops around it whose trip count is not in the text: `times` is for one trip of each.
      conditional: whether a branch that need not be taken is around it: `times` is the most.
    """

    times: int
    unknown: tuple[str, ...]
    conditional: bool


class _Linear(NamedTuple):
    """slope · counter + offset."""

    slope: int
    offset: int


class _Scope(NamedTuple):
    """A computation, and what its parameters stand for in its caller."""

    computation: Computation
    caller: "_Scope | None" = None
    operands: tuple[str, ...] = ()


def runs(module: Module) -> dict[str, list[Runs]]:
    """Computation -> how often it runs, once for each place in its callers that differs in more than number.

    Computations that are applied to single numbers (of reductions, sorts, scatters) are not in it.
    """
    found: dict[str, dict[tuple[tuple[str, ...], bool], int]] = collections.defaultdict(collections.Counter)

    def visit(name: str, here: Runs) -> None:
        found[name][here.unknown, here.conditional] += here.times
        for instruction in module.computations[name].instructions.values():
            for callee, inner in _callees(module, name, instruction, here):
                visit(callee, inner)

    visit(module.entry, Runs(1, (), False))
    return {name: [Runs(times, *key) for key, times in by.items()] for name, by in found.items()}


def executed(module: Module) -> Iterator[tuple[Computation, Instruction, Runs]]:
    """Every instruction that runs, with how often."""
    for name, several in runs(module).items():
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            for here in several:
                yield computation, instruction, here


def _callees(module: Module, name: str, instruction: Instruction, here: Runs) -> Iterator[tuple[str, Runs]]:
    opcode = instruction.opcode
    if opcode == "while":
        trips = trip_count(module, module.computations[name], instruction)
        inner = dataclasses.replace(here, times=here.times * (1 if trips is None else trips))
        if trips is None:
            inner = dataclasses.replace(inner, unknown=(*here.unknown, instruction.name))
        callees = instruction.called("body")
    elif opcode == "conditional":
        inner = dataclasses.replace(here, conditional=True)
        callees = instruction.called("branch_computations", "true_computation", "false_computation")
    elif opcode == "call":
        inner, callees = here, instruction.called("to_apply")
    elif opcode in ("fusion", "async-start", "custom-call"):
        inner, callees = here, instruction.called("calls", "called_computations")
    else:
        return
    for callee in callees:
        yield callee, inner


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trips of a `while`; None where the text does not tell: a loop that ends by what it computes.

    Args:
      computation: where the loop stands.
    """
    known = re.search(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    condition = module.computations[loop.called("condition")[0]]
    body = module.computations[loop.called("body")[0]]
    for index in _counters(module, condition):
        first = _element(module, _Scope(computation), loop.operands[0], index)
        step = _element(module, _Scope(body), body.root.name, index, counter=index)
        limit = _limit(module, _Scope(condition), index)
        if first and step and limit and not first.slope and step.slope == 1 and step.offset > 0:
            return max(-(-(limit.offset - first.offset) // step.offset), 0)
    return None


def _counters(module: Module, condition: Computation) -> list[int]:
    """Elements of the loop's state that its condition reads."""
    reads = (i for i in condition.instructions.values() if i.opcode == "get-tuple-element")
    return [int(re.findall(r"index=(\d+)", i.attributes)[0]) for i in reads]


def _limit(module: Module, scope: _Scope, counter: int) -> _Linear | None:
    """n, where the condition is `counter < n`."""
    root = scope.computation.root
    while root.opcode in ("fusion", "call"):
        inner = module.computations[root.called("calls", "to_apply")[0]]
        scope = _Scope(inner, scope, root.operands)
        root = inner.root
    if root.opcode != "compare":
        return None
    direction = re.findall(r"direction=(\w+)", root.attributes)[0]
    left, right = (_value(module, scope, name, counter) for name in root.operands)
    if direction == "GT":
        left, right = right, left
    if direction not in ("LT", "GT") or left != _Linear(1, 0) or right is None or right.slope:
        return None
    return right


def _element(module: Module, scope: _Scope, name: str, index: int, counter: int | None = None) -> _Linear | None:
    """Element `index` of a tuple-shaped instruction."""
    instruction = scope.computation.instructions[name]
    if instruction.opcode == "tuple":
        return _value(module, scope, instruction.operands[index], counter)
    if instruction.opcode in _SAME:
        return _element(module, scope, instruction.operands[0], index, counter)
    return None


def _value(module: Module, scope: _Scope, name: str, counter: int | None) -> _Linear | None:
    """A number in terms of the loop's counter; None where it is none of the forms that loops are written in."""
    instruction = scope.computation.instructions[name]
    operands = instruction.operands
    if instruction.opcode == "constant":
        return _Linear(0, int(operands[0])) if re.fullmatch(r"-?\d+", operands[0]) else None
    if instruction.opcode in _SAME:
        return _value(module, scope, operands[0], counter)
    if instruction.opcode == "parameter" and scope.caller:
        return _value(module, scope.caller, scope.operands[int(operands[0])], counter)
    if instruction.opcode == "get-tuple-element":
        source = scope.computation.instructions[operands[0]]
        index = int(re.findall(r"index=(\d+)", instruction.attributes)[0])
        if source.opcode == "parameter" and not scope.caller:
            return _Linear(1, 0) if index == counter else None
        return _element(module, scope, source.name, index, counter)
    if instruction.opcode in ("add", "subtract"):
        left, right = (_value(module, scope, operand, counter) for operand in operands)
        if left is None or right is None:
            return None
        sign = 1 if instruction.opcode == "add" else -1
        return _Linear(left.slope + sign * right.slope, left.offset + sign * right.offset)
    if instruction.opcode in ("fusion", "call"):
        inner = module.computations[instruction.called("calls", "to_apply")[0]]
        return _value(module, _Scope(inner, scope, operands), inner.root.name, counter)
    return None
