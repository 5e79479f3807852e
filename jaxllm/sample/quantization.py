"""Quantization flags of `sample`: format, group size, method and calibration text."""

import dataclasses
import pathlib

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jaxllm.config import Architecture
from jaxllm.config.inference_mesh import InferenceMesh
from jaxllm.decode import weights
from jaxllm.engine.weights import InferenceWeights, load_weights
from jaxllm.errors import UserError
from jaxllm.interop.pretrained import Pretrained
from jaxllm.interop.tokenizer import Tokenizer
from jaxllm.ledger.formula.exact.formats import AUTO
from jaxllm.quantize import calibrate, formats
from jaxllm.quantize.formats import QuantFormat

_METHODS = (calibrate.GPTQ, calibrate.AWQ)
NAMES = (*formats.KINDS, *(f"{method}-{kind}" for method in _METHODS for kind in formats.KINDS[1:]))
GROUPS = (*map(str, formats.GROUPS), formats.CHANNEL)
# Calibration text: at most so many sequences, of so many tokens or the model's context. GPTQ's paper has 128 of 2,048.
_SEQUENCES, _LENGTH = 32, 512


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Quantization that the flags ask for; the default is none.

    Attributes:
      fmt: Format of the matrices; None does not quantize.
      method: One of `calibrate.METHODS`.
      text: Path of the calibration text.
    """

    fmt: QuantFormat | None = None
    method: str = calibrate.NEAREST
    text: pathlib.Path | None = None

    @property
    def name(self) -> str:
        """Name of the format in the ledger."""
        return AUTO if self.fmt is None else self.fmt.name

    def check(self, model: Architecture, sizes: InferenceMesh) -> None:
        """Checks, before any weight is read, that a model can be quantized so.

        Raises:
          UserError: It cannot.
        """
        if self.fmt is None:
            return
        if sizes.count > 1:
            raise UserError(f"--quantize does not support several devices yet; leave out --mesh {sizes}, or --quantize")
        weights.check_quantization(model, weights.layout_for(jax.default_backend()), self.fmt)
        if self.method != calibrate.NEAREST and model.experts:
            raise UserError(f"--quantize {self.method}-… does not support models with experts; give int8 or int4")

    def load(self, opened: Pretrained, dtype: jax.typing.DTypeLike, mesh: Mesh | None) -> InferenceWeights:
        """Loads a model's weights and quantizes them.

        Raises:
          UserError: The weights or the calibration text cannot be used.
        """
        tokens = None
        if self.text is not None:
            assert opened.text.tokenizer is not None, "sampling needs a tokenizer"
            tokens = calibration_tokens(self.text, opened.text.tokenizer, opened.model)
        return load_weights(opened, dtype, mesh, self.fmt, self.method, tokens)


def parse(name: str | None, group: str, calibration: str | None) -> Quantization:
    """Returns the quantization of the flags --quantize, --group and --calibration.

    Raises:
      UserError: A value is unknown, or they do not fit together.
    """
    if name is None:
        for flag, value in (("group", group), ("calibration", calibration)):
            if value:
                raise UserError(f"--{flag} goes with --quantize; add --quantize=int4, or leave --{flag} out")
        return Quantization()
    if name not in NAMES:
        raise UserError(f"--quantize is {name!r}; supported values are {', '.join(NAMES)}")
    method, _, kind = name.partition("-") if name.startswith(_METHODS) else ("", "", name)
    fmt = formats.parse(kind, group)
    if not method:
        if calibration:
            raise UserError("--calibration goes with gptq and awq; leave it out, or give --quantize=gptq-int4")
        return Quantization(fmt)
    path = pathlib.Path(calibration).expanduser() if calibration else None
    if path is None or not path.is_file():
        found = f"{path} is not a file" if path else "none is given"
        raise UserError(f"--quantize {name} needs a text for --calibration, and {found}; give a file of typical text")
    return Quantization(fmt, method, path)


def calibration_tokens(path: pathlib.Path, tokenizer: Tokenizer, model: Architecture) -> Int[np.ndarray, "N T"]:
    """Returns the beginning of a text as sequences of equal length.

    Raises:
      UserError: The text is not UTF-8, or has fewer tokens than one sequence.
    """
    length = min(_LENGTH, model.context_length)
    try:
        text = path.read_text("utf-8")[: _SEQUENCES * length * 16]  # tokens are rarely longer than 16 characters
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--calibration {path}: not a readable UTF-8 text ({error})") from error
    ids = np.asarray(tokenizer.encode(text), np.int32)[: _SEQUENCES * length]
    count = len(ids) // length
    if not count:
        raise UserError(f"--calibration {path} has {len(ids)} tokens, and a sequence has {length}; give a longer text")
    return ids[: count * length].reshape(count, length)
