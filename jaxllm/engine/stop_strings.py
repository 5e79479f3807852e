"""Stop strings in a stream of text."""

from collections.abc import Sequence


class StopStream:
    """Lets text through up to the first stop string to be completed, and nothing that might become one.

    Where the pieces of the text are cut changes nothing: of two stop strings the one that ends first counts,
    and of two that end together the longer.

    Attributes:
      stopped: a stop string is complete; no more text comes out.
    """

    def __init__(self, stops: Sequence[str]):
        assert all(stops), "an empty string would stop everything"
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is known to stand before any stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found)[1])
        return self._release(len(self._held) - self._open())

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _open(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)
