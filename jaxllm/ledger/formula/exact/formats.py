"""How many bytes a number takes at inference, by the format that it is stored in.

| format | bytes a number | scales |
|---|---|---|
| fp32; bf16, fp16 | 4; 2 | none |
| int8 | 1 | one fp16 for each output channel (Dettmers et al. 2022) |
| int8-128 | 1 | one fp16 for every 128 numbers of a channel |
| int4, int4-64, int4-32 | 1/2, two in a byte | one fp16 for every 128, 64 or 32 (GPTQ, Frantar et al. 2022; AWQ) |

Matrices, embeddings and the head are stored so; norms and biases stay in 16 bit, or in 32 where the format is fp32. Of
a cache in int8 each token has a float32 scale for its keys and one for its values, in each head.
"""

import dataclasses
import math

from jaxllm.errors import UserError
from jaxllm.model.specs import ParamSpec

# In the place of a format: the one that programs compute with.
AUTO = "auto"
INT8 = "int8"
SCALE_BYTES = 2
_CACHE_SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Format:
    """Attributes:
    bits: of a number.
    scaled: whether there are scales.
    group: consecutive inputs of a channel that share one; 0: all of them.
    """

    bits: int
    scaled: bool = False
    group: int = 0

    def numbers_bytes(self, spec: ParamSpec) -> int:
        """Of one array, without its scales."""
        return math.ceil(spec.size * self._bits(spec) / 8)

    def scale_bytes(self, spec: ParamSpec) -> int:
        """Of one array's scales."""
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
# Bytes of a number without its scales, by format and by the long names of the dtypes.
ITEMSIZE = {name: FORMATS[_LONG_NAMES.get(name, name)].bits / 8 for name in (*FORMATS, *_LONG_NAMES)}


def named(name: str) -> Format:
    """The format of a name, or of a dtype's long name.

    Raises:
      UserError: there is none; names them all.
    """
    short = _LONG_NAMES.get(name, name)
    if short not in FORMATS:
        raise UserError(f"{name!r} is no format of weights; choose one of {', '.join(FORMATS)}")
    return FORMATS[short]


def cache_itemsize(name: str) -> tuple[int, int]:
    """(bytes of a cached number, bytes of the scale of a token's keys, or values, in one head)."""
    short = _LONG_NAMES.get(name, name)
    if short not in CACHE_FORMATS:
        raise UserError(f"{name!r} is no format of a KV cache; choose one of {', '.join(CACHE_FORMATS)}")
    return FORMATS[short].bits // 8, _CACHE_SCALE_BYTES if FORMATS[short].scaled else 0


def compute_itemsize(name: str, platform: str) -> int:
    """Bytes of an activation where weights are of a format: 16 bit, or 32 for fp32 and on a CPU with int weights."""
    made = named(name)
    return 4 if made.bits == 32 or (made.scaled and platform == "cpu") else 2
