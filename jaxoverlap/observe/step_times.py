"""Where the host's time of each step went."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import NamedTuple

_NO_WAIT = 50e-6
"""Seconds that reading a result takes which is already there."""


class StepTimes(NamedTuple):
    """Seconds of one turn of the loop. `wait` is spent blocked on the device, the rest is host work.

    `launched_rows` and `launched_tokens` are 0 in a turn that launched nothing; `in_flight` is the number of steps that
    the device still had when this one was launched.
    """

    plan: float
    launch: float
    wait: float
    commit: float
    launched_rows: int
    launched_tokens: int
    in_flight: int

    @property
    def host(self) -> float:
        return self.plan + self.launch + self.commit

    @property
    def exposed(self) -> float:
        """Host work during which the device may have had nothing to do: all of it, unless a step was in flight and was
        still running when the host came to wait for it. An upper bound: when a step has ended, nobody can tell."""
        hidden = not self.launched_rows or (self.in_flight and self.wait >= _NO_WAIT)
        return 0.0 if hidden else self.host


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
