"""The watchdog: no turn of the loop lasts for ever, whatever it waits for.

    turn lasts    expected    + seconds            + exit_seconds
                  fine        report, `on_stall`   report, the process ends with `EXIT_CODE`

Expected is what the slowest step of the step log has taken from its launch to its commit, more where more tokens are
in flight than any of them had, and `FIRST_STEP_SECONDS` while none has been committed. A thread looks a few times a
second; a turn pays for two attributes. Compiling at warm-up is no turn, so nothing is expected of it, and time in which
the whole process was stopped does not count. A report has the state of the pipeline, the last steps and the stacks of
all threads. An engine that goes on after a report is taken back in (`on_recovery`).

A process whose interpreter is stuck has no thread that could look. Of a server's engine the front ends notice that.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable

from jaxoverlap.engine.awake_clock import AwakeClock
from jaxoverlap.engine.engine import Engine

logger = logging.getLogger(__name__)

EXIT_CODE = 3
FIRST_STEP_SECONDS = 60.0
_LOOK_SECONDS = 0.25
_LONGEST_LOOK_SECONDS = 5.0
"""What a look may be late by on a busy machine; a later one comes after a pause of the process."""
_NEXT_PHASE = {
    "other": "plans",
    "plan": "launches",
    "launch": "waits for the device",
    "wait": "commits",
    "commit": "hands out",
    "mask": "launches the second half of a step",
}
"""What the loop does after a lap of the stopwatch."""


class Watchdog:
    """Watches an engine from a thread, between `start` and `stop`.

    Args:
      seconds: beyond the expected turn, until the report; infinity watches nothing.
      exit_seconds: from the report until the process ends; infinity lets it be.
      on_stall: called in the watchdog's thread after a report, with the turn's seconds; on_recovery: when it has ended
        after all.
      end: ends the process; tests have one of their own.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        seconds: float,
        exit_seconds: float,
        on_stall: Callable[[float], None] = lambda seconds: None,
        on_recovery: Callable[[], None] = lambda: None,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._engine = engine
        self._seconds, self._exit_seconds = seconds, exit_seconds
        self._on_stall, self._on_recovery, self._end = on_stall, on_recovery, end
        self._stopped = threading.Event()
        self._awake = AwakeClock(_LONGEST_LOOK_SECONDS, time.perf_counter)  # the clock of the step log
        self._turn: float | None = None
        """When the turn under way began, as `Engine.turn_began` says, and when it was first seen, by `_awake`."""
        self._seen = 0.0
        self._limit: float | None = None
        """Seconds that the turn might have taken, once it was reported."""
        self._ending = False
        self._thread = threading.Thread(target=self._watch, name="jaxoverlap-watchdog", daemon=True)

    def start(self) -> None:
        if math.isfinite(self._seconds):
            self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        self._stopped.set()
        if wait and self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        interval = min(_LOOK_SECONDS, self._seconds / 4)
        while not self._stopped.wait(interval):
            self._look()

    def _look(self) -> None:
        began, now = self._engine.turn_began, self._awake.look()
        lasted = now - self._seen
        if began != self._turn:
            if self._limit is not None:
                logger.warning("the engine goes on after %.1f s", lasted)
                self._limit = None
                self._on_recovery()
            self._turn, self._seen = began, now
            return
        if began is None or lasted <= self._seconds:
            return  # nothing is expected to take no time at all, so this is cheap and enough
        if self._limit is None:
            limit = self._seconds + expected_seconds(self._engine, self._awake.paused_between)
            if lasted > limit:
                self._limit = limit
                text = "watchdog: a step has taken %.1f s, %.1f s were the limit\n%s"
                logger.error(text, lasted, limit, report(self._engine))
                self._on_stall(lasted)
        elif lasted > self._limit + self._exit_seconds and not self._ending:
            self._ending = True
            text = "watchdog: a step has taken %.1f s, the process ends with exit code %d\n%s"
            logger.critical(text, lasted, EXIT_CODE, report(self._engine))
            logging.shutdown()
            self._end(EXIT_CODE)


def expected_seconds(engine: Engine, paused_between: Callable[[float, float], float] = lambda begin, end: 0.0) -> float:
    """How long the turn under way may take at the most, by what steps have taken, without pauses of the process."""
    done, slowest, most, tokens = 0, 0.0, 1, 0
    for record in engine.loop.log.last():
        if record.committed is None:
            tokens += record.num_tokens
        elif record.launched is not None:
            done += 1
            taken = record.committed - record.launched - paused_between(record.launched, record.committed)
            slowest, most = max(slowest, taken), max(most, record.num_tokens)
    return slowest * max(1.0, tokens / most) if done else FIRST_STEP_SECONDS


def report(engine: Engine, steps: int = 20) -> str:
    """The state of the pipeline, the last steps and all stacks, for the log. It takes no lock: any thread may call."""
    return f"{pipeline(engine)}\nlast steps:\n{engine.loop.log.describe(steps)}\nthreads:\n{stacks()}"


def pipeline(engine: Engine) -> str:
    """What is in flight, and what the scheduler has, in a few lines."""
    loop, scheduler, now = engine.loop, engine.loop.scheduler, time.perf_counter()
    memory = scheduler.state.memory
    flying = [record for record in loop.log.last() if record.committed is None]
    phase = _NEXT_PHASE.get(loop.watch.last, "works") if engine.turn_began is not None else "is between two turns"
    lines = [
        f"pipeline: turn {loop.num_turns}, the loop {phase}; {len(flying)} steps in flight, lookahead {loop.lookahead}",
        f"  {scheduler.num_running} requests running, {scheduler.num_waiting} waiting; {memory.num_available} of "
        f"{memory.pool.num_pages} pages available, {memory.num_unpromised} not promised",
    ]
    for record in flying:
        since = "not launched" if record.launched is None else f"launched {now - record.launched:.1f} s ago"
        lines.append(f"  step {record.step_id}: {record.kind}, {len(record.rows)} rows, {since}")
    return "\n".join(lines)


def stacks() -> str:
    """Of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:  # faulthandler writes to a file number
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().rstrip()
