"""Time during which a process was seen running."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_PAUSES = 100


class AwakeClock:
    """Seconds, counted by looks that come every so often.

    Of a longer gap between two looks only `most` seconds count: the process was stopped meanwhile (SIGSTOP, a paused
    container, a suspended machine), and who measures how long something takes must not hold that against it.

    Attributes:
      pauses: the last of such gaps, each from when to when by `clock`.
    """

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self.pauses: deque[tuple[float, float]] = deque(maxlen=_PAUSES)
        self._most, self._clock = most, clock
        self._last_look = clock()

    def look(self) -> float:
        now = self._clock()
        if now - self._last_look > self._most:
            self.pauses.append((self._last_look, now))
        self.seconds += min(now - self._last_look, self._most)
        self._last_look = now
        return self.seconds

    def paused_between(self, begin: float, end: float) -> float:
        """Seconds of the pauses that fall into a time by `clock`."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self.pauses)
