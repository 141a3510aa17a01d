"""Signals at a moment when nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
"""Those whose handlers may raise: Ctrl-C, what asks a program to end, a timeout."""


@contextmanager
def interrupt_deferred(wake: Callable[[], object] | None = None) -> Iterator[None]:
    """Holds handlers of signals back until the block is done or has failed, then calls them, as often as they came.

    Python's own of Ctrl-C raises KeyboardInterrupt; asyncio's cancels the main task, and raises when it comes again; a
    program's raise what they like. The block should be short. Only the main thread gets signals; elsewhere, and where
    one is ignored, or ends the process at once, or a block around this one is doing the same, this does nothing.

    Args:
      wake: ends a block that may wait for long. Then handlers are called at once; only what they raise is held back,
        and ends the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferral = _Deferral(wake)
    try:
        deferral.begin()
        yield
    finally:
        deferral.end()


class _Deferral:
    """One block's."""

    def __init__(self, wake: Callable[[], object] | None) -> None:
        self.is_over = False
        self._wake = wake
        self._notes: dict[int, _Note] = {}
        self._held_back: list[tuple[int, Callable[[], object]]] = []

    def begin(self) -> None:
        for number in _SIGNALS:
            handler: Any = signal.getsignal(number)
            if isinstance(handler, _Note) and handler.deferral.is_over:  # an exception came before it was taken away
                handler = handler.handler
            if callable(handler) and not isinstance(handler, _Note):
                self._notes[number] = note = _Note(handler, self)
                signal.signal(number, note)

    def come(self, handler: Callable[..., object], number: int, frame: FrameType | None) -> None:
        if self.is_over:
            handler(number, frame)
        elif self._wake is None:
            self._held_back.append((number, partial(handler, number, frame)))
        else:
            try:
                handler(number, frame)
            except BaseException as error:
                self._held_back.append((number, partial(_raise, error)))
                self._wake()

    def end(self) -> None:
        try:
            for number, note in self._notes.items():
                signal.signal(number, note.handler)
        finally:
            self.is_over = True
            _call_all(self._held_back)


class _Note:
    """Stands in for a handler."""

    def __init__(self, handler: Callable[..., object], deferral: _Deferral) -> None:
        self.handler, self.deferral = handler, deferral

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.deferral.come(self.handler, number, frame)


def _raise(error: BaseException) -> None:
    raise error


def _call_all(held_back: list[tuple[int, Callable[[], object]]]) -> None:
    """What one raises does not keep other signals' from being called."""
    for place, (number, call) in enumerate(held_back):
        try:
            call()
        except BaseException:
            _call_all([other for other in held_back[place + 1 :] if other[0] != number])
            raise
