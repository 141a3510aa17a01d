"""Time during which a process was seen running."""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds, counted by looks that come every so often.

    Of a longer gap between two looks only `most` seconds count: the process was stopped meanwhile (SIGSTOP, a paused
    container, a suspended machine), and who measures how long something takes must not hold that against it.
    """

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._most, self._clock = most, clock
        self._last_look = clock()

    def look(self) -> float:
        now = self._clock()
        self.seconds += min(now - self._last_look, self._most)
        self._last_look = now
        return self.seconds
