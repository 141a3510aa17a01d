"""Ctrl-C at a moment when nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_deferred(wake: Callable[[], object] | None = None) -> Iterator[None]:
    """Holds Ctrl-C back until the block is done or has failed, then calls the program's handler, as often as it came.

    Python's own raises KeyboardInterrupt; asyncio's cancels the main task, and raises when it comes again.
    The block should be short. Only the main thread gets signals; elsewhere, and where a Ctrl-C is ignored, or ends the
    process at once, or a block around this one is doing the same, this does nothing.

    Args:
      wake: ends a block that may wait for long; called by the signal. A program whose handler is not Python's may have
        other plans than to end the block: there nothing is held back.
    """
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main else None
    if not callable(handler) or isinstance(handler, _Note) or (wake and handler is not signal.default_int_handler):
        yield
        return
    note = _Note(wake)
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for frame in note.frames:
            handler(signal.SIGINT, frame)


class _Note:
    """A handler that keeps what the program's will be called with."""

    def __init__(self, wake: Callable[[], object] | None) -> None:
        self.frames: list[FrameType | None] = []
        self._wake = wake

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.frames.append(frame)
        if self._wake is not None:
            self._wake()
