"""How many tokens a second come out of the engine, over the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW = 10.0
_SAMPLE = 0.5


class LoadMeter:
    """Counts steps and tokens; a sample each half a second is enough."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_steps = self.num_tokens = 0
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])

    def add(self, tokens: int) -> None:
        """One step, and the tokens it gave."""
        now = self._clock()
        if now - self._samples[-1][0] >= _SAMPLE:
            self._samples.append((now, self.num_tokens))
            self._leave_old(now)
        self.num_steps += 1
        self.num_tokens += tokens

    def tokens_per_second(self) -> float:
        now = self._clock()
        self._leave_old(now)
        since, before = self._samples[0]
        # What came before the oldest sample of an engine that has been idle does not count.
        since = max(since, now - _WINDOW)
        return (self.num_tokens - before) / (now - since) if now > since else 0.0

    def _leave_old(self, now: float) -> None:
        while len(self._samples) > 1 and self._samples[1][0] <= now - _WINDOW:
            self._samples.popleft()
