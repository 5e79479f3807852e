"""Coordinated stop on SIGTERM or SIGINT, after the same step in every process.

A signal may reach only some processes of a job, and at different steps: steps are dispatched asynchronously, so one
process may be several steps ahead of another. If each stopped where it is, the one ahead would wait forever in a
collective that the others never start.

The processes therefore agree on the last step. Without a signal, no step waits for this:

1. A process that receives a signal publishes a request in the coordination service.
2. The watchdog thread of each process sees the request shortly afterwards and proposes to stop after the step that
   follows the one in progress: its loop does not pass that step before the last step is published.
3. Process 0 publishes the highest proposal as the last step. No process has passed it; all reach it and stop there.

The watchdog thread makes the proposal, because the training loop may be blocked on its devices, and through them on a
process that is behind.
"""

import signal
import threading
from types import FrameType
from typing import Any

from jaxllm.job.distributed import Job

_REQUEST, _PROPOSALS, _LAST_STEP = "stop/request", "stop/proposals", "stop/last_step"


class StopSignals:
    """Context manager that turns SIGTERM and SIGINT into a stop between steps; a second signal acts immediately.

    Args:
      job: processes that stop together.
      first: steps already done before the loop begins.
    """

    def __init__(self, job: Job, first: int = 0):
        self._job = job
        self._received = 0
        self._previous: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._started = first
        self._proposed: int | None = None
        self._last_step: tuple[int, int] | None = None  # (step, signal)

    def begin(self, step: int) -> None:
        """Records that `step` begins; call it before the step is dispatched."""
        with self._changed:
            self._started = step

    def after(self, step: int) -> int:
        """Returns the signal number to stop for after this step, or 0; blocks while the last step is undecided."""
        if self._job.is_alone:
            return self._received
        with self._changed:
            while self._last_step is None and self._proposed is not None and step >= self._proposed:
                self._changed.wait(1.0)  # with a timeout, so that a second signal is handled
            return self._last_step[1] if self._last_step is not None and self._last_step[0] == step else 0

    def poll(self) -> None:
        """Reads the service once and advances the protocol above; called periodically by the watchdog thread."""
        if self._last_step is not None:
            return
        requests = self._job.read("stop")
        if "request" not in requests:
            if not self._received:
                return
            self._job.put(_REQUEST, str(self._received))
        if self._proposed is None:
            with self._changed:
                self._proposed = self._started + 1
            self._job.put(f"{_PROPOSALS}/{self._job.index}", str(self._proposed))
        if self._job.is_leader and "last_step" not in requests:
            proposals = self._job.read(_PROPOSALS)
            if len(proposals) == self._job.count:
                last = max(map(int, proposals.values()))
                self._job.put(_LAST_STEP, f"{last} {requests.get('request', self._received)}")
        elif "last_step" in requests:
            step, number = requests["last_step"].split()
            with self._changed:
                self._last_step = int(step), int(number)
                self._changed.notify_all()

    @property
    def is_pending(self) -> bool:
        """True while the last step is undecided; the watchdog thread then polls more often."""
        return self._proposed is not None and self._last_step is None

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received = number
        signal.signal(number, self._previous[number])
