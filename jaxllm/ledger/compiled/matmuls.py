"""Counts the FLOPs of a program's matmuls from its HLO text.

XLA's cost analysis is unavailable for an absent GPU and counts the body of most loops once; this counts every trip.
Matrix-vector products that XLA rewrites as multiply and reduce are not matmuls in the text and are not counted; they
dominate decoding of one sequence on a TPU.
"""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.ledger.compiled.hlo import Computation, Instruction, Module, executed_instructions

# Custom calls without arithmetic.
_NO_MATMUL = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
)
_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """FLOPs and execution counts of a program's matmuls.

    Attributes:
      flops: Sum of 2 · M · N · K, batch dimensions included, times the number of executions.
      count: Total number of matmul executions.
      uncounted: Number of executions, by name, of operations that may contain a matmul and are not in `flops`.
      unknown_loops: Loops with unknown trip count, counted as one trip.
    """

    flops: int
    count: int
    uncounted: Mapping[str, int]
    unknown_loops: tuple[str, ...]


def count_matmuls(module: Module) -> Matmuls:
    """Counts the matmuls executed on one device, with all branches of conditionals."""
    flops = count = 0
    uncounted: collections.Counter[str] = collections.Counter()
    unknown: set[str] = set()
    for computation, instruction, executions in executed_instructions(module):
        if instruction.opcode not in ("dot", "convolution", "custom-call", "ragged-dot"):
            continue
        once = _flops(computation, instruction)
        if once is None:
            target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
            name = target[1] if target else instruction.opcode
            if name not in _NO_MATMUL:
                uncounted[name] += executions.count
            continue
        flops, count = flops + once * executions.count, count + executions.count
        unknown |= set(executions.unknown_loops)
    return Matmuls(flops, count, dict(uncounted), tuple(sorted(unknown)))


def _flops(computation: Computation, instruction: Instruction) -> int | None:
    """Returns the FLOPs of one execution, or None if the instruction is not a plain matmul."""
    attributes = instruction.attributes
    if instruction.opcode == "dot":
        contracted = [int(d) for d in re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)[0].split(",") if d]
    elif instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    elif any(f'custom_call_target="{name}"' in attributes for name in _GEMMS):
        gemm = _backend_config(attributes).get("gemm_backend_config", {})
        contracted = [int(d) for d in gemm.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])]
        if not contracted:
            return None
    else:
        return None
    left = computation.instructions[instruction.operands[0]].shapes[0]
    # The type of a GEMM may be a tuple of its output and a workspace.
    return 2 * instruction.shapes[0].elements * math.prod(left.dims[d] for d in contracted)


def _convolution_flops(computation: Computation, instruction: Instruction) -> int | None:
    """Returns the FLOPs of a convolution, the form in which the TPU compiler writes matmuls.

    Batch dimensions become padded and dilated spatial dimensions. Window positions on padding or between dilated
    elements do no work and are not counted.
    """
    labels = re.search(r"dim_labels=([a-z\d]+)_([a-z\d]+)->([a-z\d]+)", instruction.attributes)
    if not labels:
        return None
    left, right = (
        dict(zip(labels[i], computation.instructions[name].shapes[0].dims, strict=True))
        for i, name in ((1, instruction.operands[0]), (2, instruction.operands[1]))
    )
    result = dict(zip(labels[3], instruction.shapes[0].dims, strict=True))
    window = _window(instruction.attributes, len(labels[1]) - 2)
    batch_groups = re.search(r"batch_group_count=(\d+)", instruction.attributes)
    # The kernel's "i" dimension is already that of one feature group.
    flops = 2 * right["i"] * result["f"] * left["b"] // (int(batch_groups[1]) if batch_groups else 1)
    for i in range(len(labels[1]) - 2):
        size, stride, low, spread, dilation = (
            window["size"][i],
            *(window[k][i] for k in ("stride", "pad", "lhs", "rhs")),
        )
        at = np.arange(result[str(i)])[:, None] * stride - low + np.arange(size)[None, :] * dilation
        flops *= int(((at % spread == 0) & (at >= 0) & (at // spread < left[str(i)])).sum())
    return flops


def _window(attributes: str, dims: int) -> dict[str, list[int]]:
    """Parses `window={size=3x1 pad=1_1x0_0 …}` into one value per spatial dimension; "pad" is the low side."""
    text = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(re.findall(r"(\w+)=(\S+)", text[1])) if text else {}
    values = {}
    for key, name, default in (
        ("size", "size", "1"),
        ("stride", "stride", "1"),
        ("pad", "pad", "0_0"),
        ("lhs", "lhs_dilate", "1"),
        ("rhs", "rhs_dilate", "1"),
    ):
        parts = fields[name].split("x") if name in fields else [default] * dims
        values[key] = [int(part.split("_")[0]) for part in parts]
    return values


def _backend_config(attributes: str) -> Mapping[str, Any]:
    start = attributes.find("backend_config={")
    if start < 0:
        return {}
    return json.JSONDecoder().raw_decode(attributes, start + len("backend_config="))[0]
