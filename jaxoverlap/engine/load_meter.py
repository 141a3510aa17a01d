"""How many tokens a second come out of the engine, over the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW = 10.0
_BIN = 0.5


class LoadMeter:
    """Counts steps and tokens; of the last seconds by half seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_steps = self.num_tokens = 0
        self._clock = clock
        self._started = clock()
        self._bins: deque[list[float]] = deque()
        """When each began, and its tokens."""

    def add(self, tokens: int) -> None:
        """One step, and the tokens it gave."""
        now = self._clock()
        if not self._bins or now - self._bins[-1][0] >= _BIN:
            self._bins.append([now, 0])
            self._leave_old(now)
        self._bins[-1][1] += tokens
        self.num_steps += 1
        self.num_tokens += tokens

    def tokens_per_second(self) -> float:
        now = self._clock()
        self._leave_old(now)
        seconds = min(_WINDOW, now - self._started)
        return sum(tokens for _, tokens in self._bins) / seconds if seconds > 0 else 0.0

    def _leave_old(self, now: float) -> None:
        while self._bins and self._bins[0][0] <= now - _WINDOW:
            self._bins.popleft()
