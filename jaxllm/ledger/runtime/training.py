"""Training bill: printed before the run, compared with measurements after step 2, used to explain OOM errors."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
from rich.console import Console

from jaxllm.config import Architecture, Config
from jaxllm.errors import RunError
from jaxllm.hardware import detect
from jaxllm.ledger import bill, trace
from jaxllm.ledger import device as device_lib
from jaxllm.ledger.advice import out_of_memory, remedies
from jaxllm.ledger.compiled import inspection
from jaxllm.ledger.formula import flops
from jaxllm.ledger.formula.exact.run import lora_of
from jaxllm.ledger.reconcile import reconcile
from jaxllm.ledger.report import terminal
from jaxllm.ledger.rows import Unknown, format_bytes
from jaxllm.ledger.runtime import OOM_TARGET
from jaxllm.step.precision import policy_for


class TrainingBill:
    """Ledger of a training run: its printed bill, comparison with measurements and OOM message.

    Args:
      config, model: Configuration and architecture of the run.
      console: Console to print to.
    """

    def __init__(self, config: Config, model: Architecture, console: Console):
        self._config, self._model = config, model
        self._check, self._console = config.ledger.check, console
        self._device = detect.this_machine()
        self._used_by_others = device_lib.used_by_others()
        ledger = bill.training(config, model, self._device)
        available = device_lib.available_to_task(self._device, self._used_by_others, ledger.count)
        self._ledger = dataclasses.replace(ledger, capacity_bytes=available)
        self.model_flops_per_token = flops.model_flops_per_token(model, config.data.sequence_length, lora_of(config))
        dtype = policy_for(config.precision.policy, jax.default_backend()).compute_dtype.name
        peak = self._device.peak(dtype)
        self.peak_flops = peak * self._ledger.count if peak else None

    def show(self) -> None:
        """Prints rows, total, capacity and verdict; if the run does not fit, also a change that would.

        Raises:
          RunError: The predicted peak does not fit and config.ledger.check is strict.
        """
        terminal.show_bill(self._ledger, self._device, self._console)
        others = self._used_by_others
        if isinstance(others, int) and others and self._device.platform != "cpu":
            self._say(f"Others use {format_bytes(others)} of the device, which is not counted as its memory.")
        if self._ledger.fits is not False or self._check == "off":
            return
        assert isinstance(self._ledger.capacity_bytes, int)
        verdict, change = terminal.verdict(self._ledger), self._suggestion(self._ledger.capacity_bytes)
        if self._check == "strict":
            raise RunError(f"config.ledger.check is strict and the run {verdict}; {change}")
        self._say(f"WARNING: this run {verdict}. It is started anyway; {change}", style="bold red")

    def reconcile(self, workdir: pathlib.Path, train_step: jax.stages.Compiled, state: Any) -> str:
        """Compares the ledger with the program and live arrays; prints it and writes `workdir/ledger.json`.

        Args:
          workdir: Folder of the run.
          train_step: Compiled training step.
          state: Live train state.
        Returns:
          The reason to stop the run: config.ledger.check is strict and the persistent state or activations do not
          match to the byte, or the peak is not within config.ledger.tolerance. Otherwise "".
        """
        if self._check == "off":
            return ""
        trees = {"weights": (state.params, state.frozen), "optimizer": state.opt_state, "state": state}
        traced = trace.figures(self._config, self._model, self._device.platform)
        result = reconcile(
            self._ledger, inspection.figures(train_step), {"peak": device_lib.peak_bytes()}, trees, traced
        )
        (workdir / "ledger.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
        terminal.show_reconciliation(result, self._console)
        tolerance = self._config.ledger.tolerance
        if result.ok(tolerance):
            return ""
        faults = result.faults(tolerance)
        for fault in faults:
            self._say(f"ledger: {fault}")
        strict = self._check == "strict"
        return f"config.ledger.check is strict and the ledger is wrong: {'; '.join(faults)}" if strict else ""

    def oom_message(self, doing: str, error: BaseException, *more: str) -> str:
        """Returns the out-of-memory message, with a change that would fit.

        Args:
          doing: When memory ran out: `in step 3`.
          error: The out-of-memory exception.
          more: Last lines of the message.
        """
        capacity = device_lib.available_bytes()
        if isinstance(capacity, int) and self._device.platform == "cpu":
            capacity //= self._ledger.count
        target = int(OOM_TARGET * self._ledger.peak_bytes)
        change = self._suggestion(target if isinstance(capacity, Unknown) else min(target, capacity))
        ledger = dataclasses.replace(self._ledger, capacity_bytes=capacity)
        return out_of_memory.message(doing, error, ledger, device_lib.used_by_others(), change, *more)

    def _suggestion(self, available: int) -> str:
        change = remedies.training_remedy(self._config, self._model, self._device, available)
        if change is None:
            return "no change of the configuration would fit: use larger devices, more of them, or a smaller model"
        return f"one change that would fit: {change}"

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
