"""Requests for a bill, from the command line or the HTML page, and the functions that build the bills."""

import dataclasses
import functools
import math

from jaxllm import architectures
from jaxllm.config import Architecture, Config
from jaxllm.config.inference_mesh import ONE_DEVICE, InferenceMesh
from jaxllm.errors import UserError
from jaxllm.hardware.detect import Device
from jaxllm.ledger import bill
from jaxllm.ledger.formula.exact import formats
from jaxllm.ledger.rows import Ledger
from jaxllm.parallel import mesh
from jaxllm.quantize import formats as quantize_formats

TASKS = ("train", "infer")


@dataclasses.dataclass(frozen=True)
class BillRequest:
    """Request to bill one configuration on one kind of device.

    Attributes:
      config: Configuration to bill.
      device: Device to bill it on, attached or absent.
      count: Training: number of devices; None for the number that config.mesh needs.
      batch: Inference: number of sequences decoded together.
      context: Inference: maximum tokens per sequence, prompt included; None for the model's context length.
      chunk: Inference: maximum prompt tokens per prefill call.
      mesh: Inference: number of devices along each mesh axis.
      weights, cache: Inference: formats of `ledger.formula.exact.formats`; auto is the platform's compute format.
    """

    config: Config
    device: Device
    count: int | None
    batch: int
    context: int | None
    chunk: int
    weights: str = bill.AUTO
    cache: str = bill.AUTO
    mesh: InferenceMesh = ONE_DEVICE

    @functools.cached_property
    def model(self) -> Architecture:
        """Architecture of the configuration, which is validated with it.

        Raises:
          UserError: The configuration is invalid; one line names the fields and the fix.
        """
        return architectures.resolve_config(self.config)


def train(request: BillRequest) -> Ledger:
    """Returns the bill of a training run.

    Raises:
      UserError: The configuration or device count is invalid; one line names the fields and the fix.
    """
    model = request.model
    mesh.require_count(request.config.mesh, count_of(request))
    return bill.training(request.config, model, request.device)


def infer(request: BillRequest) -> Ledger:
    """Returns the bill of sampling.

    Raises:
      UserError: The configuration or format is invalid, the model cannot be sharded over the mesh, or the context
        exceeds the model's learned positions.
    """
    context = context_of(request)
    return bill.sampling(
        bill.title(request.config),
        request.model,
        request.device,
        request.batch,
        context,
        min(request.chunk, context),
        request.weights,
        request.cache,
        mesh=request.mesh,
    )


def require_programs(request: BillRequest) -> None:
    """Checks that sampling programs exist for the requested weight and cache formats.

    Raises:
      UserError: No program supports the format; the message names the flag.
    """
    plain = bill.compute_format(request.device.platform)
    quantized = quantize_formats.from_name(request.weights)
    if quantized is not None and request.device.platform != "tpu" and request.mesh.count == 1:
        quantize_formats.check(request.model, quantized)
        plain_weights: tuple[str, ...] = (request.weights,)
    else:
        plain_weights = (bill.AUTO, plain)
    for flag, name, there in (
        ("weights", request.weights, plain_weights),
        ("cache", request.cache, (bill.AUTO, plain, formats.INT8)),
    ):
        if name not in there:
            raise UserError(
                f"--{flag} is {name}, which no program supports: on {request.device.name} weights are "
                f"{plain} (on one CPU or GPU also int8 and int4) and the cache is {plain} or int8; omit --compile, or "
                f"--{flag}"
            )


def count_of(request: BillRequest) -> int:
    """Returns the number of training devices: as requested, or the size of config.mesh."""
    return request.count or math.prod(mesh.axis_sizes(request.config.mesh).values())


def context_of(request: BillRequest) -> int:
    """Returns the maximum tokens per sequence, prompt included: as requested, or the model's context length.

    Raises:
      UserError: The context exceeds the model's learned positions.
    """
    model = request.model
    context = request.context or model.context_length
    if context > model.context_length and model.positions == "learned":
        raise UserError(
            f"--context is {context} and the model has {model.context_length} learned positions; give at most that many"
        )
    return context
