"""Ctrl-C at any moment: grpc's locks are free afterwards, and the client can be used on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from jaxoverlap import Client, SamplingParams
from tests.client.fake_server import PATIENCE
from tests.test_interrupt import press_ctrl_c

LOCKED = ("grpc/_channel.py", "grpc/_common.py", "/threading.py")
CALLS: dict[str, Callable[[Client], Any]] = {
    "stream": lambda client: list(client.stream("abc")),
    "generate": lambda client: client.generate(["abc", "def"]),
    "tokenize": lambda client: client.tokenize("abc"),
    "generate_each": lambda client: list(client.generate_each([("abc", SamplingParams())] * 2)),
}


@pytest.fixture
def client(server) -> Iterator[Client]:
    with Client(server.target, progress=False) as client:
        assert client.tokenize("abc")
        yield client


class CtrlCAtLine:
    """Comes when this thread gets to a line, counted from 0, of what deals with grpc's locks."""

    def __init__(self, line: int) -> None:
        self.lines_left = line + 1

    def __enter__(self) -> CtrlCAtLine:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(LOCKED):
            return None
        if event == "line":
            self.lines_left -= 1
            if self.lines_left == 0:
                press_ctrl_c()
        return self._trace


@pytest.fixture
def soon():
    """What hangs fails."""

    def fail(*_: Any) -> None:
        raise TimeoutError("hangs")

    usual = signal.signal(signal.SIGALRM, fail)
    signal.alarm(2 * int(PATIENCE))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, usual)


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_any_line_leaves_a_client_that_works(client, name, soon):
    interrupted = 0
    for line in range(150):
        with CtrlCAtLine(line) as ctrl_c:
            try:
                CALLS[name](client)
            except KeyboardInterrupt:
                interrupted += 1
            else:
                assert ctrl_c.lines_left > 0, f"the one at line {line} was lost"
        assert client.generate("more")[0].text == "<more>", line
    assert interrupted > 30
