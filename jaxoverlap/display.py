"""Progress shown on a terminal, on standard error, and nowhere else.

Standard output is never touched: what a program prints goes where it would go without a bar. There is one bar at a
time; who comes while another is shown goes without.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxoverlap.interrupt import interrupt_deferred

Item = TypeVar("Item")

console = Console(stderr=True)

_HIDDEN_SECONDS = 0.1
"""How long a bar stays away at least once it was hidden, so that hiding it for each of many outputs costs nothing."""
_terminal = threading.Lock()
"""Held while a bar is shown."""


def is_wanted(progress: bool | None) -> bool:
    """None means: when someone is watching. Whatever is wanted, there is nothing to show it on if standard error is
    closed, or is neither a terminal nor a notebook's."""
    if sys.stderr is None or sys.stderr.closed or not (console.is_interactive or console.is_jupyter):
        return False
    return sys.stderr.isatty() if progress is None else progress


def track_warm_up(shapes: Iterable[Item], count: int) -> Iterator[Item]:
    """Shows which step shape is being compiled."""
    bar, is_shown = _progress(), False
    try:
        with interrupt_deferred():
            is_shown = _start(bar)
        task = bar.add_task("compiling", total=count, note="")
        for shape in shapes:
            bar.update(task, note=str(shape))
            yield shape
            bar.advance(task)
    finally:
        if is_shown:
            with interrupt_deferred():
                _stop(bar)


def _start(bar: Progress) -> bool:
    """False if another one is shown, or the terminal has gone. Not to be interrupted, nor is `_stop`: a bar would stay,
    and no other come."""
    if not _terminal.acquire(blocking=False):
        return False
    try:
        bar.start()
    except OSError:
        _stop(bar)
        return False
    except BaseException:
        _terminal.release()
        raise
    return True


def _stop(bar: Progress) -> None:
    try:
        with suppress(OSError):  # the terminal has gone
            bar.stop()
    finally:
        _terminal.release()


class GenerationBar:
    """Requests done, and tokens per second."""

    def __init__(self, bar: Progress | None, total: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task("decoding", total=total, note="") if bar else None
        self._tokens = 0
        self._is_shown = False
        self._show_at = 0.0

    def update(self, *, finished: int, new_tokens: int) -> None:
        if self._bar is None or self._task is None:
            return
        self._tokens += new_tokens
        elapsed = self._bar.tasks[self._task].elapsed or 0.0
        rate = f"{self._tokens / elapsed:,.1f} tokens/s" if elapsed else ""
        self._bar.update(self._task, advance=finished, note=rate)
        self.show()

    def show(self) -> None:
        """Unless another bar is shown, or this was hidden just now."""
        if self._bar is None or self._is_shown or time.monotonic() < self._show_at:
            return
        with interrupt_deferred():
            self._is_shown = _start(self._bar)

    def hide(self) -> None:
        """Until a later `update`: others write to the terminal now. A notebook's bar has a place of its own."""
        if self._bar is not None and not self._bar.console.is_jupyter:
            self.stop()

    def stop(self) -> None:
        if self._bar is None or not self._is_shown:
            return
        with interrupt_deferred():
            self._is_shown = False
            self._show_at = time.monotonic() + _HIDDEN_SECONDS
            _stop(self._bar)


@contextmanager
def generation_bar(total: int | None, *, shown: bool) -> Iterator[GenerationBar]:
    bar = GenerationBar(_progress() if shown else None, total)
    try:
        bar.show()
        yield bar
    finally:
        bar.stop()


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
