"""The overlap loop: launch step n+1 before step n has been read back.

    turn        host                                          device
    k           plan k · launch k · wait k-1 · commit k-1     k-1 ······· k ···
    k+1         plan k+1 · launch k+1 · wait k · commit k     k ········· k+1 ·

`lookahead` is how many launched steps may stay unread at the end of a turn. 0 is the serial engine: the same
loop, which then reads each step right after its launch.

A step with rows that must follow a grammar is launched in two halves, with the commit in between; the first half, which
is nearly all of it, hides the commit all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxoverlap.engine.step_record import finish_of, record_of
from jaxoverlap.observe.step_log import StepLog, StepRecord
from jaxoverlap.observe.step_times import StepTimes, StepTimesLog, Stopwatch
from jaxoverlap.observe.timeline import Timeline
from jaxoverlap.request import Request
from jaxoverlap.runtime.result_queue import ResultQueue, Runner
from jaxoverlap.scheduler.plan import StepOutput
from jaxoverlap.scheduler.scheduler import Scheduler


class OverlapLoop:
    """One turn at a time; who calls `turn` owns the scheduler and may add and abort between turns.

    Attributes:
      watch: ends a lap with each part of a turn; who works between turns ends laps of its own.
      times: seconds of the last turns; log: the last steps.
      timeline: records what happens when, while there is one.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, lookahead: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.lookahead = lookahead
        self.in_flight = ResultQueue()
        self.watch = Stopwatch()
        self.times = StepTimesLog()
        self.log = StepLog()
        self.timeline: Timeline | None = None
        self.num_turns = 0
        self._was_idle = True

    @property
    def has_work(self) -> bool:
        """Something is unfinished, in flight or not yet handed out."""
        return self.scheduler.has_unfinished or len(self.in_flight) > 0 or self.scheduler.has_news

    def turn(self) -> StepOutput:
        """Launches at most one step, and commits what may not stay unread."""
        scheduler, in_flight, watch = self.scheduler, self.in_flight, self.watch
        committed: list[StepOutput] = []
        num_in_flight = len(in_flight)
        if self._was_idle:
            watch.skip()
        else:
            watch.end("other")

        plan = scheduler.plan()
        watch.end("plan")
        if plan is not None:
            record = record_of(plan, scheduler, turn=self.num_turns, in_flight=num_in_flight)
            self.log.add(record)
            step = self.runner.launch(plan)
            watch.end("launch")
            if plan.is_constrained:
                # What a row may say next depends on what it has said; that is read while the first half runs.
                while in_flight:
                    committed.append(self._commit_oldest())
                allowed = scheduler.allowed_tokens(plan)
                watch.end("mask")
                step.sample(allowed)
                watch.end("launch")
            in_flight.push(plan, step)
            record.launched = watch.now
            if self.timeline is not None:
                self.timeline.follow(record, step)
        if len(in_flight) > self.lookahead or (plan is None and in_flight):
            committed.append(self._commit_oldest())
        if not committed:
            news = scheduler.take_news()
            self._note_finished(self.log.newest, news)
            committed.append(StepOutput(None, (), (), news))
        scheduler.retire()
        watch.end("commit")

        rows, tokens = (0, 0) if plan is None else (len(plan.rows), plan.num_tokens)
        self.times.add(StepTimes._make((*watch.take(), rows, tokens, num_in_flight)))
        self.num_turns += 1
        self._was_idle = not self.has_work
        return StepOutput.joined(committed)

    def _commit_oldest(self) -> StepOutput:
        oldest, result = self.in_flight.pop()
        self.watch.end("wait")
        record = self.log.find(oldest.step_id)
        if record is not None:
            record.read = self.watch.now
        output = self.scheduler.commit(oldest, result)
        self.watch.end("commit")
        if record is not None:
            record.committed = self.watch.now
        self._note_finished(record, output.finished)
        return output

    def _note_finished(self, record: StepRecord | None, finished: Sequence[Request]) -> None:
        if finished and record is not None:
            record.finished += tuple(map(finish_of, finished))
