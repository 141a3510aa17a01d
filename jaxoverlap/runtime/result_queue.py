"""Steps in flight, oldest first. Popping is the one place where the host waits for the device.

A pending step carries the plan it was launched with, so its result can't be given to anyone else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from jaxoverlap.scheduler.plan import StepPlan, StepResult


class LaunchedStep(Protocol):
    """A step the device is working on."""

    def sample(self, allowed: np.ndarray) -> None:
        """Launches the second half of a constrained step: int32 [len(plan.rows), mask words]."""
        ...

    def read(self) -> StepResult:
        """Waits. Called by `ResultQueue.pop` only."""
        ...


class Runner(Protocol):
    """Whatever executes plans, in the order in which they are launched.

    Attributes:
      compiles_after_ready: functions that had to be compiled while serving; anything but 0 is a bug.
    """

    @property
    def compiles_after_ready(self) -> int: ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a step and returns at once; of a constrained plan, the first half."""
        ...


class PendingStep(NamedTuple):
    plan: StepPlan
    launched: LaunchedStep


class ResultQueue:
    """First in, first out."""

    def __init__(self) -> None:
        self._pending: deque[PendingStep] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingStep]:
        return iter(self._pending)

    def push(self, plan: StepPlan, launched: LaunchedStep) -> None:
        self._pending.append(PendingStep(plan, launched))

    def pop(self) -> tuple[StepPlan, StepResult]:
        """Waits for the oldest step. It stays in the queue if the wait is interrupted."""
        pending = self._pending[0]
        result = pending.launched.read()
        self._pending.popleft()
        return pending.plan, result
