"""Calls under way, for one who waits for the next that is done: some run, some rest until their next try."""

from __future__ import annotations

import heapq
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from jaxoverlap.client.calls import Tries
from jaxoverlap.client.methods import Unary
from jaxoverlap.errors import JaxOverlapError
from jaxoverlap.interrupt import interrupt_deferred
from jaxoverlap.outputs import RequestOutput

FAILURES = (grpc.RpcError, grpc.FutureCancelledError)
"""How a future of grpc fails; the second is a status, too, if the service sent it."""


@dataclass(order=True)
class _Call:
    due: float
    index: int
    unary: Unary[RequestOutput] = field(compare=False)
    tries: Tries = field(compare=False)


class Window:
    """Up to as many calls as are added.

    Args:
      begin: starts a try and returns its future.
      error_of: what a failed future tells of.
      now: seconds.
    """

    def __init__(
        self,
        begin: Callable[[Unary[RequestOutput], Tries], Any],
        error_of: Callable[[Any], JaxOverlapError],
        now: Callable[[], float],
    ) -> None:
        self._begin, self._error_of, self._now = begin, error_of, now
        self._running: dict[int, tuple[_Call, Any]] = {}
        self._resting: list[_Call] = []
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._running) + len(self._resting)

    def add(self, index: int, unary: Unary[RequestOutput], tries: Tries) -> None:
        """Starts a call; `index` is its own."""
        self._start(_Call(self._now(), index, unary, tries))

    def take(self) -> tuple[int, RequestOutput | JaxOverlapError]:
        """Waits for a call to end, and says how. There must be one."""
        while True:
            while self._resting and self._resting[0].due <= self._now():
                self._start(heapq.heappop(self._resting))
            wait = max(self._resting[0].due - self._now(), 0.0) if self._resting else None
            try:
                call, future = self._running.pop(self._done.get(timeout=wait))
            except queue.Empty:
                continue
            try:
                with interrupt_deferred():
                    reply = future.result()
                return call.index, call.unary.read(reply)
            except JaxOverlapError as nonsense:  # a reply that can't be read
                return call.index, nonsense
            except FAILURES:
                error = self._error_of(future)
            pause = call.tries.pause_after(error)
            if pause is None:
                return call.index, error
            call.due = self._now() + pause
            heapq.heappush(self._resting, call)

    def close(self) -> None:
        """Cancels what is under way."""
        self._resting.clear()
        with interrupt_deferred():
            for _, future in self._running.values():
                future.cancel()
        self._running.clear()

    def _start(self, call: _Call) -> None:
        with interrupt_deferred():  # see `sync`
            future = self._begin(call.unary, call.tries)
            self._running[call.index] = (call, future)
            future.add_done_callback(lambda _: self._done.put(call.index))
