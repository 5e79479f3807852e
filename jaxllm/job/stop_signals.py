"""Stopping on a signal, after the same step in every process.

A signal reaches some processes of a job and not others, and at different steps: one may be several steps ahead of
another, because steps are handed to the devices before they are done. Were each to stop where it stood, the one
ahead would wait for ever inside a collective that the others never start.

So none decides alone, and no step waits for the others until there is a signal:

1. A process that gets one says so in the coordination service.
2. Each process's watching thread sees it within a moment and pledges the step after the one that was begun last:
   its loop will not pass that step before the end is known.
3. Process 0 makes known the highest pledge, which no process has passed and all reach. All stop after it.

The pledge is made by a thread of its own, so that a loop that is waiting for its devices, and through them for a
process behind it, need not run for the agreement to be found.
"""

import signal
import threading
from types import FrameType
from typing import Any

from jaxllm.job.distributed import Job

_REQUEST, _PLEDGES, _END = "stop/request", "stop/pledges", "stop/end"


class Stop:
    """SIGTERM and SIGINT as a request that the loop meets between steps; a second one is immediate.

    Args:
      job: whose processes stop together.
      first: steps done before the loop begins.
    """

    def __init__(self, job: Job, first: int = 0):
        self._job = job
        self._received = 0
        self._previous: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._begun = first
        self._pledged: int | None = None
        self._end: tuple[int, int] | None = None  # (step, signal)

    def begin(self, step: int) -> None:
        """Called before a step is handed to the devices."""
        with self._changed:
            self._begun = step

    def after(self, step: int) -> int:
        """The signal to stop for after this step, or 0. Waits where the others have not yet said how far they are."""
        if self._job.is_alone:
            return self._received
        with self._changed:
            while self._end is None and self._pledged is not None and step >= self._pledged:
                self._changed.wait(1.0)  # in turns, so that a second signal is noticed
            return self._end[1] if self._end is not None and self._end[0] == step else 0

    def tick(self) -> None:
        """One look at the service, by the watching thread."""
        if self._end is not None:
            return
        requests = self._job.read("stop")
        if "request" not in requests:
            if not self._received:
                return
            self._job.put(_REQUEST, str(self._received))
        if self._pledged is None:
            with self._changed:
                self._pledged = self._begun + 1
            self._job.put(f"{_PLEDGES}/{self._job.index}", str(self._pledged))
        if self._job.leads and "end" not in requests:
            pledges = self._job.read(_PLEDGES)
            if len(pledges) == self._job.count:
                self._job.put(_END, f"{max(map(int, pledges.values()))} {requests.get('request', self._received)}")
        elif "end" in requests:
            step, number = requests["end"].split()
            with self._changed:
                self._end = int(step), int(number)
                self._changed.notify_all()

    @property
    def is_agreeing(self) -> bool:
        """Whether the processes are finding their last step: the watching thread then looks more often."""
        return self._pledged is not None and self._end is None

    def __enter__(self) -> "Stop":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received = number
        signal.signal(number, self._previous[number])
