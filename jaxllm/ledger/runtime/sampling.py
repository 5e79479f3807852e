"""Sampling bill: printed and checked before allocation, compared with measurements, used to explain OOM errors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.config import Architecture
from jaxllm.config.inference_mesh import ONE_DEVICE, InferenceMesh
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.hardware.detect import Device
from jaxllm.ledger import bill
from jaxllm.ledger import device as device_lib
from jaxllm.ledger.advice import out_of_memory
from jaxllm.ledger.advice.admission import Admission, check_admission
from jaxllm.ledger.bill import AUTO
from jaxllm.ledger.report import terminal
from jaxllm.ledger.rows import DECODE, PERSISTENT, PREFILL, Figure, Ledger, Unknown, format_bytes
from jaxllm.ledger.runtime import OOM_TARGET


class SamplingBill:
    """Ledger of a sampling run: its summary, admission check, comparison with measurements and OOM message.

    Args:
      name, model: Name and architecture of the model.
      batch: Number of sequences decoded together.
      context: Maximum tokens per sequence, prompt included.
      chunk: Prompt tokens processed per prefill call.
      device: Device specification; this machine's by default.
      used_by_others: Bytes in use on the device by others; measured by default.
      cache: Format of keys and values; None for no cache, where every token runs a whole forward pass.
      weights: Format of the weights.
      mesh: Number of devices along each mesh axis.

    Raises:
      UserError: The model cannot be sharded over the mesh.
    """

    def __init__(
        self,
        name: str,
        model: Architecture,
        batch: int,
        context: int,
        chunk: int,
        device: Device | None = None,
        used_by_others: Figure | None = None,
        cache: str | None = AUTO,
        weights: str = AUTO,
        mesh: InferenceMesh = ONE_DEVICE,
    ):
        self._device = device or detect.this_machine()
        self._used_by_others = device_lib.used_by_others() if used_by_others is None else used_by_others
        available = device_lib.available_to_task(self._device, self._used_by_others, mesh.count)

        def ledger_for(batch: int, context: int) -> Ledger:
            sizes = (batch, context, min(chunk, context))
            options: dict[str, Any] = {"weights": weights, "cache": cache or AUTO, "mesh": mesh}
            options["use_cache"] = cache is not None
            ledger = bill.sampling(name, model, self._device, *sizes, **options)
            return dataclasses.replace(ledger, capacity_bytes=available)

        self._ledger_for, self._batch, self._context = ledger_for, batch, context
        self.ledger = ledger_for(batch, context)

    def summary_lines(self) -> list[str]:
        """Returns the summary of the bill: rows, total, capacity and verdict."""
        ledger = self.ledger
        lines = [f"ledger: {ledger.model}, {ledger.parameters:,} parameters, {self._batch} × {self._context:,} tokens"]
        for phase in (PERSISTENT, ledger.peak_phase):
            live = (row for row in ledger.rows if row.phase == phase and row.bytes_per_device)
            listed = ", ".join(f"{row.name} {format_bytes(row.bytes_per_device)}" for row in live)
            lines.append(f"  {phase}: {format_bytes(ledger.phase_bytes(phase))} = {listed}")
        lines.append(f"  {ledger.attention}")
        devices = self._device.name if ledger.count == 1 else f"each of {ledger.count} × {self._device.name}"
        lines.append(f"  {terminal.verdict(ledger)}; on {devices}")
        others = self._used_by_others
        if isinstance(others, int) and others and self._device.platform != "cpu":
            lines[-1] += f", of which others hold {format_bytes(others)} more"
        return lines

    def admission(self) -> Admission | Unknown:
        """Returns the admission result, or Unknown if the capacity is unknown."""
        available = self.ledger.capacity_bytes
        if isinstance(available, Unknown):
            return available
        return check_admission(self._ledger_for, self._batch, self._context, available)

    def require_fit(self) -> None:
        """Checks that the predicted peak fits the device.

        Raises:
          UserError: It does not fit; the message has both sizes and the largest batch and context that fit.
        """
        if self.ledger.fits is False:
            raise UserError(
                f"{self.admission()}; give fewer prompts at a time, shorter ones, or a lower --max_new_tokens"
            )

    def reconcile(self, live: Mapping[str, int], compiled_peaks: Mapping[str, Figure]) -> list[str]:
        """Returns one line that compares measured bytes with the formulas.

        Args:
          live: Live bytes on the device per row kind: "weights", "KV cache".
          compiled_peaks: XLA's peak per program; the program's name is "prefill" or starts with "decode".
        """
        parts = []
        for kind, measured in live.items():
            formula = self.ledger.kind_bytes(kind)
            gap = "as billed" if formula == measured else f"{formula - measured:+,} B: the bill says {formula:,} B"
            parts.append(f"{kind} {measured:,} B ({gap})")
        for phase, peak in compiled_peaks.items():
            phase = DECODE if phase.startswith(DECODE) else phase
            assert phase in (PREFILL, DECODE), phase
            formula = self.ledger.persistent_bytes + self.ledger.phase_bytes(phase)
            gap = "" if isinstance(peak, Unknown) or not peak else f" ({(formula - peak) / peak:+.1%})"
            parts.append(f"{phase} peak {format_bytes(formula)}, compiled {format_bytes(peak)}{gap}")
        return [f"ledger: measured: {'; '.join(parts)}"]

    def oom_message(self, doing: str, error: BaseException) -> str:
        """Returns the out-of-memory message, with the largest batch or context that would fit.

        Args:
          doing: When memory ran out.
          error: The out-of-memory exception.
        """
        available = device_lib.available_bytes()
        ledger = dataclasses.replace(self.ledger, capacity_bytes=available)
        limit = int(OOM_TARGET * ledger.peak_bytes)
        limit = limit if isinstance(available, Unknown) else min(limit, available)
        largest = check_admission(self._ledger_for, self._batch, self._context, limit).largest
        return out_of_memory.message(doing, error, ledger, device_lib.used_by_others(), largest)
