"""Input of the planner, and the result of its searches."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from jaxllm.config import Architecture, Config
from jaxllm.hardware.detect import Device
from jaxllm.ledger import bill


class Estimate(Protocol):
    """Closed-form estimate of a choice."""

    @property
    def choice(self) -> Any: ...
    @property
    def peak_bytes(self) -> int: ...


SpaceT = TypeVar("SpaceT")
ChoiceT = TypeVar("ChoiceT")
EstimateT = TypeVar("EstimateT", bound=Estimate)


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
      count: number of devices.
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
class SearchResult(Generic[SpaceT, ChoiceT, EstimateT]):
    """Result of a search over training runs or sampling setups.

    Attributes:
      space: the space that was searched.
      device: the device.
      budget: bytes that may be used on one device.
      evaluated: number of choices evaluated, including those rejected because of their state alone.
      fitting: estimates of the choices that fit, best first.
      closest: the choice with the smallest peak, and that peak in bytes, if nothing fits; else None.
      seconds: duration of the search.
    """

    space: SpaceT
    device: Device
    budget: int
    evaluated: int
    fitting: tuple[EstimateT, ...]
    closest: tuple[ChoiceT, int] | None
    seconds: float

    @property
    def best(self) -> ChoiceT:
        """The best choice that fits, or the closest one if nothing fits."""
        if self.fitting:
            choice: ChoiceT = self.fitting[0].choice
            return choice
        assert self.closest is not None
        return self.closest[0]
