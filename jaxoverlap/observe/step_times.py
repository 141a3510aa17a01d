"""Where the host's time of each step went."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import NamedTuple


class StepTimes(NamedTuple):
    """Seconds of one turn of the loop. `wait` is spent blocked on the device, the rest is host work.

    `launched_rows` and `launched_tokens` are 0 in a turn that launched nothing.
    """

    plan: float
    launch: float
    wait: float
    commit: float
    launched_rows: int
    launched_tokens: int

    @property
    def host(self) -> float:
        return self.plan + self.launch + self.commit


class Stopwatch:
    """Splits a turn into laps; what is done in several of the same name adds up."""

    def __init__(self) -> None:
        self.seconds = {"plan": 0.0, "launch": 0.0, "wait": 0.0, "commit": 0.0}
        self._last = perf_counter()

    def end(self, lap: str) -> None:
        now = perf_counter()
        self.seconds[lap] += now - self._last
        self._last = now


class StepTimesLog:
    """The last turns of the loop, always on: some clock readings a turn."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.records: deque[StepTimes] = deque(maxlen=capacity)

    def add(self, record: StepTimes) -> None:
        self.records.append(record)

    def clear(self) -> None:
        self.records.clear()
