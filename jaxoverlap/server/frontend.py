"""A front end: gRPC servers on one side, the engine's and the supervisor's sockets on the other.

It listens from the start, so that probes see it warm up. It ends when the supervisor says so or is gone, or when the
engine is; whatever is open then ends with a status.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxoverlap.engine.messages import EngineFacts
from jaxoverlap.errors import ConfigError, ServerUnavailableError
from jaxoverlap.request import RequestLimits
from jaxoverlap.server import health
from jaxoverlap.server.address import Address
from jaxoverlap.server.admin_service import AdminService, Instance
from jaxoverlap.server.admission import Admission
from jaxoverlap.server.config import ServerConfig
from jaxoverlap.server.control import Control
from jaxoverlap.server.engine_client import EngineClient
from jaxoverlap.server.generate_service import CallLimits, GenerateService, ServedModel
from jaxoverlap.server.guard import Guard
from jaxoverlap.server.text_bound import TextBound
from jaxoverlap.server.tls import server_credentials
from jaxoverlap.server.tokens import Gatekeeper
from jaxoverlap.text.tokenizer import Tokenizer
from jaxoverlap.v1 import admin_service_pb2_grpc, generate_service_pb2_grpc

if TYPE_CHECKING:
    from jaxoverlap.server.tracing import Tracing

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_LAST_WORDS_SECONDS = 1.0
_STREAM_BUFFER = 1 << 20
_NOTICE_SECONDS = 0.5
"""From the first refusals of a server that drains, and its health's word, until it ends connections. A call that comes
at that very moment gRPC cancels, so those who can hear may go first."""
_DRAINING_CONNECTION_MS = 1000
_THREADS = min(4, os.cpu_count() or 1)


class FrontEnd:
    """See the module's rules.

    Args:
      index: among the front ends; the first one has the admin service's own address, if there is one.
      address, admin_address: the config's, with the port that was found.

    Raises:
      ConfigError: a file of tokens or certificates can't be used.
    """

    def __init__(
        self, config: ServerConfig, instance: Instance, index: int, address: Address, admin_address: Address | None
    ) -> None:
        self._config, self._instance, self._index = config, instance, index
        self._address, self._admin_address = address, admin_address
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self._gatekeeper = Gatekeeper(config)
        self._credentials = server_credentials(config)
        self._places = Admission(config.max_streams, config.max_streams_per_connection)
        self._servers: dict[grpc.aio.Server, Address] = {}
        self._guards: list[Guard] = []
        self._turning_away: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._tracing: Tracing | None = None
        if config.otlp_traces_endpoint is not None:
            from jaxoverlap.server.tracing import Tracing  # an extra

            self._tracing = Tracing(config.otlp_traces_endpoint)
        self._announced = False
        self._stop_seconds: float | None = None
        self._is_drained = False

    async def run(self, engine_socket: socket.socket, supervisor_socket: socket.socket) -> int:
        """Serves until it ends; returns the process's exit code."""
        self._supervisor = await Control.over(supervisor_socket)
        reader, writer = await asyncio.open_connection(sock=engine_socket, limit=_STREAM_BUFFER)
        self._engine = EngineClient(reader, writer, self._become_ready)
        self._health = health.Health(self._engine, self._config.stall_timeout)
        self._generate = GenerateService(
            self._engine,
            CallLimits(
                max_prompt_tokens=self._config.max_prompt_tokens,
                max_output_tokens=self._config.max_output_tokens,
                max_pending=int(self._config.max_backlog_kib * 1024),
            ),
            self._threads,
            self._instance.request_prefix(self._index),
            self._tracing,
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._health.update()
            await self._listen()
            tasks = [
                asyncio.create_task(self._follow_engine()),
                asyncio.create_task(self._follow_supervisor()),
                asyncio.create_task(self._keep_house()),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and task.exception() is not None:
                    logger.error("the front end has failed", exc_info=task.exception())
            if self._stop_seconds is None:
                await self._stop(_LAST_WORDS_SECONDS)
                return 1
            if self._is_drained:
                await self._hear_all(self._stop_seconds)
            await self._stop(self._stop_seconds)
            return 0
        except ConfigError as error:
            self._supervisor.send("failed", str(error))
            await self._stop(0)
            return 1
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)
            self._threads.shutdown(wait=False, cancel_futures=True)
            if self._tracing is not None:
                await self._tracing.close()
            writer.close()
            self._supervisor.close()

    # ---------------------------------------------------------------- what goes on at once

    async def _follow_engine(self) -> None:
        await self._engine.run()

    async def _follow_supervisor(self) -> None:
        """Returns when it is time to stop, or the supervisor is gone."""
        async for message in self._supervisor.received():
            match message:
                case ["stop", seconds, drained]:
                    self._stop_seconds, self._is_drained = seconds, drained
                    return

    async def _keep_house(self) -> None:
        while True:
            if self._engine.status.draining and self._turning_away is None:
                self._turning_away = asyncio.create_task(self._turn_away())
            await self._health.update()
            if self._health.is_beyond_hope:
                self._supervisor.send("failed", "the engine hangs")
                return
            if not self._announced and self._engine.facts is not None:
                self._supervisor.send("ready")
                self._announced = True
            self._gatekeeper.refresh()
            for call in list(self._generate.streams):
                call.judge_reader(self._config.reader_timeout)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.next_change(), _TICK_SECONDS)

    async def _become_ready(self, facts: EngineFacts) -> None:
        source = facts.tokenizer_source
        loop = asyncio.get_running_loop()
        tokenizer = await loop.run_in_executor(
            self._threads, Tokenizer.from_source, Path(source) if isinstance(source, str) else source
        )
        self._generate.model = ServedModel(
            name=self._config.served_name or facts.name,
            tokenizer=tokenizer,
            limits=RequestLimits(facts.vocab_size, facts.max_model_len, facts.page_size, facts.num_pages),
            eos_token_ids=tuple(facts.eos_token_ids),
            text_bound=await loop.run_in_executor(self._threads, TextBound.of, tokenizer),
            sampling_defaults=facts.sampling_defaults,
        )
        gc.collect()
        gc.freeze()

    # ---------------------------------------------------------------- servers

    async def _listen(self, *, anew: bool = False) -> None:
        """`anew` leaves out unix sockets: they have one listener each, and no balancer."""
        admin = self._admin_address
        if not (anew and self._address.path):
            await self._serve(self._address, generates=True, administers=admin is None)
        if admin is not None and self._index == 0 and not (anew and admin.path):
            await self._serve(admin, generates=False, administers=True)

    async def _turn_away(self) -> None:
        """Has callers close their connections: the next one, by way of a balancer, may get them to another server.

        Calls that run finish on the old ones. Who connects here again, a probe perhaps, finds new servers, with
        connections that do not last.
        """
        await asyncio.sleep(_NOTICE_SECONDS)
        if self._is_stopping:
            return
        old = [server for server, address in self._servers.items() if not address.path]
        try:
            await self._listen(anew=True)
        except ConfigError as error:
            logger.warning("callers keep their connections: %s", error)
            old = []
        await asyncio.gather(*(server.stop(math.inf) for server in old))

    async def _serve(self, address: Address, *, generates: bool, administers: bool) -> None:
        options = _options(self._config, lasting=not self._engine.status.draining)
        guard = Guard(self._gatekeeper, self._places, self._config.max_message_bytes)
        server = grpc.aio.server(interceptors=[guard], options=options)
        self._guards.append(guard)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        names = [reflection.SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
        if generates:
            generate_service_pb2_grpc.add_GenerateServiceServicer_to_server(self._generate, server)
            names.append(health.GENERATE)
        if administers:
            service = AdminService(self._engine, self._generate, self._instance)
            admin_service_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
            names.append(health.ADMIN)
        reflection.enable_server_reflection(names, server)
        self._servers[server] = address
        umask = os.umask(0o177) if address.path else None  # a unix socket is its owner's alone
        try:
            for target in address.targets():
                if self._credentials is None:
                    server.add_insecure_port(target)
                else:
                    server.add_secure_port(target, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        finally:
            if umask is not None:
                os.umask(umask)
        await server.start()

    async def _hear_all(self, seconds: float) -> None:
        """The supervisor may know first that the engine has drained: its last words are still on their way to us."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._engine.until(lambda status: status.draining and not status.has_work), seconds)

    async def _stop(self, seconds: float) -> None:
        """Ends what still waits for the engine, and gives the rest so long to reach its readers."""
        self._is_stopping = True
        await self._health.update()
        await self._health.servicer.enter_graceful_shutdown()
        self._engine.fail_all(ServerUnavailableError("the server is shutting down"))
        stops = [asyncio.create_task(server.stop(seconds)) for server in self._servers]
        await asyncio.sleep(0)  # watches of health say their last word
        for guard in self._guards:
            guard.end_idle()
        if stops:  # bounded once more, should a call not let go
            await asyncio.wait(stops, timeout=seconds + _LAST_WORDS_SECONDS)


def _options(config: ServerConfig, *, lasting: bool) -> list[tuple[str, int]]:
    message_bytes = config.max_message_bytes
    return [
        *([] if lasting else [("grpc.max_connection_age_ms", _DRAINING_CONNECTION_MS)]),
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_metadata_size", 16 * 1024),
        # Connections of callers that have vanished are noticed within a minute, and theirs are not too noisy.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),  # else a minute, whatever the line above says
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
    ]
