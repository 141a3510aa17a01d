"""Ctrl-C at any moment, or SIGTERM: grpc's locks are free afterwards, and the client can be used on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxoverlap import Client, SamplingParams
from tests.client.fake_server import PATIENCE
from tests.interrupts import SignalAtLine

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


def assert_no_line_leaves_a_client_that_hangs(client, call, number, raised):
    interrupted = 0
    for line in range(150):
        with SignalAtLine(number, line, LOCKED) as at:
            try:
                call(client)
            except raised:
                interrupted += 1
            else:
                assert at.lines_left > 0, f"the one at line {line} was lost"
        assert client.generate("more")[0].text == "<more>", line
    assert interrupted > 30


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_any_line_leaves_a_client_that_works(client, name, soon):
    assert_no_line_leaves_a_client_that_hangs(client, CALLS[name], signal.SIGINT, KeyboardInterrupt)


@pytest.mark.parametrize("name", ["stream", "tokenize"])
def test_a_handler_of_sigterm_that_ends_the_program_leaves_a_client_that_works(client, name, soon):
    usual = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        assert_no_line_leaves_a_client_that_hangs(client, CALLS[name], signal.SIGTERM, SystemExit)
    finally:
        signal.signal(signal.SIGTERM, usual)
