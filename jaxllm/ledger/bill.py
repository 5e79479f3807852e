"""The bill of a run on the machine it starts on: made before it, held against it after its second step."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
from rich.console import Console

from jaxllm import hardware
from jaxllm.config import Architecture, Config
from jaxllm.errors import RunError
from jaxllm.hardware import Device
from jaxllm.ledger import communication, compiled, compute, inference, memory, report, trace
from jaxllm.ledger import device as device_lib
from jaxllm.ledger.reconcile import EXACT, Reconciliation, reconcile
from jaxllm.ledger.rows import Ledger, Unknown
from jaxllm.train.precision import policy_for


def title(config: Config) -> str:
    """The model's name; where the configuration changes its numbers, that it does."""
    changed = any(value is not None for name, value in vars(config.model).items() if name != "name")
    return f"{config.model.name} (modified)" if changed else config.model.name


def training(config: Config, model: Architecture, device: Device) -> Ledger:
    """The ledger of a training run on a device, attached or not, with its capacity and the work of one step.

    `compute` has beside it "sent_bytes": what one device sends to the others in a step, in rings.
    """
    policy = policy_for(config.precision.policy, device.platform)
    ledger = memory.training(model, config, policy.name, device.platform)
    work = compute.train_step(model, config, policy.name, device.platform)
    billed = _on(device, ledger, work, policy.compute.name)
    sent = round(sum(transfer.ring_bytes for transfer in communication.train_step(model, config, policy.name)))
    return dataclasses.replace(billed, model=title(config), compute={**billed.compute, "sent_bytes": sent})


def sampling(name: str, model: Architecture, device: Device, batch: int, capacity: int, chunk: int) -> Ledger:
    """The ledger of decoding on a device, with the work of one token.

    Args:
      name: of the model, for the title.
      batch: sequences at a time.
      capacity: tokens of prompt and text a sequence may have.
      chunk: prompt tokens taken at a time.
    """
    policy = policy_for("auto", device.platform)
    ledger = inference.inference(model, batch, capacity, chunk, policy.name, policy.name, name, device.platform)
    work = compute.decode_token(model, batch, capacity, policy.name, policy.name)
    return _on(device, ledger, work, policy.compute.name)


def _on(device: Device, ledger: Ledger, work: compute.Work, dtype: str) -> Ledger:
    capacity = device.memory_bytes
    return dataclasses.replace(
        ledger,
        device=device.name,
        capacity_bytes=Unknown(f"{device.name}: {device.source}") if capacity is None else capacity,
        compute=work.to_json(device, dtype),
    )


class TrainingBill:
    """What the trainer shows of the ledger, and what it is measured against.

    Args:
      config, model: of the run.
      console: where to show it.
    """

    def __init__(self, config: Config, model: Architecture, console: Console):
        self._config, self._model = config, model
        self._check, self._console = config.ledger.check, console
        self._device = hardware.this_machine()
        self._ledger = training(config, model, self._device)
        self.model_flops_per_token = compute.model_flops_per_token(model, config.data.sequence_length)
        dtype = policy_for(config.precision.policy, jax.default_backend()).compute.name
        peak = self._device.peak_flops.get(dtype)
        self.peak_flops = peak * self._ledger.count if peak else None

    def show(self) -> None:
        """Rows, total, capacity, verdict."""
        report.show_bill(self._ledger, self._device, self._console)

    def reconcile(self, workdir: pathlib.Path, train_step: jax.stages.Compiled, state: Any) -> Reconciliation | None:
        """Holds the ledger against the program and the live arrays; shows it and writes `workdir/ledger.json`.

        Raises:
          RunError: config.ledger.check is strict and the persistent state is not what the ledger says.
        """
        if self._check == "off":
            return None
        trees = {"weights": state.params, "optimizer": state.opt_state, "state": state}
        traced = trace.figures(self._config, self._model, self._device.platform)
        result = reconcile(self._ledger, compiled.figures(train_step), {"peak": device_lib.peak_bytes()}, trees, traced)
        (workdir / "ledger.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
        report.show_reconciliation(result, self._console)
        faults = [fault for fault in result.faults(float("inf")) if fault.startswith(EXACT)]
        if faults and self._check == "strict":
            raise RunError(f"config.ledger.check is strict and the ledger is wrong: {'; '.join(faults)}")
        for fault in faults:
            self._console.print(f"ledger: {fault}", highlight=False, markup=False)
        return result
