"""A server within the test's process: the engine on its own thread, a front end on an event loop's, real sockets.

So a test can hold the device at a step, look at the pools, and wait for a state instead of for a while.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from jaxoverlap.engine import messages
from jaxoverlap.engine.core_process import EngineSpec, run_engine
from jaxoverlap.server.address import Address, reserved
from jaxoverlap.server.admin_service import Instance
from jaxoverlap.server.config import ServerConfig
from jaxoverlap.server.frontend import FrontEnd
from jaxoverlap.v1 import admin_service_pb2_grpc, generate_service_pb2, generate_service_pb2_grpc
from tests.fakes import oracle, salt_of
from tests.server import toy
from tests.toy_tokenizer import EOS_ID

PATIENCE = 20.0
"""Seconds after which what should happen at once is taken not to happen."""


def eventually(condition: Callable[[], Any], what: str = "it") -> Any:
    """Waits for a state that is about to come, and returns what the condition returned."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} has not come to pass"
        time.sleep(0.002)
    return value


def generation(prompt: Any = "Hello", **fields: Any) -> generate_service_pb2.Generation:
    """Greedy, seed 5, 8 tokens whatever they are, and ids in the answer, unless said otherwise. Groups are dicts."""
    defaults: dict[str, Any] = {
        "sampling": {"temperature": 0.0, "seed": 5},
        "stop": {"max_tokens": 8, "ignore_eos": True},
        "returns": {"token_ids": True},
    }
    for name, value in fields.items():
        both = isinstance(value, dict) and name in defaults
        fields[name] = defaults[name] | value if both else value
    if isinstance(prompt, str):
        fields["text"] = prompt
    elif prompt is not None:
        fields["token_ids"] = {"ids": prompt}
    return generate_service_pb2.Generation(**(defaults | fields))


def expected(given: generate_service_pb2.Generation) -> list[int]:
    """The oracle's token ids."""
    prompt = toy.TOKENIZER.encode(given.text) if given.WhichOneof("prompt") == "text" else given.token_ids.ids
    stops = [*given.stop.token_ids, *([] if given.stop.ignore_eos else [EOS_ID])]
    ids, _ = oracle(
        list(prompt), given.stop.max_tokens, stops, list(given.stop.token_ids), salt=salt_of(given.sampling.seed)
    )
    return ids


class Caller:
    """Stubs on a channel of its own."""

    def __init__(self, target: str, token: str | None = None, **options: Any) -> None:
        self.channel = grpc.insecure_channel(target, options=[*options.items(), ("grpc.use_local_subchannel_pool", 1)])
        self.generate = generate_service_pb2_grpc.GenerateServiceStub(self.channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)

    def answer(self, given: generate_service_pb2.Generation, timeout: float | None = PATIENCE, **options: Any) -> Any:
        return self.generate.Generate(
            generate_service_pb2.GenerateRequest(generation=given), timeout=timeout, **options
        )

    def stream(self, given: generate_service_pb2.Generation, timeout: float | None = PATIENCE, **options: Any) -> Any:
        request = generate_service_pb2.GenerateStreamRequest(generation=given)
        return self.generate.GenerateStream(request, timeout=timeout, **options)

    def close(self) -> None:
        self.channel.close()


