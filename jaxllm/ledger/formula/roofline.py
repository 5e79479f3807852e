"""Roofline: the least time that work takes on a device, from the busy time of each resource.

    compute        executed FLOPs / peak FLOP/s of the matmul dtype
    bandwidth      bytes read and written in device memory / memory bandwidth
    interconnect   bytes sent to other devices in rings / rate of links within a host (or TPU slice) or between hosts
    host link      bytes to or from host memory, the busier direction / rate of the link between host and device

At best all four overlap completely, so the bound is their maximum (Williams, Waterman & Patterson 2009, with two more
resources). It is a lower bound: no program is faster, and most are slower. FLOPs are executed ones, including
recomputation and the masked pairs that the program's attention multiplies.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.config import Architecture
from jaxllm.config.inference_mesh import ONE_DEVICE, InferenceMesh
from jaxllm.hardware.detect import Device
from jaxllm.ledger.formula import communication, flops
from jaxllm.ledger.formula.communication import Transfer
from jaxllm.ledger.formula.exact.block_graph import block
from jaxllm.ledger.formula.exact.formats import ITEMSIZE
from jaxllm.ledger.formula.exact.optimizer_slots import total_elements
from jaxllm.ledger.formula.exact.run import TrainingRun
from jaxllm.ledger.formula.flops import EXECUTED, Work
from jaxllm.ledger.rows import Unknown, figure_to_json

COMPUTE, BANDWIDTH, INTERCONNECT, HOST_LINK = "compute", "bandwidth", "interconnect", "host link"


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Lower bounds on the time of one program on one device.

    Attributes:
      work: FLOPs and bytes of the program.
      seconds_of: Resource -> busy seconds, for resources that are used and whose rate is known.
      unknown: The rate that is unknown, and its device; "" if all are known.
      sent_bytes: Bytes that one device sends to the others, with ring algorithms; None for inference on one device.
    """

    work: Work
    seconds_of: Mapping[str, float]
    unknown: str = ""
    sent_bytes: int | None = None

    @property
    def seconds(self) -> float | Unknown:
        """Lower bound on the time, in seconds, with all resources overlapped."""
        return Unknown(self.unknown) if self.unknown else max(self.seconds_of.values())

    @property
    def bound(self) -> str | Unknown:
        """The resource with the longest busy time, which sets the bound."""
        return Unknown(self.unknown) if self.unknown else max(self.seconds_of, key=self.seconds_of.__getitem__)

    def to_json(self) -> dict[str, Any]:
        """Returns the "compute" object of the ledger JSON."""
        return {
            "flops": self.work.flops,
            "flops_of": dict(self.work.flops_of),
            "flops_convention": EXECUTED,
            "bytes": self.work.bytes,
            "bytes_of": dict(self.work.bytes_of),
            "intensity": self.work.intensity,
            "roofline_seconds": figure_to_json(self.seconds),
            "bound": figure_to_json(self.bound),
            "seconds_of": dict(self.seconds_of),
            **({} if self.sent_bytes is None else {"sent_bytes": self.sent_bytes}),
        }


def train_step(run: TrainingRun, device: Device) -> Roofline:
    """Returns the roofline of one update, on one of the run's devices, which are all of one kind.

    GPU hosts have 8 devices; TPUs are in one slice, up to the largest slice of their kind.

    Raises:
      UserError: An array cannot be sharded as the mesh requires.
    """
    seconds, missing, sent_bytes = _sending(communication.transfers(run), run.mesh, device)
    link = 0 if device.platform == "cpu" else host_link_bytes(run)  # a CPU's memory is host memory
    if link and device.host_link:
        seconds[HOST_LINK] = link / device.host_link
    elif link:
        missing = f"the rate between {device.name} and its host"
    least = _roofline(flops.step(run), device, run.dtype, seconds, missing)
    return dataclasses.replace(least, sent_bytes=sent_bytes)


def _sending(transfers: Sequence[Transfer], mesh: dict[str, int], device: Device) -> tuple[dict[str, float], str, int]:
    """Returns (busy seconds of the interconnect, the rate that is unknown or "", bytes that one device sends)."""
    seconds, sent_bytes, missing = 0.0, 0.0, ""
    for transfer in transfers:
        sent_bytes += transfer.ring_bytes
        rate = ring_rate(transfer, mesh, device)
        if rate is None:
            missing = f"the rate between {'hosts' if device.interconnect else 'devices'} of {device.name}"
        else:
            seconds += transfer.ring_bytes / rate
    return {INTERCONNECT: seconds} if seconds and not missing else {}, missing, round(sent_bytes)


