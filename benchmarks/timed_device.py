"""A device that takes a set time for a step and costs the host nothing else: what is left is the host's own time."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from jaxoverlap.engine.engine import Engine
from jaxoverlap.request import RequestLimits
from jaxoverlap.runtime.buckets import Buckets
from jaxoverlap.runtime.packing import pack
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.config import SchedulerConfig
from jaxoverlap.scheduler.plan import RowStatus, StepPlan, StepResult

VOCAB_SIZE = 1000
_SPIN_SECONDS = 0.0003


@dataclass(slots=True)
class _TimedStep:
    ready_at: float
    result: np.ndarray

    @property
    def output(self) -> _TimedStep:
        """What a timeline waits for."""
        return self

    def block_until_ready(self) -> None:
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))

    def read(self) -> StepResult:
        remaining = self.ready_at - time.perf_counter()
        if remaining > _SPIN_SECONDS:
            time.sleep(remaining - _SPIN_SECONDS)
        while time.perf_counter() < self.ready_at:  # a sleep wakes up some 60 µs late, a device does not
            pass
        return StepResult(self.result)


class TimedDevice:
    """Runs plans in order, each for `step_seconds`; packs them as the real runner does."""

    def __init__(self, config: SchedulerConfig, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.buckets = Buckets(config)
        self.num_rows = config.max_running
        self.pages_per_row = -(-config.limits.max_model_len // config.limits.page_size)
        self.num_outputs = np.zeros(config.max_running, dtype=np.int32)
        self.max_outputs = np.zeros(config.max_running, dtype=np.int32)
        self.compiles_after_ready = 0
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> _TimedStep:
        pack(plan, self.buckets.shape_of(plan), self.num_rows, self.pages_per_row)
        for chunk in plan.chunks:
            self.num_outputs[chunk.row], self.max_outputs[chunk.row] = chunk.num_outputs, chunk.request.max_tokens
        self.num_outputs[plan.rows] += 1
        done = self.num_outputs[plan.rows] >= self.max_outputs[plan.rows]
        result = np.empty((len(plan.rows), 2), dtype=np.int32)
        result[:, 0] = 1
        result[:, 1] = np.where(done, RowStatus.LENGTH, RowStatus.RUNNING)
        for index, chunk in enumerate(plan.chunks):
            if not chunk.publishes:
                self.num_outputs[chunk.row] = chunk.num_outputs
                result[index] = -1, RowStatus.VOID
        self._free_at = max(self._free_at, time.perf_counter()) + self.step_seconds
        return _TimedStep(self._free_at, result)


def timed_engine(rows: int, *, lookahead: int, step_seconds: float, steps: int) -> Engine:
    """An engine with `rows` requests that are about to decode `steps` tokens each."""
    prompt_len = 16
    limits = RequestLimits(VOCAB_SIZE, prompt_len + steps, 16, rows * -(-(prompt_len + steps) // 16))
    config = SchedulerConfig(limits=limits, max_running=rows, max_batched_tokens=prompt_len * 16)
    engine = Engine(config, TimedDevice(config, step_seconds), lookahead=lookahead)
    for _ in range(rows):
        engine.add([1] * prompt_len, SamplingParams(temperature=0, max_tokens=steps))
    while engine.loop.scheduler.num_waiting or engine.loop.scheduler.state.rows.decoding.sum() < rows:
        engine.step()
    engine.loop.times.clear()
    return engine
