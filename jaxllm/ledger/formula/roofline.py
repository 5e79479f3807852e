"""The least time that work takes on a device: of each resource the time it is busy, and the longest of them.

    compute        executed FLOPs over the peak of the dtype that multiplies
    bandwidth      bytes moved in device memory, over its bandwidth
    interconnect   bytes sent to other devices in rings, over links that lie within a host (or a TPU's slice) or between
    host link      bytes to or from host memory, the busier direction, over what joins host and device

At best all four run at once, so the bound is their maximum (Williams, Waterman & Patterson 2009, with two resources
more). It is a bound from below: no program is faster, and most are slower. FLOPs are executed ones, with recomputation
and with the masked pairs that the program's attention multiplies.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.config import Architecture
from jaxllm.hardware.detect import Device
from jaxllm.ledger.formula import communication, flops
from jaxllm.ledger.formula.communication import Transfer
from jaxllm.ledger.formula.exact.block_graph import block
from jaxllm.ledger.formula.exact.optimizer_slots import elements_held
from jaxllm.ledger.formula.exact.run import TrainingRun
from jaxllm.ledger.formula.flops import EXECUTED, Work
from jaxllm.ledger.rows import Unknown, figure_to_json

COMPUTE, BANDWIDTH, INTERCONNECT, HOST_LINK = "compute", "bandwidth", "interconnect", "host link"
# Policy of precision -> dtype of the inputs of its products.
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "bf16_pure": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Least times of one program on one device.

    Attributes:
      work: FLOPs and bytes.
      seconds_of: resource -> seconds it is busy, of the resources that are used and whose rate is known.
      unknown: "" where all of them are known; else which is not, of which device.
    """

    work: Work
    seconds_of: Mapping[str, float]
    unknown: str = ""

    @property
    def seconds(self) -> float | Unknown:
        """The least time, all resources overlapped."""
        return Unknown(self.unknown) if self.unknown else max(self.seconds_of.values())

    @property
    def bound(self) -> str | Unknown:
        """The resource that sets it."""
        return Unknown(self.unknown) if self.unknown else max(self.seconds_of, key=self.seconds_of.__getitem__)

    def to_json(self) -> dict[str, Any]:
        """The ledger JSON's "compute"."""
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
        }


def train_step(run: TrainingRun, device: Device) -> Roofline:
    """One update on one of `setting.devices` of a kind: 8 GPUs to a host, and TPUs in one slice while there are any.

    Raises:
      UserError: an array cannot be split as the mesh wants it.
    """
    sent = 0.0
    missing = ""
    for transfer in communication.transfers(run):
        rate = ring_rate(transfer, run.mesh, device)
        if rate is None:
            missing = f"the rate between {'hosts' if device.interconnect else 'devices'} of {device.name}"
        else:
            sent += transfer.ring_bytes / rate
    link = 0 if device.platform == "cpu" else host_link_bytes(run)  # a CPU's memory is its host's
    seconds = {INTERCONNECT: sent} if sent and not missing else {}
    if link and device.host_link:
        seconds[HOST_LINK] = link / device.host_link
    elif link:
        missing = f"the rate between {device.name} and its host"
    return _roofline(flops.step(run), device, _DTYPES[run.policy], seconds, missing)


def prefill(
    model: Architecture, batch: int, tokens: int, weight_dtype: str, cache_dtype: str, device: Device, dtype: str
) -> Roofline:
    """Taking in a prompt of so many tokens for each of `batch` sequences in one call, on one device.

    Args:
      weight_dtype, cache_dtype: as they are stored, by the names of `ledger.formats`.
      dtype: of the products: float32 | bfloat16 | float16.
    """
    return _roofline(flops.prefill(model, batch, tokens, weight_dtype, cache_dtype), device, dtype)


def decode_token(
    model: Architecture, batch: int, length: int, weight_dtype: str, cache_dtype: str, device: Device, dtype: str
) -> Roofline:
    """One more token for each of `batch` sequences of `length` tokens, on one device; arguments as `prefill`."""
    return _roofline(flops.decode_token(model, batch, length, weight_dtype, cache_dtype), device, dtype)


def _roofline(
    work: Work, device: Device, dtype: str, seconds_of: Mapping[str, float] | None = None, missing: str = ""
) -> Roofline:
    """Compute and bandwidth beside what is given; `missing` is a rate that is not known."""
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
    """Bytes/s that each device can send in a transfer; None where that is not known.

    The last axis of the mesh is innermost, so that its devices are next to each other (`parallel.mesh.make_mesh`). A
    ring within `device.link_domain` devices runs at the interconnect's rate. A larger one has as many rings side by side
    as it has devices in each link domain, each through another network card.
    """
    inside = _members_inside(transfer.axes, mesh, device.link_domain)
    if inside == transfer.devices:
        return device.interconnect
    if device.network is None or (inside > 1 and device.interconnect is None):
        return None
    across = inside * device.network
    return across if inside == 1 or device.interconnect is None else min(device.interconnect, across)


def _members_inside(axes: Sequence[str], mesh: dict[str, int], link_domain: int) -> int:
    """Of the devices along some axes that communicate with one another, those that are in one link domain."""
    if math.prod(mesh.values()) <= link_domain:
        return math.prod(mesh[axis] for axis in axes)
    inside, stride = 1, 1
    for axis, size in reversed(mesh.items()):
        if axis in axes and stride < link_domain:
            # Rings that do not fill link domains evenly are set by the domain with the fewest of their devices.
            inside *= math.gcd(size, link_domain // stride)
        stride *= size
    return inside


def host_link_bytes(run: TrainingRun) -> int:
    """Bytes of one step between one device and its host, in the busier direction.

    What the optimizer keeps in host memory comes in and goes back once an update; activations that are offloaded go
    out in the forward pass of each micro-batch, and come in for its backward pass.
    """
    return sum(_offloaded(run))


def _offloaded(run: TrainingRun) -> Iterator[int]:
    if run.config.optimizer.offload != "none":
        yield elements_held(run) * run.moment
    if run.config.optimizer.offload == "all":
        yield run.total("weight", trained=True) * run.store
    if run.remat.kind == "offload":
        kept = sum(block(run).kept(run.remat.kept).values())
        yield run.config.train.accumulate * run.model.layers * kept
