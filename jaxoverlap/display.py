"""Progress shown on a terminal, on standard error, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Item = TypeVar("Item")

console = Console(stderr=True)


def is_wanted(progress: bool | None) -> bool:
    """None means: when someone is watching."""
    return sys.stderr.isatty() if progress is None else progress


def track_warm_up(shapes: Iterable[Item], count: int) -> Iterator[Item]:
    """Shows which step shape is being compiled."""
    with _progress() as bar:
        task = bar.add_task("compiling", total=count, note="")
        for shape in shapes:
            bar.update(task, note=str(shape))
            yield shape
            bar.advance(task)


class GenerationBar:
    """Requests done, and tokens per second."""

    def __init__(self, bar: Progress | None, total: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task("decoding", total=total, note="") if bar else None
        self._tokens = 0

    def update(self, *, finished: int, new_tokens: int) -> None:
        if self._bar is None or self._task is None:
            return
        self._tokens += new_tokens
        elapsed = self._bar.tasks[self._task].elapsed or 0.0
        rate = f"{self._tokens / elapsed:,.1f} tokens/s" if elapsed else ""
        self._bar.update(self._task, advance=finished, note=rate)


@contextmanager
def generation_bar(total: int | None, *, shown: bool) -> Iterator[GenerationBar]:
    if not shown:
        yield GenerationBar(None, total)
        return
    with _progress() as bar:
        yield GenerationBar(bar, total)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
    )
