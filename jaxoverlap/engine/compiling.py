"""A grammar that is being compiled, for a thread that may be interrupted.

An exception from a signal's handler within a future's methods could leave its lock taken. The thread that compiles
would then wait for it for ever, with all who want a grammar, and with the end of the program.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future

from jaxoverlap.constraint import CompiledConstraint
from jaxoverlap.errors import JaxOverlapError
from jaxoverlap.interrupt import interrupt_deferred


class Compiling:
    """What `Engine.compile_constraint` gives."""

    def __init__(self, future: Future[CompiledConstraint]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        with interrupt_deferred():
            return self._future.done()

    def when_done(self, call: Callable[[], object]) -> None:
        """Calls something then, in the thread that compiles, or now."""
        with interrupt_deferred():
            self._future.add_done_callback(lambda _: call())

    def result(self) -> CompiledConstraint:
        """Waits for it; raises the `error`."""
        self._wait()
        with interrupt_deferred():
            return self._future.result()

    def error(self) -> JaxOverlapError | None:
        """Waits for it, and says why there is nothing."""
        self._wait()
        with interrupt_deferred():
            return self._future.exception()  # type: ignore[return-value]

    def _wait(self) -> None:
        if not self.is_done:
            done: queue.SimpleQueue[None] = queue.SimpleQueue()
            self.when_done(lambda: done.put(None))
            done.get()
