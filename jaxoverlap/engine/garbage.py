"""Garbage collection in an engine's process: full collections only while it is idle.

The engine makes no reference cycles: what it drops is freed at once, a full collection finds nothing, and with 100,000
cached pages it takes 90 ms. Young ones, well below a millisecond, go on for whatever else leaves cycles behind.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from jaxoverlap.observe.histogram import Histogram

_PAUSE_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)

IDLE_SECONDS = 2.0
"""Without work or a message, before a full collection is made."""

_NEVER = 1_000_000_000


def full_collections_only_when_idle() -> None:
    """What start-up has left behind lives for ever; from now on nothing walks through it."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


class IdleCollector:
    """Says how long to sleep, collects once in a while that nothing happens, and notes what other collections took.

    Attributes:
      pauses: in seconds, of the collections between `start` and `stop` that were not made in idle time.
    """

    def __init__(self) -> None:
        self.pauses = Histogram(_PAUSE_SECONDS)
        self._is_clean = True
        self._began = 0.0

    def start(self) -> None:
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        gc.callbacks.remove(self._note)

    def worked(self) -> None:
        self._is_clean = False

    @property
    def timeout(self) -> float | None:
        """Seconds until there is something to do; None if never."""
        return None if self._is_clean else IDLE_SECONDS

    def slept(self) -> None:
        """The timeout has passed, and nothing has come."""
        if not self._is_clean:
            self.stop()
            gc.collect()
            self.start()
            self._is_clean = True

    def _note(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.pauses.add(time.perf_counter() - self._began)
