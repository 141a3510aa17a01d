"""Requests that wait for a row, in the order in which they should get one.

    key = (priority, 0 if it has run before else 1, arrival)        the lowest goes first

So a preempted request is ahead of those of its priority that never started, and keeps its own place by age.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sortedcontainers import SortedDict

from jaxoverlap.request import Request

Key = tuple[int, int, int]


class WaitingQueue:
    """Add, remove and look ahead cost O(log n), however long the queue is."""

    def __init__(self) -> None:
        self._by_key: SortedDict[Key, Request] = SortedDict()
        self._by_id: dict[int, Request] = {}
        self.num_fresh = 0
        """Those that have never run; a limit on the queue counts only these."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def get(self, request_id: int) -> Request | None:
        return self._by_id.get(request_id)

    def push(self, request: Request) -> None:
        assert request.request_id not in self._by_id, f"request {request.request_id} queued twice"
        self._by_key[_key(request)] = request
        self._by_id[request.request_id] = request
        self.num_fresh += not request.num_preemptions

    def remove(self, request: Request) -> None:
        del self._by_id[request.request_id]
        del self._by_key[_key(request)]
        self.num_fresh -= not request.num_preemptions

    def head(self) -> Request | None:
        return self._by_key.peekitem(0)[1] if self._by_id else None

    def first(self, count: int) -> Iterator[Request]:
        """The first `count` at the most, in order. The queue must not change meanwhile."""
        return map(self._by_key.__getitem__, islice(self._by_key, count))


def _key(request: Request) -> Key:
    return request.priority, 0 if request.num_preemptions else 1, request.request_id
