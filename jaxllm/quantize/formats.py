"""Formats of quantized weights and the check that they fit a model."""

import dataclasses
import math

from jaxllm.config import Architecture
from jaxllm.errors import UserError

INT8, INT4, ASYMMETRIC = "int8", "int4", "asymmetric"
KINDS = (INT8, INT4, f"{INT4}-{ASYMMETRIC}")
CHANNEL = "channel"
GROUPS = (32, 64, 128)
# Rows of activations up to which a product reads the codes; for more, it dequantizes the matrix (`quantize.product`).
FEW_ROWS = 4
_DEFAULT_GROUP = {8: 0, 4: 128}


@dataclasses.dataclass(frozen=True)
class QuantFormat:
    """Format of a quantized matrix.

    Attributes:
      bits: Bits per weight, 8 or 4.
      group: Consecutive inputs of an output that share a scale; 0: all inputs.
      symmetric: True if a weight is scale · code; False if it is scale · code + offset, with an offset per group.
    """

    bits: int
    group: int
    symmetric: bool = True

    def group_size(self, inputs: int) -> int:
        """Returns the weights that share a scale, in a matrix with this number of inputs."""
        return self.group or inputs

    def divides(self, inputs: int) -> bool:
        """Returns whether groups, and bytes of two 4-bit codes, divide this number of inputs."""
        return inputs % self.group_size(inputs) == 0 and (self.bits == 8 or self.group_size(inputs) % 2 == 0)

    @property
    def name(self) -> str:
        """Name in the ledger's table of formats: "int8", "int8-64", "int4-64-asymmetric"; see `from_name`."""
        group = "" if self.group == _DEFAULT_GROUP[self.bits] else f"-{self.group or CHANNEL}"
        return f"int{self.bits}{group}{'' if self.symmetric else f'-{ASYMMETRIC}'}"


def parse(kind: str, group: str = "") -> QuantFormat:
    """Returns the format of the flags --quantize and --group.

    Args:
      kind: One of `KINDS`.
      group: 32 | 64 | 128 | channel; "" is the kind's default: channel for int8, 128 for int4.

    Raises:
      UserError: One of them is unknown.
    """
    if kind not in KINDS:
        raise UserError(f"--quantize is {kind!r}; supported formats are {', '.join(KINDS)}")
    bits = 8 if kind == INT8 else 4
    sizes = {str(size): size for size in GROUPS} | {CHANNEL: 0, "": _DEFAULT_GROUP[bits]}
    if group not in sizes:
        raise UserError(f"--group is {group!r}; supported sizes are {', '.join(map(str, GROUPS))} and {CHANNEL}")
    return QuantFormat(bits, sizes[group], not kind.endswith(ASYMMETRIC))


# Every format once, that of the default group first.
ALL = tuple(dict.fromkeys(parse(kind, group) for kind in KINDS for group in ("", *map(str, GROUPS), CHANNEL)))


def from_name(name: str) -> QuantFormat | None:
    """Returns the format with a `QuantFormat.name`; None if no quantized format has it."""
    return next((each for each in ALL if each.name == name), None)


def _inputs(model: Architecture) -> dict[str, int]:
    """Returns the number of inputs of each kind of matrix."""
    return {
        "the attention's query, key and value weights": model.width,
        "the attention's output weight": model.heads * model.head_dim,
        "the MLP's up weight": model.width,
        "the MLP's down weight": model.mlp_width,
    }


def divides(model: Architecture, fmt: QuantFormat) -> bool:
    """Returns whether a format's groups divide the inputs of all matrices of a model."""
    return all(map(fmt.divides, _inputs(model).values()))


def check(model: Architecture, fmt: QuantFormat) -> None:
    """Checks that a format divides the inputs of all matrices of a model, before any weight is read.

    Raises:
      UserError: It does not; the message names the weight, and the group sizes that divide the inputs of all matrices.
    """
    inputs = _inputs(model)
    for weight, size in inputs.items():
        if fmt.divides(size):
            continue
        fitting = [each for each in GROUPS if math.gcd(*inputs.values()) % each == 0]
        if fmt.bits == 8 or not any(each % 2 for each in inputs.values()):
            fitting.append(CHANNEL)  # type: ignore[arg-type]
        fix = f"give --group {' or '.join(map(str, fitting))}" if fitting else "quantize to int8 with --group channel"
        of = f"groups of {fmt.group}" if fmt.group else "pairs of 4-bit codes"
        raise UserError(f"{weight} has {size} inputs per output, which {of} do not divide; {fix}")
