"""Storage formats of weights and KV cache at inference, and their bytes per element.

| format | bytes per element | scales |
|---|---|---|
| fp32; bf16, fp16 | 4; 2 | none |
| int8; int8-32, -64, -128 | 1 | one fp16 per output; per group of so many inputs of an output |
| int4; int4-32, -64, -channel | 1/2, two in a byte | one fp16 per group of 128; of 32 or 64; per output |
| int4-asymmetric, … | 1/2 | and an fp16 offset beside each scale |

A quantized format (`jaxllm.quantize.formats`) applies to the matrices of layers. Embeddings, head, norms, biases and
the routers of experts stay in the compute dtype: 32 bits on a CPU, else 16. An int8 cache has one float32 scale for the
keys and one for the values of each token and head.
"""

import dataclasses
import math

from jaxllm.errors import UserError
from jaxllm.model.specs import ParamSpec
from jaxllm.quantize import formats as quantize_formats

# Stands for the format of the compute dtype.
AUTO = "auto"
INT8 = "int8"
SCALE_BYTES = 2
_CACHE_SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Format:
    """Storage format: bits per element and the grouping of quantization scales.

    Attributes:
      bits: Bits per element.
      scaled: Whether matrices are quantized, with scales.
      group: Consecutive inputs of an output that share a scale; 0: all inputs.
      asymmetric: Whether there is an offset beside each scale.
      rest: Bits per element of the arrays that are not quantized.
    """

    bits: int
    scaled: bool = False
    group: int = 0
    asymmetric: bool = False
    rest: int = 16

    def element_bytes(self, spec: ParamSpec) -> int:
        """Returns the bytes of one array, without its scales."""
        return spec.size * (self.bits if self.quantizes(spec) or not self.scaled else self.rest) // 8

    def scale_bytes(self, spec: ParamSpec) -> int:
        """Returns the bytes of one array's scales and offsets."""
        if not self.quantizes(spec):
            return 0
        inputs = math.prod(spec.shape[i] for i in spec.fan_in)
        groups = math.ceil(inputs / self.group) if self.group else 1
        return spec.size // inputs * groups * SCALE_BYTES * (2 if self.asymmetric else 1)

    def quantizes(self, spec: ParamSpec) -> bool:
        """Returns whether an array is quantized: a matrix of a layer, but not the router of experts."""
        return self.scaled and spec.role == "matrix" and spec.axes[-1] != "experts"


FORMATS = {
    "fp32": Format(32),
    "bf16": Format(16),
    "fp16": Format(16),
    **{each.name: Format(each.bits, True, each.group, not each.symmetric) for each in quantize_formats.ALL},
}
_LONG_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
CACHE_FORMATS = ("fp32", "bf16", "fp16", "int8")
# Bytes per element without scales, by format and by the long names of the dtypes.
ITEMSIZE = {name: FORMATS[_LONG_NAMES.get(name, name)].bits / 8 for name in (*FORMATS, *_LONG_NAMES)}


def by_name(name: str, platform: str = "") -> Format:
    """Returns the format with a given name, or with a dtype's long name.

    Args:
      name: The name.
      platform: cpu | gpu | tpu, whose compute dtype the arrays have that are not quantized; "" is 16 bits.

    Raises:
      UserError: The format is unknown; the message lists all formats.
    """
    short = _LONG_NAMES.get(name, name)
    if short not in FORMATS:
        raise UserError(f"{name!r} is not a weight format; supported formats are {', '.join(FORMATS)}")
    return dataclasses.replace(FORMATS[short], rest=32) if platform == "cpu" else FORMATS[short]


def cache_itemsize(name: str) -> tuple[int, int]:
    """Returns (bytes per cached element, bytes of the scale of one token's keys, or values, in one head).

    Raises:
      UserError: The format is unknown; the message lists all formats.
    """
    short = _LONG_NAMES.get(name, name)
    if short not in CACHE_FORMATS:
        raise UserError(f"{name!r} is not a KV cache format; supported formats are {', '.join(CACHE_FORMATS)}")
    return FORMATS[short].bits // 8, _CACHE_SCALE_BYTES if FORMATS[short].scaled else 0


def compute_itemsize(name: str, platform: str) -> int:
    """Returns the bytes per activation element for a weight format.

    That is 4 for fp32, and on a CPU with int weights; otherwise 2.
    """
    made = by_name(name)
    return 4 if made.bits == 32 or (made.scaled and platform == "cpu") else 2
