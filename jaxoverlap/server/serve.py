"""Starts a server and runs it to its end."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

from jaxoverlap.engine.core_process import EngineSpec
from jaxoverlap.errors import JaxOverlapError
from jaxoverlap.server.address import Address, reserved
from jaxoverlap.server.config import ServerConfig
from jaxoverlap.server.parts import ENGINE_MODULE, FRONTEND_MODULE, EngineThread, FrontEndTask, ProcessPart
from jaxoverlap.server.supervisor import Part, Supervisor

if TYPE_CHECKING:
    from jaxoverlap.server.metrics import EngineCollector

logger = logging.getLogger(__name__)


class ServerFailure(JaxOverlapError):
    """A part of the server has failed, and with it the whole."""


def serve(config: ServerConfig, engine: EngineSpec, on_ready: Callable[[str, Address], None]) -> None:
    """Runs a server until a signal asks it to stop.

    Args:
      on_ready: called with the model's name and the address, when calls are taken.

    Raises:
      ConfigError: it can't listen there, or a file of tokens or certificates can't be used.
      ServerFailure: it could not start, or could not go on.
    """
    if config.has_secrets:
        from jaxoverlap.server.tls import server_credentials  # brings grpc, which the supervisor does without
        from jaxoverlap.server.tokens import Gatekeeper

        Gatekeeper(config)
        server_credentials(config)
    with ExitStack() as stack:
        address = stack.enter_context(reserved(config.address))
        admin = config.admin_address
        admin_address = None if admin is None else stack.enter_context(reserved(admin))
        collector = None
        if config.metrics_port is not None:
            from jaxoverlap.server.metrics import EngineCollector, serving_metrics  # a tenth of a second

            collector = EngineCollector()
            port = stack.enter_context(serving_metrics(config.metrics_host, config.metrics_port, collector))
            logger.info("metrics at http://%s/metrics", Address(config.metrics_host, port))
        failure = asyncio.run(_run(config, engine, address, admin_address, collector, on_ready))
    if failure is not None:
        raise ServerFailure(failure)


async def _run(
    config: ServerConfig,
    engine: EngineSpec,
    address: Address,
    admin_address: Address | None,
    collector: EngineCollector | None,
    on_ready: Callable[[str, Address], None],
) -> str | None:
    instance = {"instance_id": uuid.uuid4().hex[:12], "started": time.monotonic(), "grace": config.grace}
    links = [socket.socketpair() for _ in range(config.frontends)]
    engine_control, engine_side = socket.socketpair()
    controls = [socket.socketpair() for _ in range(config.frontends)]
    specs = [
        {
            "config": asdict(config),
            "instance": instance,
            "index": index,
            "address": asdict(address),
            "admin_address": None if admin_address is None else asdict(admin_address),
        }
        for index in range(config.frontends)
    ]
    frontends: list[Part]
    engine_part: Part
    if config.in_process:
        from jaxoverlap.server.frontend_process import FrontEndSpec, run_frontend

        engine_part = EngineThread(engine, engine_side, links[0][0])
        work = run_frontend(FrontEndSpec(**specs[0]), links[0][1], controls[0][1])  # type: ignore[arg-type]
        frontends = [FrontEndTask(asyncio.create_task(work))]
    else:
        ours = [pair[0] for pair in links]
        engine_part = await ProcessPart.start("engine", ENGINE_MODULE, asdict(engine), [engine_side, *ours])
        frontends = [
            await ProcessPart.start(f"front end {index}", FRONTEND_MODULE, spec, [links[index][1], controls[index][1]])
            for index, spec in enumerate(specs)
        ]
    supervisor = Supervisor(
        (engine_part, engine_control),
        [(part, controls[index][0]) for index, part in enumerate(frontends)],
        grace=config.grace,
        trace=config.trace,
        on_ready=lambda model: on_ready(model, address),
    )
    if collector is not None:
        collector.connect(supervisor.metrics)
    await supervisor.run()
    return supervisor.failure
