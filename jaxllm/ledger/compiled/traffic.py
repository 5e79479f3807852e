"""Bytes that a compiled program reads and writes in device memory, counted from its scheduled HLO.

XLA's `cost_analysis` is empty for programs compiled for absent GPUs, and it counts the body of a loop once. Here the
operands and results of every instruction are counted as often as it is executed. Arrays inside a fusion stay in
registers, and so do not count. Of an operand that a fusion only slices or gathers from, the slices count, and of one
that it updates in place, the update.

For programs of CPUs and GPUs. Those of TPUs nest fusions and have kernels that read one layer of a stack.
"""

import dataclasses
import re

from jaxllm.ledger.compiled import hlo
from jaxllm.ledger.compiled.hlo import Computation, ExecutionCount, Instruction, Module

# Instructions that move no data, or whose callees are counted instead.
_FREE = (
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "iota", "after-all", "opt-barrier"),
    *("while", "conditional", "call", "copy-done", "async-done", "async-update", "partition-id", "replica-id"),
)
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> operand that has the new elements
_ALIAS = re.compile(r"\{(\d*)\}:\s*\((\d+),")
_ARRAY = re.compile(r"\b[a-z]+\d*[a-z0-9]*\[[\d,<=]*\](?:\{[^{}]*\})?")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes moved in device memory.

    Attributes:
      read, written: Bytes of operands and of results.
      largest: (bytes, opcode, name) of the instructions that move the most, for messages.
    """

    read: int
    written: int
    largest: tuple[tuple[int, str, str], ...]

    @property
    def total(self) -> int:
        return self.read + self.written


def traffic(module: Module, per_iteration: bool = False) -> Traffic:
    """Counts the bytes of one run of a program.

    Instructions in branches of conditionals do not count; a loop with unknown trip count counts as one iteration.

    Args:
      module: The scheduled HLO of the compiled program.
      per_iteration: Counts only what is inside a loop with unknown trip count, as decoding of one token is.
    """
    fused = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "fusion"
        for name in instruction.called("calls")
    }
    reads = writes = 0
    moved: list[tuple[int, str, str]] = []
    for computation, instruction, executions in hlo.executed_instructions(module):
        if computation.name in fused or instruction.opcode in _FREE or not _counts(executions, per_iteration):
            continue
        read, written = (executions.count * size for size in _bytes(module, computation, instruction))
        reads, writes = reads + read, writes + written
        moved.append((read + written, instruction.opcode, instruction.name))
    return Traffic(reads, writes, tuple(sorted(moved, reverse=True)[:10]))


def _counts(executions: ExecutionCount, per_iteration: bool) -> bool:
    return not executions.conditional and bool(executions.unknown_loops) >= per_iteration


def _size(type_text: str) -> int:
    """Returns the bytes of the arrays of a type."""
    return sum(shape.bytes for shape in hlo.shapes(type_text))


def _bytes(module: Module, computation: Computation, instruction: Instruction) -> tuple[int, int]:
    """Returns (bytes read, bytes written) by one execution of an instruction."""
    operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    if instruction.opcode == "copy-start":
        # The result is a tuple of the destination, the source and a context.
        return _size(operands[0].type), _size(operands[0].type)
    if instruction.opcode in _SLICES:
        return _size(instruction.type), _size(instruction.type)
    if instruction.opcode in _UPDATES:
        update = _size(operands[_UPDATES[instruction.opcode]].type)
        return update, update
    if instruction.opcode == "fusion":
        return _fusion_bytes(module.computations[instruction.called("calls")[0]], instruction, operands)
    # A kernel that updates an operand in place writes a part of it, which the HLO does not say: it counts as nothing.
    aliases = {int(output or 0): int(operand) for output, operand in _ALIAS.findall(_aliasing(instruction))}
    written = sum(_size(text) for i, text in enumerate(_ARRAY.findall(instruction.type)) if i not in aliases)
    return sum(_size(x.type) for i, x in enumerate(operands) if i not in aliases.values()), written


def _aliasing(instruction: Instruction) -> str:
    found = re.search(r"output_to_operand_aliasing=\{((?:[^{}]|\{[^{}]*\})*)\}", instruction.attributes)
    return found[1] if found else ""


def _fusion_bytes(body: Computation, instruction: Instruction, operands: list[Instruction]) -> tuple[int, int]:
    parameters = {int(x.operands[0]): x for x in body.instructions.values() if x.opcode == "parameter"}
    updated = 0  # bytes of results that are operands updated in place, less the updates
    read = 0
    for index, operand in enumerate(operands):
        users = _users(body, parameters[index])
        if users and all(user.opcode in _SLICES and position == 0 for user, position in users):
            read += min(sum(_size(user.type) for user, _ in users), _size(operand.type))
        elif users and all(user.opcode in _UPDATES and position == 0 for user, position in users):
            for user, _ in users:
                size = _size(body.instructions[user.operands[_UPDATES[user.opcode]]].type)
                read += size
                updated += _size(user.type) - size
        else:
            read += _size(operand.type)
    return read, max(_size(instruction.type) - updated, 0)


def _users(body: Computation, value: Instruction) -> list[tuple[Instruction, int]]:
    """Returns the (user, operand index) pairs of a value, through bitcasts."""
    found = []
    for user in body.instructions.values():
        for position, name in enumerate(user.operands):
            if name == value.name and user.opcode != "parameter":
                found += _users(body, user) if user.opcode == "bitcast" else [(user, position)]
    return found
