"""Counts how often each computation of an HLO module runs: the product of the trip counts of its enclosing loops.

A trip count is XLA's `known_trip_count`, or is derived from the loop's counter if its start, step and limit are
constants.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxllm.ledger.compiled.hlo import Computation, Instruction, Module

# Instructions that pass the value of their operand through.
_SAME = ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape", "opt-barrier")


@dataclasses.dataclass(frozen=True)
class Runs:
    """Number of times a computation runs, and what is unknown about it.

    Attributes:
      times: Product of the trip counts of the enclosing loops.
      unknown: Enclosing loops with unknown trip count; `times` counts one trip of each.
      conditional: True inside a branch of a conditional; `times` is then an upper bound.
    """

    times: int
    unknown: tuple[str, ...]
    conditional: bool


class _Linear(NamedTuple):
    """Linear function of a loop counter: slope · counter + offset."""

    slope: int
    offset: int


class _Scope(NamedTuple):
    """A computation with the operands that its caller binds to its parameters."""

    computation: Computation
    caller: "_Scope | None" = None
    operands: tuple[str, ...] = ()


def runs(module: Module) -> dict[str, list[Runs]]:
    """Returns the run counts per computation: one entry per combination of `unknown` and `conditional`.

    Scalar computations (of reductions, sorts, scatters) are not included.
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
    """Yields every executed instruction with its computation and run count."""
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
    """Returns the trip count of a `while`; None if it is not in the text, as for a data-dependent loop.

    Args:
      module: The program.
      computation: Computation that contains the loop.
      loop: The `while` instruction.
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
    """Returns the indices of the loop state elements that the loop condition reads."""
    reads = (i for i in condition.instructions.values() if i.opcode == "get-tuple-element")
    return [int(re.findall(r"index=(\d+)", i.attributes)[0]) for i in reads]


def _limit(module: Module, scope: _Scope, counter: int) -> _Linear | None:
    """Returns n if the condition is `counter < n` (or `n > counter`) with constant n, else None."""
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
    """Returns element `index` of a tuple-shaped instruction as a linear function of the counter, or None if unknown."""
    instruction = scope.computation.instructions[name]
    if instruction.opcode == "tuple":
        return _value(module, scope, instruction.operands[index], counter)
    if instruction.opcode in _SAME:
        return _element(module, scope, instruction.operands[0], index, counter)
    return None


def _value(module: Module, scope: _Scope, name: str, counter: int | None) -> _Linear | None:
    """Returns a scalar as a linear function of the loop counter; None if its form is not supported."""
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
