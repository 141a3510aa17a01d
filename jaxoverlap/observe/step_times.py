"""Where the host's time of each step went.

A cycle is from the end of one turn of the loop to the end of the next; each moment of it belongs to one lap:

    other · ingest · plan · launch · (mask) · wait · commit · detokenize · send

`wait` is spent blocked on the device. Everything else is host work, and costs something only while the device has
nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

_NO_WAIT = 50e-6
"""Seconds that reading a result takes which is already there."""


class StepTimes(NamedTuple):
    """Seconds of one cycle.

    Attributes:
      plan, launch, commit: of the turn itself; mask: deciding what constrained rows may say, between two halves of a
        step; wait: blocked on the device.
      ingest: taking messages in; detokenize: text from token ids; send: handing results out; other: whatever the
        caller does between two turns.
      launched_rows, launched_tokens: 0 in a turn that launched nothing.
      in_flight: steps that the device still had when this one was launched.
    """

    plan: float
    launch: float
    wait: float
    commit: float
    mask: float = 0.0
    ingest: float = 0.0
    detokenize: float = 0.0
    send: float = 0.0
    other: float = 0.0
    launched_rows: int = 0
    launched_tokens: int = 0
    in_flight: int = 0

    @property
    def host(self) -> float:
        """Host work of the turn itself."""
        return self.plan + self.launch + self.mask + self.commit

    @property
    def cycle(self) -> float:
        """All of it, the wait included."""
        return self.host + self.wait + self.ingest + self.detokenize + self.send + self.other

    @property
    def is_hidden(self) -> bool:
        """The device was seen busy while the host worked: a step was in flight and was still running when the host came
        to wait for it. When a step has ended nobody can tell, so what is not hidden is an upper bound of what costs."""
        return not self.launched_rows or (self.in_flight > 0 and self.wait >= _NO_WAIT)

    @property
    def exposed(self) -> float:
        """Host work of the turn during which the device may have had nothing to do: all of it, or nothing."""
        return 0.0 if self.is_hidden else self.host


# In the order of `StepTimes`.
LAPS = ("plan", "launch", "wait", "commit", "mask", "ingest", "detokenize", "send", "other")
HOST_LAPS = tuple(name for name in LAPS if name != "wait")
_NO_SECONDS = dict.fromkeys(LAPS, 0.0)


class Stopwatch:
    """Splits time into laps, without gaps; what is done in several of the same name adds up.

    Attributes:
      now: when the last lap ended, in seconds of `perf_counter`; last: its name.
      marks: of each lap its name and its end, for whoever sets this to a list. A name of "" ends a pause.
    """

    def __init__(self) -> None:
        self.seconds = _NO_SECONDS.copy()
        self.now = perf_counter()
        self.last = "other"
        self.marks: deque[tuple[str, float]] | None = None

    def end(self, lap: str) -> None:
        now = perf_counter()
        self.seconds[lap] += now - self.now
        self.now, self.last = now, lap
        if self.marks is not None:
            self.marks.append((lap, now))

    def skip(self) -> None:
        """The time since the last lap is nobody's: there was nothing to do."""
        self.now = perf_counter()
        if self.marks is not None:
            self.marks.append(("", self.now))

    def take(self) -> Iterable[float]:
        """The laps of a cycle, which ends here, in the order of `LAPS`."""
        seconds, self.seconds = self.seconds, _NO_SECONDS.copy()
        return seconds.values()


class StepTimesLog:
    """The last turns of the loop, always on: some clock readings a turn."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.records: deque[StepTimes] = deque(maxlen=capacity)

    def add(self, record: StepTimes) -> None:
        self.records.append(record)

    def clear(self) -> None:
        self.records.clear()
