"""How many calls may be open at once: in all, and of one connection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from jaxoverlap.server.statuses import TooManyStreamsError


class Admission:
    """Counts open calls.

    Args:
      most: at once in this front end.
      most_per_peer: at once from one connection, which gRPC names by its peer. The peers of a unix socket have no
        names, so they count as one.
    """

    def __init__(self, most: int, most_per_peer: int) -> None:
        self._most, self._most_per_peer = most, most_per_peer
        self._by_peer: Counter[str] = Counter()
        self.num_open = 0

    @contextmanager
    def place(self, peer: str) -> Iterator[None]:
        """A place for a call, as long as it is open.

        Raises:
          TooManyStreamsError: there is none.
        """
        if self.num_open >= self._most:
            raise TooManyStreamsError(f"max_streams: {self._most} calls are open already")
        if self._by_peer[peer] >= self._most_per_peer:
            raise TooManyStreamsError(
                f"max_streams_per_connection: this connection has {self._most_per_peer} calls open already"
            )
        self.num_open += 1
        self._by_peer[peer] += 1
        try:
            yield
        finally:
            self.num_open -= 1
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]
