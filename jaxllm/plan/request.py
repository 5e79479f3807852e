"""What a person asks of a plan, where it is shown, and what may compile its best."""

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
LENGTH = 8192  # tokens of a sequence, where the model was made for as many


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What a person asks for.

    Attributes:
      config: the run; a choice replaces some of its fields.
      file: that it comes from; "" where it is made of a model's name.
      typed: field -> value of what is not as the file has it, because the person says so; None where there is none.
      device_name: as `--device` has it.
      count: devices of training.
      budget: bytes of one device that may be taken.
      margin: the fraction that the budget leaves free.
      batch, context, weights, cache: of inference; None and `search` where they are to be found.
      confirm: how many to compile; None is one where that can be done.
      out: where to write the winner as a file.
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
    """Attributes:
    console: silent where JSON is wanted.
    top: candidates to show.
    """

    console: Console
    top: int

    def say(self, text: str) -> None:
        render.say(self.console, text)


def precisions(wanted: str, platform: str) -> tuple[str, ...]:
    """Policies to choose among: `search`, or one."""
    if wanted == "search":
        return ("fp32", "bf16") if platform == "cpu" else ("bf16", "bf16_pure", "fp32")
    return (policy_for(wanted, platform).name,)


def compiler(request: PlanRequest, count: int, output: Output) -> tuple[int, confirm.Compile | None]:
    """(how many to compile, with what); None where nothing is to be compiled."""
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
