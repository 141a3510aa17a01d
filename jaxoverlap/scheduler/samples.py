"""Further samples of a prompt, held back until the first has computed it: then its pages are in the prefix cache, and
each sample reads them from there."""

from __future__ import annotations

from collections.abc import Iterator

from jaxoverlap.request import Request, RequestStatus


class HeldSamples:
    """Waiting requests that are in no queue yet, by their leader."""

    def __init__(self) -> None:
        self._held: dict[int, Request] = {}
        self._followers: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._held.values())

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._held

    def get(self, request_id: int) -> Request | None:
        return self._held.get(request_id)

    @staticmethod
    def must_wait(request: Request) -> bool:
        """Its leader is on its way, and has not got its first token yet."""
        leader = request.leader
        return leader is not None and leader.first_token_time is None and leader.status != RequestStatus.FINISHED

    def hold(self, request: Request) -> None:
        assert request.leader is not None
        self._held[request.request_id] = request
        self._followers.setdefault(request.leader.request_id, []).append(request.request_id)

    def remove(self, request: Request) -> None:
        del self._held[request.request_id]

    def release(self, leader: Request) -> list[Request]:
        """Those that wait for a leader which has its first token, or never will."""
        followers = self._followers.pop(leader.request_id, ())
        return [self._held.pop(follower) for follower in followers if follower in self._held]
