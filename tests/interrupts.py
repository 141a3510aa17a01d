"""Signals that a test sends to its own process."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any


def press_ctrl_c(times=1):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


class SignalAtLine:
    """A signal that comes when this thread gets to a line, counted from 0, of some files.

    Args:
      files: ends of their names.
    """

    def __init__(self, number: int, line: int, files: tuple[str, ...]) -> None:
        self.lines_left = line + 1
        self._number, self._files = number, files

    def __enter__(self) -> SignalAtLine:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        if event == "line":
            self.lines_left -= 1
            if self.lines_left == 0:
                os.kill(os.getpid(), self._number)
        return self._trace
