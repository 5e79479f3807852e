"""What a person asks the bill of, at the command line or in the page, and the bills that answer it."""

import dataclasses
import functools
import math

from jaxllm import architectures
from jaxllm.config import Architecture, Config
from jaxllm.errors import UserError
from jaxllm.hardware.detect import Device
from jaxllm.ledger import bill
from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.rows import Ledger
from jaxllm.parallel import mesh

TASKS = ("train", "infer")


@dataclasses.dataclass(frozen=True)
class Request:
    """One configuration on one kind of device.

    Attributes:
      count: devices of training; None for as many as config.mesh takes.
      batch: of inference: sequences at a time.
      context: of inference: tokens of prompt and text; None for the model's.
      chunk: of inference: prompt tokens that one prefill call takes, at most.
      weights, cache: of inference: formats of `ledger.formats`, or auto for what programs compute with.
    """

    config: Config
    device: Device
    count: int | None
    batch: int
    context: int | None
    chunk: int
    weights: str = bill.AUTO
    cache: str = bill.AUTO

    @functools.cached_property
    def model(self) -> Architecture:
        """The configuration's, which is checked with it.

        Raises:
          UserError: one line naming the fields and the fix.
        """
        return architectures.resolve_config(self.config)


def train(request: Request) -> Ledger:
    """The bill of a training run.

    Raises:
      UserError: one line naming the fields and the fix.
    """
    model = request.model
    mesh.require_count(request.config.mesh, count_of(request))
    return bill.training(request.config, model, request.device)


def infer(request: Request) -> Ledger:
    """The bill of sampling on one device.

    Raises:
      UserError: the model, or a context that it cannot have.
    """
    context, name = context_of(request), bill.title(request.config)
    how = (request.batch, context, min(request.chunk, context), request.weights, request.cache)
    return bill.sampling(name, request.model, request.device, *how)


def require_programs(request: Request) -> None:
    """There are programs that sample with weights and a cache in these formats.

    Raises:
      UserError: there are none; names the flag.
    """
    plain = bill.plain_format(request.device.platform)
    for flag, name, there in (
        ("weights", request.weights, (bill.AUTO, plain)),
        ("cache", request.cache, (bill.AUTO, plain, formats.INT8)),
    ):
        if name not in there:
            raise UserError(
                f"--{flag} is {name}, and there is no program of it to compile: on {request.device.name} weights are "
                f"{plain}, and a cache is {plain} or int8; leave out --compile for the bill alone, or --{flag}"
            )


def count_of(request: Request) -> int:
    """Devices of training."""
    return request.count or math.prod(mesh.sizes(request.config.mesh).values())


def context_of(request: Request) -> int:
    """Tokens of prompt and text.

    Raises:
      UserError: more than the model has positions for.
    """
    model = request.model
    context = request.context or model.context_length
    if context > model.context_length and model.positions == "learned":
        raise UserError(
            f"--context is {context} and the model has {model.context_length} learned positions; ask for at most those"
        )
    return context
