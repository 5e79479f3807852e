"""The planner's input and output settings, and the choice of the compiler that confirms a plan."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from jaxllm.config import Architecture, Config
from jaxllm.errors import UserError
from jaxllm.hardware.detect import Device
from jaxllm.ledger import bill
from jaxllm.plan import confirm, render
from jaxllm.step.precision import policy_for

BATCH_TOKENS = 2**20
LENGTH = 8192  # default tokens per sequence; less if the context of the model is shorter


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Input of the planner, from the command line.

    Attributes:
      config: the run; a choice replaces some of its fields.
      model: its model.
      file: path of the config file; "" if the run is built from a model's name.
      typed: overrides of the file's fields from the command line, field -> value; None if there is no file.
      device_name: value of `--device`.
      device: the device that it names.
      count: number of devices, for training.
      budget: bytes of one device that may be used.
      margin: fraction of the device's memory that the budget leaves free.
      precisions, moments: precision policies and moment dtypes to choose among, for training.
      batch: number of concurrent sequences, for inference; None to search.
      context: tokens per sequence, for inference.
      weights, cache: formats, for inference; `search` to search.
      confirm: number of candidates to compile; None for one if a compiler is available.
      out: file to write the winner to; None to write none.
    """

    config: Config
    model: Architecture
    file: str
    typed: Mapping[str, Any] | None
    device_name: str
    device: Device
    count: int
    budget: int
    margin: float
    precisions: tuple[str, ...]
    moments: tuple[str, ...]
    batch: int | None
    context: int
    weights: str
    cache: str
    confirm: int | None
    out: pathlib.Path | None

    @property
    def name(self) -> str:
        return bill.title(self.config)


@dataclasses.dataclass(frozen=True)
class Output:
    """Console and limits for printing a plan.

    Attributes:
      console: where to print; silent with `--json`.
      top: maximum number of candidates to print.
    """

    console: Console
    top: int

    def say(self, text: str) -> None:
        render.say(self.console, text)


def precisions(wanted: str, platform: str) -> tuple[str, ...]:
    """Returns the precision policies to choose among: those of the platform for `search`, else the one wanted."""
    if wanted == "search":
        return ("fp32", "bf16") if platform == "cpu" else ("bf16", "bf16_pure", "fp32")
    return (policy_for(wanted, platform).name,)


def compiler(request: PlanRequest, count: int, output: Output) -> tuple[int, confirm.Compile | None]:
    """Returns (number of candidates to compile, compile function); (0, None) if nothing is to be compiled.

    Raises:
      UserError: `--confirm` is positive and no compiler for the device is available.
    """
    if request.confirm == 0:
        return 0, None
    try:
        made = confirm.compiler(request.device_name, request.device, count)
    except UserError as error:
        if request.confirm:
            raise
        output.say(f"not compiled: {error}")
        return 0, None
    return request.confirm or 1, made