def prefill(
    model: Architecture,
    batch: int,
    tokens: int,
    weight_dtype: str,
    cache_dtype: str,
    device: Device,
    dtype: str,
    mesh: InferenceMesh = ONE_DEVICE,
) -> Roofline:
    """Returns the roofline of prefilling `tokens` prompt tokens for `batch` sequences in one call.

    Args:
      batch: Sequences, over all devices.
      tokens: Prompt tokens of each sequence.
      weight_dtype, cache_dtype: Storage formats, by the names of `exact.formats`.
      dtype: Dtype of the matmuls: float32 | bfloat16 | float16.
      mesh: Number of devices along each mesh axis.
    """
    work = flops.prefill(model, batch, tokens, weight_dtype, cache_dtype, mesh, device.platform)
    return _inference(work, model, batch, tokens, device, dtype, mesh)


def decode_token(
    model: Architecture,
    batch: int,
    length: int,
    weight_dtype: str,
    cache_dtype: str,
    device: Device,
    dtype: str,
    mesh: InferenceMesh = ONE_DEVICE,
) -> Roofline:
    """Returns the roofline of one new token for `batch` sequences of `length` tokens; arguments as for `prefill`."""
    work = flops.decode_token(model, batch, length, weight_dtype, cache_dtype, mesh, device.platform)
    return _inference(work, model, batch, 1, device, dtype, mesh)


def _inference(
    work: Work, model: Architecture, batch: int, tokens: int, device: Device, dtype: str, mesh: InferenceMesh
) -> Roofline:
    if mesh.count == 1:
        return _roofline(work, device, dtype)
    transfers = communication.inference(model, batch, tokens, int(ITEMSIZE[dtype]), mesh)
    seconds, missing, sent_bytes = _sending(transfers, {"data": mesh.data, "tensor": mesh.tensor}, device)
    least = _roofline(dataclasses.replace(work, tokens=batch * tokens), device, dtype, seconds, missing)
    return dataclasses.replace(least, sent_bytes=sent_bytes)


def _roofline(
    work: Work, device: Device, dtype: str, seconds_of: Mapping[str, float] | None = None, missing: str = ""
) -> Roofline:
    """Adds compute and bandwidth to the given resources; `missing` names a rate that is unknown."""
    peak = device.peak(dtype)
    seconds = {}
    if peak is None:
        missing = f"the peak {dtype} FLOP/s of {device.name}"
    else:
        seconds[COMPUTE] = work.flops / peak
    if device.bandwidth is None:
        missing = missing or f"the memory bandwidth of {device.name}"
    else:
        seconds[BANDWIDTH] = work.bytes / device.bandwidth
    return Roofline(work, seconds | dict(seconds_of or {}), f"{missing} is not known" if missing else "")


def ring_rate(transfer: Transfer, mesh: dict[str, int], device: Device) -> float | None:
    """Returns the bytes/s that each device can send in a transfer; None if the rate is unknown.

    The last mesh axis is innermost, so its devices are adjacent (`parallel.mesh.make_mesh`). A ring within
    `device.link_domain` devices runs at the interconnect's rate. A larger collective runs as many rings in parallel as
    it has devices in each link domain, each through a separate network card.
    """
    inside = _members_inside(transfer.axes, mesh, device.link_domain)
    if inside == transfer.devices:
        return device.interconnect
    if device.network is None or (inside > 1 and device.interconnect is None):
        return None
    across = inside * device.network
    return across if inside == 1 or device.interconnect is None else min(device.interconnect, across)


def _members_inside(axes: Sequence[str], mesh: dict[str, int], link_domain: int) -> int:
    """Returns how many of the devices that communicate along `axes` are in one link domain."""
    if math.prod(mesh.values()) <= link_domain:
        return math.prod(mesh[axis] for axis in axes)
    inside, stride = 1, 1
    for axis, size in reversed(mesh.items()):
        if axis in axes and stride < link_domain:
            # If rings fill link domains unevenly, the domain with the fewest of their devices sets the rate.
            inside *= math.gcd(size, link_domain // stride)
        stride *= size
    return inside


def host_link_bytes(run: TrainingRun) -> int:
    """Returns the bytes per step between one device and its host, in the busier direction.

    Optimizer state in host memory is copied in and back once per update. Offloaded activations are copied out in the
    forward pass of each micro-batch and back in for its backward pass.
    """
    return sum(_offloaded(run))


def _offloaded(run: TrainingRun) -> Iterator[int]:
    if run.config.optimizer.offload != "none":
        yield total_elements(run.config.optimizer.name, run.layout) * run.moment_bytes
    if run.config.optimizer.offload == "all":
        yield run.total("weight", trained=True) * run.param_bytes
    if run.remat.kind == "offload":
        kept = sum(block(run).kept(run.remat.kept).values())
        yield run.config.train.accumulate * run.model.layers * kept
