"""What grpc.health.v1 says of a front end.

""                             liveness: the front end answers, and its engine is neither dead nor hangs: its watchdog
                               has not barked, and it is not silent for longer than the stall timeout
jaxoverlap.v1.GenerateService  readiness: besides, the engine is warm and does not drain
jaxoverlap.v1.AdminService     as liveness
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from jaxoverlap.engine.awake_clock import AwakeClock
from jaxoverlap.server.engine_client import EngineClient
from jaxoverlap.v1 import admin_service_pb2, generate_service_pb2

logger = logging.getLogger(__name__)

GENERATE = generate_service_pb2.DESCRIPTOR.services_by_name["GenerateService"].full_name
ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_LAST_HOPE_SECONDS = 60.0
"""Of silence, beyond the stall timeout."""
_LONGEST_PAUSE_SECONDS = 5.0
"""Between two updates; a longer one is a pause of the process, of which no engine is to blame."""


class _Servicer(health_aio.HealthServicer):
    """grpcio's, which knows all of the protocol but the list.

    Args:
      said: what was last said of each service.
    """

    def __init__(self, said: Mapping[str, bool]) -> None:
        super().__init__()
        self._said = said

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        found = {name: _SERVING if serves else _NOT_SERVING for name, serves in self._said.items()}
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in found.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


class Health:
    """Keeps the health service's answers true.

    Args:
      stall_timeout: seconds of silence of an engine that has work, after which it hangs.

    Attributes:
      servicer: for the server.
    """

    def __init__(self, engine: EngineClient, stall_timeout: float) -> None:
        self._engine, self._stall_timeout = engine, stall_timeout
        self._said: dict[str, bool] = {}
        self.servicer = _Servicer(self._said)
        self._awake = AwakeClock(_LONGEST_PAUSE_SECONDS)
        self._last_sound = 0.0
        """By `_awake`, when the engine was last not silent for too long."""

    @property
    def is_beyond_hope(self) -> bool:
        """The engine has been silent for so long that it is not even able to end itself."""
        return self._awake.seconds - self._last_sound > _LAST_HOPE_SECONDS

    async def update(self) -> None:
        """To be called every second or so."""
        engine = self._engine
        silent, now = engine.seconds_silent(), self._awake.look()
        if silent <= self._stall_timeout:
            self._last_sound = now
        is_alive = engine.failure is None and silent <= self._stall_timeout and not engine.is_stalled
        is_ready = is_alive and engine.facts is not None and not engine.status.draining
        for service, serves in (("", is_alive), (ADMIN, is_alive), (GENERATE, is_ready)):
            if self._said.get(service) != serves:
                if service == GENERATE and service in self._said:
                    logger.info("%s is %s", service, "SERVING" if serves else "NOT_SERVING")
                if service == "" and not serves and silent > self._stall_timeout and engine.failure is None:
                    logger.error("the engine has work and has made no step for %.1f s", silent)
                self._said[service] = serves
                await self.servicer.set(service, _SERVING if serves else _NOT_SERVING)
