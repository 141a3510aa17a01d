from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxoverlap import AsyncClient, Client
from jaxoverlap.client.calls import Clock
from tests.client.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


class ScriptedTime:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds


class Driver:
    """Either client behind the methods of `Client`."""

    def __init__(self, is_async: bool, target: str, **config: Any) -> None:
        self.is_async = is_async
        self.client: Any = (AsyncClient if is_async else Client)(target, **config)
        self._runner = asyncio.Runner() if is_async else None
        self._open: list[Any] = []

    def script_time(self, chance: float = 0.0) -> ScriptedTime:
        script = ScriptedTime()
        self.client._clock = Clock(script.now, lambda: chance)

        async def sleep(seconds: float) -> None:
            script.sleep(seconds)

        self.client._sleep = sleep if self.is_async else script.sleep
        return script

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)
        if not self.is_async:
            return method
        if name in ("stream", "generate_each"):
            return lambda *args, **options: self._opened(method(*args, **options))
        return lambda *args, **options: self._run(method(*args, **options))

    def _opened(self, iterator: Any) -> Iterator[Any]:
        drawn = self._drawn(iterator)
        self._open.append(drawn)
        return drawn

    def _drawn(self, iterator: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._run(anext(iterator))
                except StopAsyncIteration:
                    return
        finally:
            self._run(iterator.aclose())

    def _run(self, work: Any) -> Any:
        async def as_coroutine() -> Any:
            return await work

        assert self._runner is not None
        return self._runner.run(as_coroutine())

    def end(self) -> None:
        for drawn in self._open:
            drawn.close()
        self.__getattr__("close")()
        if self._runner is not None:
            self._runner.close()


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Driver]]:
    """Opens a client of either kind."""
    drivers = []

    def run(target: str, **config: Any) -> Driver:
        drivers.append(Driver(request.param == "async", target, progress=False, **config))
        return drivers[-1]

    yield run
    for driver in drivers:
        driver.end()


@pytest.fixture
def client(connect: Callable[..., Driver], server: FakeServer) -> Driver:
    return connect(server.target)
