"""Storage formats of weights and KV cache at inference, and their bytes per element.

| format | bytes per element | scales |
|---|---|---|
| fp32; bf16, fp16 | 4; 2 | none |
| int8 | 1 | one fp16 per output channel (Dettmers et al. 2022) |
| int8-128 | 1 | one fp16 per 128 elements of a channel |
| int4, int4-64, int4-32 | 1/2, two in a byte | one fp16 per 128, 64 or 32 elements (GPTQ, Frantar et al. 2022; AWQ) |

The format applies to matrices, embeddings and the head. Norms and biases stay in 16 bits, or in 32 if the format is
fp32. An int8 cache has one float32 scale for the keys and one for the values of each token and head.
"""

import dataclasses
import math

from jaxllm.errors import UserError
from jaxllm.model.specs import ParamSpec

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
      scaled: Whether there are scales.
      group: Consecutive inputs of a channel that share a scale; 0: all inputs.
    """

    bits: int
    scaled: bool = False
    group: int = 0

    def element_bytes(self, spec: ParamSpec) -> int:
        """Returns the bytes of one array, without its scales."""
        return math.ceil(spec.size * self._bits(spec) / 8)

    def scale_bytes(self, spec: ParamSpec) -> int:
        """Returns the bytes of one array's scales."""
        if not self.scaled or not spec.decays:
            return 0
        inputs = math.prod(spec.shape[i] for i in spec.fan_in) if spec.fan_in else spec.shape[-1]
        groups = math.ceil(inputs / self.group) if self.group else 1
        return spec.size // inputs * groups * SCALE_BYTES

    def _bits(self, spec: ParamSpec) -> int:
        return self.bits if spec.decays else max(self.bits, 16)


FORMATS = {
    "fp32": Format(32),
    "bf16": Format(16),
    "fp16": Format(16),
    "int8": Format(8, scaled=True),
    "int8-128": Format(8, scaled=True, group=128),
    "int4": Format(4, scaled=True, group=128),
    "int4-64": Format(4, scaled=True, group=64),
    "int4-32": Format(4, scaled=True, group=32),
}
_LONG_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
CACHE_FORMATS = ("fp32", "bf16", "fp16", "int8")
# Bytes per element without scales, by format and by the long names of the dtypes.
ITEMSIZE = {name: FORMATS[_LONG_NAMES.get(name, name)].bits / 8 for name in (*FORMATS, *_LONG_NAMES)}


def by_name(name: str) -> Format:
    """Returns the format with a given name, or with a dtype's long name.

    Raises:
      UserError: The format is unknown; the message lists all formats.
    """
    short = _LONG_NAMES.get(name, name)
    if short not in FORMATS:
        raise UserError(f"{name!r} is not a weight format; supported formats are {', '.join(FORMATS)}")
    return FORMATS[short]


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
