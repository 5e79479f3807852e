"""Detection of stop strings in streamed text."""

from collections.abc import Sequence


class StopStream:
    """Filter for streamed text that ends it before the first complete stop string.

    Text that may be the beginning of a stop string is held back. The output does not depend on how the text is divided
    into pieces: of two stop strings, the one that ends first counts, and of two that end together, the longer.

    Attributes:
      stopped: True once a stop string is complete; no more text is returned.
    """

    def __init__(self, stops: Sequence[str]):
        assert all(stops), "an empty string would stop everything"
        self._stops = stops
        self._buffer = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Appends text; returns the text that is certain to precede any stop string."""
        if self.stopped:
            return ""
        self._buffer += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._buffer.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found)[1])
        return self._release(len(self._buffer) - self._partial_match())

    def finish(self) -> str:
        """Ends the stream; returns the text that was held back."""
        return "" if self.stopped else self._release(len(self._buffer))

    def _release(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def _partial_match(self) -> int:
        """Returns the length of the longest suffix of the held-back text that is a prefix of a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._buffer))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._buffer[-n:]) for s in self._stops)), 0)
