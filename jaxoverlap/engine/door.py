"""Requests that can't be queued yet, because what their text must be is still being compiled. Nobody waits for that.

They count among those that may wait (`max_queue`). Who was let in here is not refused later: one that is compiled while
the queue is full waits on.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from jaxoverlap.constraint import CompiledConstraint
from jaxoverlap.engine.engine import Engine
from jaxoverlap.engine.link import Link
from jaxoverlap.errors import DeadlineError
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Entry:
    """A request as it came: from whom, when it reached the server (`called`), and when the engine. `prompt`: int32."""

    link: Link
    key: int
    prompt: np.ndarray
    sampling: SamplingParams
    options: RequestOptions
    called: float
    arrival: float

    def options_left(self) -> RequestOptions:
        """The options, with what is left of the timeout.

        Raises:
          DeadlineError: nothing.
        """
        if self.options.timeout is None:
            return self.options
        left = self.options.timeout - (time.monotonic() - self.arrival)
        if left <= 0:
            raise DeadlineError(f"timeout: the request was not queued within its {self.options.timeout:g} s")
        return replace(self.options, timeout=left)


class Door:
    """Those who wait, and a bell that rings when one of them need not wait any more, or something else is to be done.

    Attributes:
      waiting: by front end and key.
      bell: readable when it has rung, for `select`.
    """

    def __init__(self, engine: Engine) -> None:
        self.waiting: dict[tuple[int, int], tuple[Entry, Future[CompiledConstraint]]] = {}
        self._engine = engine
        self.bell, self._rope = socket.socketpair()
        self.bell.setblocking(False)
        self._rope.setblocking(False)

    @property
    def num_sequences(self) -> int:
        """Of all who wait."""
        return sum(entry.sampling.num_samples for entry, _ in self.waiting.values())

    @property
    def is_full(self) -> bool:
        """As many wait as may, here and in the engine's queue."""
        scheduler = self._engine.loop.scheduler
        limit, queue = scheduler.config.max_queue, scheduler.state
        return limit is not None and queue.waiting.num_fresh + len(queue.held) + self.num_sequences >= limit

    @property
    def has_compiled(self) -> bool:
        """Somebody need not wait for a grammar any more."""
        return any(compiling.done() for _, compiling in self.waiting.values())

    def keep_waiting(self, entry: Entry) -> bool:
        """Starts what has to be compiled. False if there is nothing."""
        compiling = self._engine.compile_constraint(entry.sampling)
        if compiling is None:
            return False
        self.waiting[entry.link.index, entry.key] = entry, compiling
        compiling.add_done_callback(lambda _: self.ring())
        return True

    def take_compiled(self) -> Iterator[tuple[Entry, Future[CompiledConstraint]]]:
        """Those that need not wait any more, each to be queued or told before the next is asked for; their futures are
        done."""
        for name, (entry, compiling) in list(self.waiting.items()):
            if compiling.done() and (compiling.exception() is not None or not self._engine.queue_is_full):
                del self.waiting[name]
                yield entry, compiling

    def hear_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.bell.recv(4096)

    def close(self) -> None:
        self.waiting.clear()
        self.bell.close()
        self._rope.close()

    def ring(self) -> None:
        """Wakes the engine's thread, from another one."""
        with contextlib.suppress(OSError):  # it is full of rings, or nobody is there any more
            self._rope.send(b"!")
