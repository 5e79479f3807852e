"""Sampling bill: printed and checked before allocation, compared with measurements, used to explain OOM errors."""

import dataclasses
from collections.abc import Callable, Mapping

from jaxllm.config import Architecture
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

Say = Callable[[str], None]


class SamplingBill:
    """Ledger of a sampling run: its summary, admission check, comparison with measurements and OOM message.

    Args:
      name, model: Name and architecture of the model.
      batch: Number of sequences decoded together.
      context: Maximum tokens per sequence, prompt included.
      chunk: Prompt tokens processed per prefill call.
      device: Device specification; this machine's by default.
      held: Bytes on the device in use by others; measured by default.
      cache: Format of keys and values; None for no cache, where every token runs a whole forward pass.
    """

    def __init__(
        self,
        name: str,
        model: Architecture,
        batch: int,
        context: int,
        chunk: int,
        device: Device | None = None,
        held: Figure | None = None,
        cache: str | None = AUTO,
    ):
        self._device = device or detect.this_machine()
        self._held = device_lib.used_by_others() if held is None else held
        available = device_lib.available_to_task(self._device, self._held)

        def billed(batch: int, context: int) -> Ledger:
            what = (name, model, self._device, batch, context, min(chunk, context))
            ledger = bill.sampling(*what, cache=cache or AUTO, use_cache=cache is not None)
            return dataclasses.replace(ledger, capacity_bytes=available)

        self._billed, self._batch, self._context = billed, batch, context
        self.ledger = billed(batch, context)

    def lines(self) -> list[str]:
        """Returns the summary of the bill: rows, total, capacity and verdict."""
        ledger = self.ledger
        told = [f"ledger: {ledger.model}, {ledger.parameters:,} parameters, {self._batch} × {self._context:,} tokens"]
        for phase in (PERSISTENT, ledger.peak_phase):
            alive = (row for row in ledger.rows if row.phase == phase and row.bytes_per_device)
            listed = ", ".join(f"{row.name} {format_bytes(row.bytes_per_device)}" for row in alive)
            told.append(f"  {phase}: {format_bytes(ledger.phase_bytes(phase))} = {listed}")
        told.append(f"  {ledger.attention}")
        told.append(f"  {terminal.verdict(ledger)}; on {self._device.name}")
        if isinstance(self._held, int) and self._held and self._device.platform != "cpu":
            told[-1] += f", of which others hold {format_bytes(self._held)} more"
        return told

    def admission(self) -> Admission | Unknown:
        """Returns the admission result, or Unknown if the capacity is unknown."""
        available = self.ledger.capacity_bytes
        if isinstance(available, Unknown):
            return available
        return check_admission(self._billed, self._batch, self._context, available)

    def admit(self) -> None:
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
        for kind, found in live.items():
            formula = self.ledger.kind_bytes(kind)
            off = "as billed" if formula == found else f"{formula - found:+,} B: the bill says {formula:,} B"
            parts.append(f"{kind} {found:,} B ({off})")
        for phase, peak in compiled_peaks.items():
            phase = DECODE if phase.startswith(DECODE) else phase
            assert phase in (PREFILL, DECODE), phase
            formula = self.ledger.persistent_bytes + self.ledger.phase_bytes(phase)
            off = "" if isinstance(peak, Unknown) or not peak else f" ({(formula - peak) / peak:+.1%})"
            parts.append(f"{phase} peak {format_bytes(formula)}, compiled {format_bytes(peak)}{off}")
        return [f"ledger: measured: {'; '.join(parts)}"]

    def oom_message(self, doing: str, error: BaseException) -> str:
        """Returns the out-of-memory message, with the largest batch or context that would fit.

        Args:
          doing: When memory ran out.
          error: The out-of-memory exception.
        """
        available = device_lib.available_bytes()
        ledger = dataclasses.replace(self.ledger, capacity_bytes=available)
        peak = ledger.peak_bytes
        # The formulas may have predicted a fit and been wrong, so a suggestion must need clearly less.
        limit = int(0.8 * peak) if isinstance(available, Unknown) else min(int(0.8 * peak), available)
        largest = check_admission(self._billed, self._batch, self._context, limit).largest
        return out_of_memory.message(doing, error, ledger, device_lib.used_by_others(), largest)
