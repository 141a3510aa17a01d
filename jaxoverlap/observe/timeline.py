"""A recording of what happens when: the host's laps, the steps, and when the device was ready with each.

Off, it does not exist, and costs nothing. On, a turn pays for a few appends; what a step did is in its record, which
there is anyway, and becomes a picture when the recording is written (`jaxoverlap.observe.chrome_trace`). Only the last
`max_steps` steps are kept.

When a step is ready is seen by a thread of its own, which waits for the step's output and holds no lock meanwhile. To
note the time it needs Python's global lock, which a host at work would give it after 5 ms; so the interpreter's switch
interval is shorter as long as a recording lasts, and the thread asks Linux not to let its timers run late.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
from collections import deque
from time import perf_counter
from typing import Any, Protocol

from jaxoverlap.observe.step_log import StepRecord
from jaxoverlap.observe.step_times import Stopwatch

MAX_STEPS = 10_000
_MARKS_PER_STEP = 12
_SWITCH_SECONDS = 50e-6
_PR_SET_TIMERSLACK = 29


class _ShortSwitches:
    """The interpreter's switch interval, short as long as any recording of the process lasts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recordings = 0
        self._usual = 0.0

    def begin(self) -> None:
        with self._lock:
            if self._recordings == 0:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH_SECONDS)
            self._recordings += 1

    def end(self) -> None:
        with self._lock:
            self._recordings -= 1
            if self._recordings == 0:
                sys.setswitchinterval(self._usual)


_short_switches = _ShortSwitches()


class Output(Protocol):
    """What a step leaves on the device."""

    def block_until_ready(self) -> Any: ...


class Timeline:
    """Records from `start` to `stop`.

    Attributes:
      began, ended: seconds of `perf_counter`.
      steps: the last ones, as they were launched.
      marks: the host's laps, as `Stopwatch.marks` has them.
      num_steps: all that were launched meanwhile.
      clock_offset: to be added to times of the scheduler's clock, to have them of `perf_counter`.
    """

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=max_steps)
        self.marks: deque[tuple[str, float]] = deque(maxlen=max_steps * _MARKS_PER_STEP)
        self.num_steps = 0
        self.began = self.ended = perf_counter()
        self.clock_offset = 0.0
        self._launched: queue.SimpleQueue[tuple[StepRecord, Output] | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="jaxoverlap-timeline", daemon=True)

    def start(self, watch: Stopwatch, clock_now: float) -> None:
        """From now on the watch's laps go here. `clock_now`: what the scheduler's clock says."""
        self.began = perf_counter()
        self.clock_offset = self.began - clock_now
        _short_switches.begin()
        watch.skip()  # what it has begun is not of this recording
        watch.marks = self.marks
        self._waiter.start()

    def follow(self, record: StepRecord, launched: Any) -> None:
        """A step has been launched. A device that has no `output` to wait for is seen when the host reads it."""
        self.num_steps += 1
        self.steps.append(record)
        shape = getattr(launched, "shape", None)
        record.shape = None if shape is None else str(shape)
        output = getattr(launched, "output", None)
        if output is not None:
            self._launched.put((record, output))

    def stop(self, watch: Stopwatch) -> None:
        watch.marks = None
        _short_switches.end()
        self.ended = perf_counter()
        self._launched.put(None)

    def _wait(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # ns, of this thread; 50 µs else
        while (launched := self._launched.get()) is not None:
            record, output = launched
            try:
                output.block_until_ready()
            except Exception:  # who reads the result says so
                return
            record.ready = perf_counter()
            del launched, output  # not to be kept while waiting for the next
