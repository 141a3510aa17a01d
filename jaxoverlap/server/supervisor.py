"""Starts the engine and the front ends, watches over them, and ends them.

    starting ──(all ready)──► serving ──(SIGTERM, SIGINT)──► draining ──(nothing runs, or grace is over)──► stopping
        └──(SIGTERM, SIGINT)──────────────────────────────────────(again)─────────────────────────────────────┘
    from everywhere ──(a process has failed or is gone)──► stopping, exit code 2

Stopping: front ends end what is open and leave, then the engine; whoever does not is killed. Nobody is left behind,
and the supervisor's own death ends them too, for their sockets end. SIGHUP means nothing: token and certificate files
are read again when they change.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxoverlap.engine import messages
from jaxoverlap.errors import ConflictError, JaxOverlapError, ServerUnavailableError
from jaxoverlap.observe import trace_file
from jaxoverlap.observe.timeline import MAX_STEPS
from jaxoverlap.server.control import Control

logger = logging.getLogger(__name__)

STOPPED, FAILED = 0, 2

_FLUSH_SECONDS = 1.0
"""What answers that are complete get to leave, at least, before a front end ends."""

_TRACE_SECONDS = 30.0
"""What the engine gets to hand out a timeline."""

_EXIT_SECONDS = 1.0
"""What a process gets to exit before it is killed."""


class Part(Protocol):
    """A process, or what stands for one."""

    name: str

    async def wait(self) -> int:
        """Its exit code, when it has ended."""
        ...

    def kill(self) -> None: ...


class Supervisor:
    """See the module's rules.

    Args:
      engine, frontends: started already, each with the socket to it.
      grace: seconds that running calls get to finish.
      trace: file for the engine's timeline, which is recorded from its start until it is stopped; None records none.
      on_ready: called with the name of the model when all are ready.
    """

    def __init__(
        self,
        engine: tuple[Part, socket.socket],
        frontends: Sequence[tuple[Part, socket.socket]],
        *,
        grace: float,
        trace: str | None = None,
        on_ready: Callable[[str], None],
    ) -> None:
        self._engine, self._frontends = engine[0], [part for part, _ in frontends]
        self._sockets = dict([engine, *frontends])
        self._grace, self._trace, self._on_ready = grace, trace, on_ready
        self._controls: dict[Part, Control] = {}
        self._events: asyncio.Queue[tuple[Part | None, list[Any]]] = asyncio.Queue()
        self._exits: dict[Part, asyncio.Task[int]] = {}
        self._is_drained = False
        self._engine_is_ready = False
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._question_ids = itertools.count()
        self.failure: str | None = None

    async def run(self) -> int:
        """Returns the exit code, when all have ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._events.put_nowait, (None, ["signal", number]))
        loop.add_signal_handler(signal.SIGHUP, logger.info, "SIGHUP: files are read again when they change")
        readers = []
        for part, connection in self._sockets.items():
            self._controls[part] = await Control.over(connection)
            readers.append(loop.create_task(self._listen_to(part)))
            self._exits[part] = loop.create_task(part.wait())
        try:
            await self._stop(await self._serve())
        finally:
            for part in self._sockets:
                if not self._exits[part].done():
                    part.kill()
            await asyncio.wait(self._exits.values(), timeout=_EXIT_SECONDS)
            for task in readers:
                task.cancel()
            for control in self._controls.values():
                control.close()
        return STOPPED if self.failure is None else FAILED

    async def metrics(self) -> dict[str, Any]:
        """The engine's own, as `EngineMetrics.read` gives them.

        Raises:
          ServerUnavailableError: it is not ready, or is gone.
        """
        if not self._engine_is_ready or self._exits[self._engine].done():
            raise ServerUnavailableError("there is no engine that could answer")
        return await self._answer_of_engine("metrics")

    async def _answer_of_engine(self, name: str) -> Any:
        question = self._ask_engine(name)
        answer = self._questions[question] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            del self._questions[question]

    def _ask_engine(self, name: str, *arguments: Any) -> int:
        question = next(self._question_ids)
        self._controls[self._engine].send("ask", question, name, list(arguments))
        return question

    async def _listen_to(self, part: Part) -> None:
        async for message in self._controls[part].received():
            match message:
                case ["answer", question, value, error]:
                    answer = self._questions.get(question)
                    if answer is not None and not answer.done():
                        if error is None:
                            answer.set_result(value)
                        else:
                            answer.set_exception(messages.error_from_wire(error))
                case _:
                    self._events.put_nowait((part, message))
        code = await self._exits[part]
        self._events.put_nowait((part, ["gone", code]))

    async def _serve(self) -> float | None:
        """Until it is time to stop; returns the seconds that open calls get to leave. None, when the engine has failed:
        the front ends know, and end their calls with the reason."""
        model = ""
        awaited = {self._engine, *self._frontends}
        deadline: float | None = None
        while True:
            event = await self._next_event(deadline)
            if event is None:
                logger.warning("the grace time of %g s is over: calls are ended", self._grace)
                return _FLUSH_SECONDS
            match event:
                case (None, ["signal", number]):
                    if awaited:
                        self._engine.kill()  # it compiles, and does not listen
                        return _FLUSH_SECONDS
                    if deadline is not None:
                        return 0.0
                    logger.info("%s: draining", signal.Signals(number).name)
                    deadline = time.monotonic() + self._grace
                    self._ask_engine("drain")
                case (part, ["ready", *facts]) if part is not None:
                    if part is self._engine:
                        model, self._engine_is_ready = facts[0]["name"], True
                        if self._trace is not None:
                            self._ask_engine("start_trace", MAX_STEPS)
                    awaited.discard(part)
                    if not awaited:
                        self._on_ready(model)
                case (_, ["status", status]):
                    if deadline is not None and status["draining"] and not status["has_work"]:
                        self._is_drained = True
                        return max(_FLUSH_SECONDS, deadline - time.monotonic())
                case (part, ["failed", text]):
                    self.failure = text
                    return None if part is self._engine else _FLUSH_SECONDS
                case (part, ["gone", code]) if part is not None:
                    self.failure = f"the {part.name} has ended unexpectedly ({_described(code)})"
                    return None if part is self._engine else _FLUSH_SECONDS

    async def _next_event(self, deadline: float | None) -> tuple[Part | None, list[Any]] | None:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._events.get(), timeout)
        return None

    async def _stop(self, flush: float | None) -> None:
        if flush is None:
            flush = _FLUSH_SECONDS
        else:
            for frontend in self._frontends:
                self._controls[frontend].send("stop", flush, self._is_drained)
        await self._all_gone(self._frontends, flush + _EXIT_SECONDS)
        if self._trace is not None and self._engine_is_ready and self.failure is None:
            await self._save_trace(self._trace)
        self._controls[self._engine].close()
        await self._all_gone([self._engine], _EXIT_SECONDS)

    async def _save_trace(self, path: str) -> None:
        try:
            packed = await asyncio.wait_for(self._answer_of_engine("stop_trace"), _TRACE_SECONDS)
            trace_file.save(path, packed)
            logger.info("trace written to %s", path)
        except ConflictError:
            logger.warning("no trace at %s: an operator has stopped the recording, and has it", path)
        except (OSError, TimeoutError, JaxOverlapError) as error:
            logger.error("no trace at %s: %s", path, str(error) or "the engine does not answer")

    async def _all_gone(self, parts: Sequence[Part], seconds: float) -> None:
        """Waits for their ends, or for one more signal."""
        ends = [self._exits[part] for part in parts]
        everybody: asyncio.Task[Any] = asyncio.create_task(asyncio.wait(ends))
        again: asyncio.Task[Any] = asyncio.create_task(self._another_signal())
        await asyncio.wait([everybody, again], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        everybody.cancel()
        again.cancel()
        for part in parts:
            if not self._exits[part].done():
                part.kill()
        await asyncio.wait(ends, timeout=_EXIT_SECONDS)

    async def _another_signal(self) -> None:
        while True:
            part, message = await self._events.get()
            if part is None:
                return
            if message[0] == "failed" and self.failure is None:
                self.failure = message[1]


def _described(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
