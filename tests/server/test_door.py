"""Requests whose grammar is still being compiled: they wait as others do, and count as others do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from jaxoverlap.engine import messages
from jaxoverlap.engine.core_process import EngineSpec, run_engine
from jaxoverlap.errors import InvalidRequestError, QueueFullError
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from tests.server import toy
from tests.server.rig import PATIENCE, eventually
from tests.server.test_core import Peer
from tests.toy_grammar import ToyGrammar


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, sampling: SamplingParams) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None: ...


class Server:
    """An engine with room for one request in a row and two in the queue, and a front end."""

    def __init__(self) -> None:
        ours, theirs = zip(*[socket.socketpair() for _ in range(2)], strict=True)
        config = {"max_running": 1, "max_queue": 2, "page_size": 4, "num_pages": 900}
        spec = EngineSpec(builder=toy.BUILDER, config=config)
        self._thread = threading.Thread(target=run_engine, args=(spec, theirs[0], [theirs[1]]))
        self._thread.start()
        self._supervisor, self.peer = map(Peer, ours)
        self.peer.next("ready")
        self.engine, self.device = toy.BUILT[-1].engine, toy.BUILT[-1].runner
        self.engine.constraints = self.compiler = SlowCompiler()

    def add(self, key: int, *, ruled: bool = False, n: int = 1, max_tokens: int = 3) -> None:
        structure = StructuredOutput(any_json=True) if ruled else None
        sampling = {"max_tokens": max_tokens, "ignore_eos": True, "n": n, "structured_output": structure}
        self.peer.add(key, [1, 2, 3], **{name: value for name, value in sampling.items() if value is not None})

    def run_one_for_long(self) -> None:
        self.device.allow(0)
        self.add(0, max_tokens=1000)
        eventually(lambda: self.device.is_held)

    def refused(self) -> tuple[int, type[Exception]]:
        _, key, error = self.peer.next("refused")
        return key, type(messages.error_from_wire(error))

    def finished(self, count: int) -> dict[int, str]:
        """Keys and reasons of the next that end."""
        ends: dict[int, str] = {}
        while len(ends) < count:
            ends |= {end[0]: end[1] for end in self.peer.news().finished}
        return ends

    def stop(self) -> None:
        self.device.allow(None)
        self._supervisor.socket.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.peer.socket.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def test_those_who_wait_for_a_grammar_count_as_waiting(server):
    server.run_one_for_long()
    for key in range(1, 6):
        server.add(key, ruled=True)
    server.add(6)
    server.device.allow(None)
    assert [server.refused() for _ in range(4)] == [(key, QueueFullError) for key in (3, 4, 5, 6)]
    assert len(server.compiler.futures) == 2
    server.compiler.futures[0].set_exception(InvalidRequestError("structured_output", 1, "no"))
    assert server.refused() == (1, InvalidRequestError)
    server.compiler.futures[1].set_result(ToyGrammar(0, 3))
    assert server.finished(2) == {0: "length", 2: "grammar_complete"}


def test_a_request_that_was_let_in_is_not_refused_when_its_grammar_is_there(server):
    server.run_one_for_long()
    server.add(1, ruled=True)
    server.add(2, n=3)  # all samples come in with the first, and more wait than may
    server.add(10)
    server.device.allow(5)
    assert server.refused() == (10, QueueFullError)
    assert server.engine.queue_is_full
    server.compiler.futures[0].set_result(ToyGrammar(0, 3))
    server.device.allow(None)
    assert server.finished(5) == {0: "length", 1: "grammar_complete"} | dict.fromkeys((2, 3, 4), "length")


def test_a_bad_grammar_is_told_though_the_queue_is_full(server):
    server.run_one_for_long()
    server.add(1, ruled=True)
    server.add(2, n=3)
    server.device.allow(5)
    eventually(lambda: server.engine.queue_is_full)
    server.compiler.futures[0].set_exception(InvalidRequestError("structured_output", 1, "no"))
    server.device.allow(5)
    assert server.refused() == (1, InvalidRequestError)
    server.device.allow(None)
    assert set(server.finished(4)) == {0, 2, 3, 4}
