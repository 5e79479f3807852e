"""Watchdog of a multi-process job: if one process dies or fails, the others report it and exit too.

A dead process leaves the others in a collective, where they may wait forever and where no Python code runs. Each
process therefore has a watchdog thread. It writes a heartbeat to the coordination service every two seconds and reads
the messages of the other processes there; process 0 also marks processes whose heartbeat has stopped. If a process has
failed, the thread gives its own process a few seconds to exit by itself; then, or at once if a process is gone, it
prints one line and exits with status 1.

JAX's distributed runtime watches too, and aborts the process in C++ if process 0, which runs the service, is gone. That
cannot be disabled. Its abort raises SIGABRT, whose handler here prints the same line and exits with the same status.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

from jaxllm.job.distributed import Job

_HEARTBEAT_SECONDS = 2.0
_POLL_SECONDS = 0.5
# A process without a heartbeat for this long is considered gone: in general, and after a failed collective.
_GONE_SECONDS, _GONE_SECONDS_SUSPECT = 20.0, 6.0
_GRACE_SECONDS = 5.0  # for a process to exit by itself
_SIGABRT = 6


class Watchdog:
    """Watchdog thread of one process; does nothing in a single-process job.

    Args:
      job: the job to watch.
    Attributes:
      on_poll: called at every poll; the training loop sets it to `StopSignals.poll`.
      needs_fast_polling: returns True if polls should be more frequent.
      checkpoint_status: returns a phrase about the last good checkpoint, for the error line.
    """

    def __init__(self, job: Job):
        self.on_poll: Callable[[], None] = lambda: None
        self.needs_fast_polling: Callable[[], bool] = lambda: False
        self.checkpoint_status: Callable[[], str] = lambda: "checkpoints were not opened yet"
        self._job = job
        self._heartbeats: dict[str, tuple[str, float]] = {}
        self._closing = threading.Event()
        self._reporting = threading.Lock()  # never released
        self._last_heartbeat = 0.0
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        if not job.is_alone:
            _on_abort(self._report_abort)
            self._thread.start()

    def close(self) -> None:
        """Stops the thread; call it when the job ends without error."""
        if not self._job.is_alone:
            self._closing.set()
            self._thread.join()

    def report_failure(self, error: BaseException, line: str) -> None:
        """Reports to the other processes that this one ends with an error, and waits briefly so that they can read it.

        A device error may be the consequence of a dead process, so it first waits for the heartbeats to show one. If
        they do, the watchdog thread ends this process with that reason. If the service is unreachable, process 0,
        which runs it, is gone, and this method ends the process with that reason.

        Args:
          error: the exception that ends this process.
          line: one-line message for the other processes.
        """
        if self._job.is_alone:
            return
        of_devices = isinstance(error, (RuntimeError, ValueError))  # the types that failed collectives raise
        try:
            if of_devices:
                self._job.put("suspect/job", "yes")
                time.sleep(_GONE_SECONDS_SUSPECT + _HEARTBEAT_SECONDS + 2 * _POLL_SECONDS)
            self._closing.set()
            self._job.put(f"failed/{self._job.index}", line)
            self._wait_for_others()
        except Exception as unreachable:  # without the service the others cannot be reached
            if of_devices and not self._job.is_leader:
                self._exit_process(self._gone("0"))
            print(f"(could not notify the other processes: {type(unreachable).__name__})", file=sys.stderr)

    def _wait_for_others(self) -> None:
        """Makes process 0 exit last: the service ends with it, and the other processes would abort."""
        self._job.put(f"left/{self._job.index}", "yes")
        end = time.monotonic() + _GRACE_SECONDS + 4 * _POLL_SECONDS
        while self._job.is_leader and time.monotonic() < end and len(self._job.read("left")) < self._job.count:
            time.sleep(_POLL_SECONDS / 5)

    def _watch(self) -> None:
        reached = time.monotonic()
        while not self._closing.wait(_POLL_SECONDS / 10 if self.needs_fast_polling() else _POLL_SECONDS):
            try:
                self._poll()
                reached = time.monotonic()
            except Exception as error:  # may be transient; reported below if it persists
                if time.monotonic() - reached > _GONE_SECONDS_SUSPECT:
                    self._exit_process(f"{self._gone('0')} ({type(error).__name__})")

    def _poll(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat >= _HEARTBEAT_SECONDS:
            self._job.put(f"heartbeats/{self._job.index}", str(time.time_ns()))
            self._last_heartbeat = now
            if self._job.is_leader:
                self._mark_dead(now)
        self.on_poll()
        for process, line in self._job.read("failed").items():
            if int(process) != self._job.index:
                self._exit_process(f"process {process} failed: {line}", leave=True)
        for process in self._job.read("gone"):
            self._exit_process(self._gone(process))

    def _mark_dead(self, now: float) -> None:
        limit = _GONE_SECONDS_SUSPECT if self._job.read("suspect") else _GONE_SECONDS
        heartbeats = self._job.read("heartbeats")
        for process in map(str, range(self._job.count)):
            heartbeat = heartbeats.get(process, "")
            if process not in self._heartbeats or self._heartbeats[process][0] != heartbeat:
                self._heartbeats[process] = (heartbeat, now)
            elif now - self._heartbeats[process][1] > limit:
                self._job.put(f"gone/{process}", "yes")

    def _exit_process(self, reason: str, leave: bool = False) -> None:
        """Ends the process with status 1; with `leave`, only if it does not exit by itself within the grace period."""
        if leave and self._closing.wait(_GRACE_SECONDS):
            return
        self._print(reason)
        if leave:
            self._wait_for_others()
        elif self._job.is_leader:
            self._closing.wait(3 * _POLL_SECONDS)  # the others read it in the service, which this process runs
        os._exit(1)

    def _print(self, reason: str) -> None:
        """Prints why the process ends, once: the first thread to get here ends the process, and other threads block."""
        self._reporting.acquire()
        print(
            f"error: {reason}; {self.checkpoint_status()}; run the same command again, in every process, to resume",
            file=sys.stderr,
            flush=True,
        )

    def _gone(self, process: str) -> str:
        return f"lost process {process} of {self._job.count}: it was killed, or its machine is down"

    def _report_abort(self) -> None:
        if self._job.is_leader:
            last = max((seen for _, seen in self._heartbeats.values()), default=0.0)
            late = [process for process, (_, seen) in self._heartbeats.items() if last - seen > _GONE_SECONDS_SUSPECT]
            self._print(self._gone(late[0]) if late else "the job's coordination service failed")
        else:
            self._print(self._gone("0"))
        os._exit(1)


_abort_handlers: list[object] = []  # callbacks from C must not be garbage-collected


def _on_abort(action: Callable[[], None]) -> None:
    """Runs `action` when C++ code aborts the process.

    A handler from the signal module does not work: it runs when the main thread returns to Python, and an abort never
    does.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: action())
    _abort_handlers.append(handler)
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, type(handler)], ctypes.c_void_p
    library.signal(_SIGABRT, handler)
