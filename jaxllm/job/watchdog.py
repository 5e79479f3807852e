"""A job ends together: when one of its processes dies or fails, the others say so and end too.

A process that is gone leaves the others inside a collective operation, where they may wait for ever and where no
Python code runs. So each process has a watching thread. It signs in the coordination service every two seconds and
reads there what the others have to say; process 0 also notes who has stopped signing. Where one has failed or is
gone, the thread gives its own process a moment to end by itself, then prints one line and ends it with status 1.

The library below watches too, and aborts the process in C++ when process 0, which keeps the service, goes away.
That cannot be turned off, but its abort is a signal, and gets our line and status as well.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

from jaxllm.job.distributed import Job

_SIGN_SECONDS = 2.0
_LOOK_SECONDS = 0.5
# Without a sign for so long, a process is gone: in general, and where a collective operation has failed already.
_GONE_SECONDS, _GONE_SECONDS_SUSPECT = 20.0, 6.0
_GRACE_SECONDS = 5.0  # for a process to end by itself, in good order
_SIGABRT = 6


class Watchdog:
    """The watching thread of one process; nothing where the job has but one.

    Args:
      job: to watch.
    Attributes:
      tick: called at every look; set by the loop (`Stop.tick`).
      is_hurried: whether to look more often for now.
      last_good: words on the last good checkpoint, for the line.
    """

    def __init__(self, job: Job):
        self.tick: Callable[[], None] = lambda: None
        self.is_hurried: Callable[[], bool] = lambda: False
        self.last_good: Callable[[], str] = lambda: "no checkpoint was looked for yet"
        self._job = job
        self._signs: dict[str, tuple[str, float]] = {}
        self._closing = threading.Event()
        self._last_words = threading.Lock()  # never released
        self._signed = 0.0
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        if not job.is_alone:
            _on_abort(self._aborted)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread; the job is about to end well."""
        if not self._job.is_alone:
            self._closing.set()
            self._thread.join()

    def failed(self, error: BaseException, line: str) -> None:
        """Tells the others that this process ends with an error, and waits a moment so that they can read it.

        An error of the devices is first held against the rest of the job: where a process is gone, that is the
        reason, and this one ends with the line that says so: the watching thread's, or where the service cannot be
        reached, which process 0 keeps, one said here.
        """
        if self._job.is_alone:
            return
        of_devices = isinstance(error, (RuntimeError, ValueError))  # what failed collectives raise
        try:
            if of_devices:
                self._job.put("suspect/job", "yes")
                time.sleep(_GONE_SECONDS_SUSPECT + _SIGN_SECONDS + 2 * _LOOK_SECONDS)
            self._closing.set()
            self._job.put(f"failed/{self._job.index}", line)
            self._wait_for_others()
        except Exception as trouble:  # without the service there is no one to tell
            if of_devices and not self._job.leads:
                self._end(self._is_gone("0"))
            print(f"(the other processes could not be told: {type(trouble).__name__})", file=sys.stderr)

    def _wait_for_others(self) -> None:
        """Process 0 takes the service with it, on which the others would abort: it goes last."""
        self._job.put(f"left/{self._job.index}", "yes")
        end = time.monotonic() + _GRACE_SECONDS + 4 * _LOOK_SECONDS
        while self._job.leads and time.monotonic() < end and len(self._job.read("left")) < self._job.count:
            time.sleep(_LOOK_SECONDS / 5)

    def _watch(self) -> None:
        reached = time.monotonic()
        while not self._closing.wait(_LOOK_SECONDS / 10 if self.is_hurried() else _LOOK_SECONDS):
            try:
                self._look()
                reached = time.monotonic()
            except Exception as error:  # whatever it was, it is told below if it stays
                if time.monotonic() - reached > _GONE_SECONDS_SUSPECT:
                    self._end(f"{self._is_gone('0')} ({type(error).__name__})")

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._signed >= _SIGN_SECONDS:
            self._job.put(f"signs/{self._job.index}", str(time.time_ns()))
            self._signed = now
            if self._job.leads:
                self._note_the_gone(now)
        self.tick()
        for process, line in self._job.read("failed").items():
            if int(process) != self._job.index:
                self._end(f"process {process} has failed: {line}", leave=True)
        for process in self._job.read("gone"):
            self._end(self._is_gone(process))

    def _note_the_gone(self, now: float) -> None:
        limit = _GONE_SECONDS_SUSPECT if self._job.read("suspect") else _GONE_SECONDS
        signs = self._job.read("signs")
        for process in map(str, range(self._job.count)):
            sign = signs.get(process, "")
            if process not in self._signs or self._signs[process][0] != sign:
                self._signs[process] = (sign, now)
            elif now - self._signs[process][1] > limit:
                self._job.put(f"gone/{process}", "yes")

    def _end(self, reason: str, leave: bool = False) -> None:
        """Ends the process, unless it is about to end by itself."""
        if leave and self._closing.wait(_GRACE_SECONDS):
            return
        self._print(reason)
        if leave:
            self._wait_for_others()
        elif self._job.leads:
            self._closing.wait(3 * _LOOK_SECONDS)  # the others read of it in the service, which is here
        os._exit(1)

    def _print(self, reason: str) -> None:
        """Says why the process ends, once: of the threads that come here, the first one ends it and the rest wait."""
        self._last_words.acquire()
        print(
            f"error: {reason}; {self.last_good()}; run the same command again, in every process, to go on from there",
            file=sys.stderr,
            flush=True,
        )

    def _is_gone(self, process: str) -> str:
        return f"process {process} of {self._job.count} is gone: it was killed, or its machine is down"

    def _aborted(self) -> None:
        if self._job.leads:
            last = max((seen for _, seen in self._signs.values()), default=0.0)
            late = [process for process, (_, seen) in self._signs.items() if last - seen > _GONE_SECONDS_SUSPECT]
            self._print(self._is_gone(late[0]) if late else "the job's coordination has failed")
        else:
            self._print(self._is_gone("0"))
        os._exit(1)


_abort_handlers: list[object] = []  # what C calls must not be collected


def _on_abort(action: Callable[[], None]) -> None:
    """Runs `action` when C++ code aborts the process.

    A handler from the signal module would not do: it runs when the main thread comes back to Python, and an abort
    never goes back.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: action())
    _abort_handlers.append(handler)
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, type(handler)], ctypes.c_void_p
    library.signal(_SIGABRT, handler)
