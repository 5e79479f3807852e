"""The ledger in sampling: shown and settled before anything is allocated, held against what was, told in a shortage."""

import dataclasses
from collections.abc import Callable, Mapping

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.hardware.detect import Device
from jaxllm.ledger import bill
from jaxllm.ledger import device as device_lib
from jaxllm.ledger.advice import out_of_memory
from jaxllm.ledger.advice.admission import Room, room
from jaxllm.ledger.bill import AUTO
from jaxllm.ledger.report import terminal
from jaxllm.ledger.rows import DECODE, PERSISTENT, PREFILL, Figure, Ledger, Unknown, format_bytes

Say = Callable[[str], None]


class SamplingBill:
    """What sampling shows of the ledger, what it is admitted by, and what it is measured against.

    Args:
      name, model: of what is sampled.
      batch: sequences at a time.
      context: tokens of prompt and text that each may have.
      chunk: prompt tokens taken at a time.
      device: this machine's by default.
      held: bytes of it that others have; asked of it by default.
      cache: format of keys and values; None where there is no cache, and all is computed anew for every token.
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
        self._held = device_lib.held_by_others() if held is None else held
        available = device_lib.left_for_us(self._device, self._held)

        def billed(batch: int, context: int) -> Ledger:
            what = (name, model, self._device, batch, context, min(chunk, context))
            ledger = bill.sampling(*what, cache=cache or AUTO, use_cache=cache is not None)
            return dataclasses.replace(ledger, capacity_bytes=available)

        self._billed, self._batch, self._context = billed, batch, context
        self.ledger = billed(batch, context)

    def lines(self) -> list[str]:
        """The bill in short: rows, total, capacity, verdict."""
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

    def room(self) -> Room | Unknown:
        """Whether it fits, and the largest that would."""
        has = self.ledger.capacity_bytes
        return has if isinstance(has, Unknown) else room(self._billed, self._batch, self._context, has)

    def admit(self) -> None:
        """Raises UserError, with both numbers and the largest that fits, where it does not fit by the formulas."""
        if self.ledger.fits is False:
            raise UserError(f"{self.room()}; give fewer prompts at a time, shorter ones, or a lower --max_new_tokens")

    def reconcile(self, live: Mapping[str, int], compiled_peaks: Mapping[str, Figure]) -> list[str]:
        """A line for what was measured beside the formulas.

        Args:
          live: bytes on the device, by kind of row: "weights", "KV cache".
          compiled_peaks: of the programs by name, which begins with its phase, as XLA tells.
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

    def explain_shortage(self, doing: str, error: BaseException) -> str:
        """What to tell where memory ran out."""
        available = device_lib.available_bytes()
        ledger = dataclasses.replace(self.ledger, capacity_bytes=available)
        peak = ledger.peak_bytes
        # Where the formulas said that it fits, they were wrong here: what fits has to need clearly less.
        has = int(0.8 * peak) if isinstance(available, Unknown) else min(int(0.8 * peak), available)
        change = str(room(self._billed, self._batch, self._context, has)).rpartition("; ")[2]
        return out_of_memory.message(doing, error, ledger, device_lib.held_by_others(), change)