class Rig:
    """A running server.

    Attributes:
      target: for channels; caller: on one.
      device, engine: the toy's.
      frontend: the object itself.
    """

    def __init__(self, engine: dict[str, Any], **server: Any) -> None:
        toy.BUILT.clear()
        links, engine_control, frontend_control = socket.socketpair(), socket.socketpair(), socket.socketpair()
        self._controls = engine_control[0], frontend_control[0]
        spec = EngineSpec(builder=toy.BUILDER, config=engine, profile_dir=server.get("profile_dir"))
        self.engine_error: BaseException | None = None
        self._engine_thread = threading.Thread(target=self._run_engine, args=(spec, engine_control[1], links[0]))
        self.loop = asyncio.new_event_loop()
        config = ServerConfig(**({"listen": "127.0.0.1:0"} | server))
        self._reservation = reserved(config.address)
        address = self._reservation.__enter__()
        self.instance = Instance(instance_id="toy", started=time.monotonic(), grace=config.grace)
        self.exit_code: int | None = None
        self._loop_thread = threading.Thread(
            target=self._run_frontend, args=(config, address, links[1], frontend_control[1])
        )
        self._engine_thread.start()
        self._loop_thread.start()
        self.target = str(address)
        eventually(lambda: self.exit_code is not None or self._is_ready(), "a server")
        assert self.exit_code is None
        self.caller = Caller(self.target)
        self.engine, self.device = toy.BUILT[-1].engine, toy.BUILT[-1].runner

    @property
    def client(self) -> Any:
        """The front end's end of the socket to the engine."""
        return self.frontend._engine

    @property
    def scheduler(self) -> Any:
        return self.engine.loop.scheduler

    def hold(self) -> None:
        """No step ends from now on."""
        self.device.allow(0)

    def step_until(self, condition: Callable[[], Any]) -> Any:
        """Of a held device, lets steps end one by one until a condition holds; returns what it returned."""
        while True:
            eventually(lambda: self.device.is_held or (condition() and not self.engine.has_work), "a step")
            if value := condition():
                return value
            self.device.allow(1)

    def wait_queued(self, count: int) -> list[Any]:
        """The engine's requests, once there are so many. If it is held, it hears of them after its step."""
        eventually(lambda: len(self.client.calls()) == count, "calls")
        return self.step_until(lambda: len(self.requests()) == count and self.requests())

    def requests(self) -> list[Any]:
        """Unfinished ones in the engine, the oldest first."""
        state = self.scheduler.state
        waiting = list(state.waiting.first(len(state.waiting)))
        return sorted([*state.running.values(), *waiting], key=lambda request: request.request_id)

    def wait_idle(self) -> None:
        """Everything has left the engine, and every page and row is back."""
        self.device.allow(None)
        eventually(lambda: not self.engine.has_work and not self.client.calls(), "an idle engine")
        state = self.scheduler.state
        eventually(lambda: state.memory.num_available == state.memory.pool.num_pages, "pages")
        self.scheduler.check_integrity()
        assert not self.engine.has_work and state.rows.requests.tolist() == [None] * len(state.rows.requests)

    def check_probe(self, prompt: str = "probe") -> None:
        """A fresh request is answered as the oracle answers it."""
        given = generation(prompt, stop={"max_tokens": 12})
        assert list(self.caller.answer(given).sequences[0].token_ids) == expected(given)

    def drain_and_stop(self, seconds: float) -> None:
        """As the supervisor, when it has heard of the drained engine before the front end has."""
        self._controls[0].sendall(messages.pack("ask", 0, "drain", []))
        self._controls[1].sendall(messages.pack("stop", seconds, True))

    def stop(self, seconds: float = 0.0) -> None:
        if hasattr(self, "device"):
            self.device.allow(None)
            self.caller.close()
        with suppress(BrokenPipeError):  # it has ended by itself
            self._controls[1].sendall(messages.pack("stop", seconds, False))
        self._loop_thread.join(PATIENCE)
        self._controls[0].close()
        self._engine_thread.join(PATIENCE)
        self._controls[1].close()
        self._reservation.__exit__(None, None, None)
        assert not self._loop_thread.is_alive() and not self._engine_thread.is_alive()

    def _is_ready(self) -> bool:
        frontend = getattr(self, "frontend", None)
        return frontend is not None and frontend._announced

    def _run_engine(self, spec: EngineSpec, control: socket.socket, link: socket.socket) -> None:
        try:
            run_engine(spec, control, [link])
        except BaseException as error:
            self.engine_error = error

    def _run_frontend(
        self, config: ServerConfig, address: Address, link: socket.socket, control: socket.socket
    ) -> None:
        async def work() -> int:
            self.frontend = FrontEnd(config, self.instance, 0, address, None)
            return await self.frontend.run(link, control)

        asyncio.set_event_loop(self.loop)
        try:
            self.exit_code = self.loop.run_until_complete(work())
        finally:
            self.loop.close()


@contextmanager
def running(engine: dict[str, Any] | None = None, **server: Any) -> Iterator[Rig]:
    rig = Rig({"max_running": 4, "page_size": 4, "num_pages": 600} | (engine or {}), **server)
    try:
        yield rig
    finally:
        rig.stop()
