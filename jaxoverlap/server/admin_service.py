"""`AdminService`: what operators ask, answered by the engine. Nothing is told but what the messages have fields for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from dataclasses import dataclass

import grpc

from jaxoverlap import __version__
from jaxoverlap.engine.messages import EngineFacts
from jaxoverlap.errors import InvalidRequestError, ServerUnavailableError
from jaxoverlap.observe.timeline import MAX_STEPS
from jaxoverlap.server.engine_client import EngineClient
from jaxoverlap.server.generate_service import GenerateService
from jaxoverlap.v1 import admin_service_pb2 as pb
from jaxoverlap.v1 import admin_service_pb2_grpc

API_VERSION = "v1"
STEP_LOG_LAST, TRACE_STEPS = 100, 2000
"""Steps, where a request does not say how many."""
MAX_ABORTED_IDS = 10_000


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One start of a server.

    Attributes:
      instance_id: new at each start, and the beginning of its requests' ids.
      started: seconds on the system's monotonic clock.
      grace: of a drain that says nothing else.
    """

    instance_id: str
    started: float
    grace: float

    def request_prefix(self, frontend: int) -> str:
        return f"{self.instance_id}-{frontend}-"

    def request_id(self, frontend: int, key: int) -> str:
        return f"{self.request_prefix(frontend)}{key}"

    def parse_request_id(self, request_id: str) -> tuple[int, int] | None:
        """Front end and key, or None for an id that this server never gave."""
        match = re.fullmatch(rf"{self.instance_id}-(0|[1-9][0-9]{{0,2}})-(0|[1-9][0-9]{{0,17}})", request_id)
        return None if match is None else (int(match[1]), int(match[2]))


class AdminService(admin_service_pb2_grpc.AdminServiceServicer):
    def __init__(self, engine: EngineClient, generate: GenerateService, instance: Instance) -> None:
        self._engine, self._generate, self._instance = engine, generate, instance

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        facts, model = self._facts(), self._generate.model
        assert model is not None
        return pb.GetModelInfoResponse(
            served_name=model.name,
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            eos_token_ids=facts.eos_token_ids,
            bos_token_id=model.tokenizer.bos_token_id,
            has_chat_template=model.tokenizer.has_chat_template,
            dtype=facts.dtype,
            capabilities=facts.capabilities,
            sampling_defaults=facts.sampling_defaults,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        facts = self._facts()
        return pb.GetServerInfoResponse(
            version=__version__,
            api_version=API_VERSION,
            instance_id=self._instance.instance_id,
            uptime_seconds=time.monotonic() - self._instance.started,
            page_size=facts.page_size,
            num_pages=facts.num_pages,
            max_running=facts.max_running,
            max_queued=facts.max_queue,
            devices=facts.devices,
            schedule=facts.schedule,
            kv_cache_dtype=facts.kv_cache_dtype,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        status = await self._engine.ask("status")
        return pb.GetLoadResponse(
            running=status["running"],
            queued=status["waiting"],
            kv_used_fraction=status["kv_used"],
            tokens_per_second=status["tokens_per_second"],
            draining=status["draining"],
        )

    async def AbortRequests(
        self, request: pb.AbortRequestsRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortRequestsResponse:
        if request.all == bool(request.request_ids):
            raise InvalidRequestError("request_ids", list(request.request_ids), "give ids, or set all, not both")
        if len(request.request_ids) > MAX_ABORTED_IDS:  # they are looked up between two steps
            given = f"{len(request.request_ids)} ids"
            raise InvalidRequestError("request_ids", given, f"give {MAX_ABORTED_IDS} at most, or set all")
        names = {given: self._instance.parse_request_id(given) for given in request.request_ids}
        wanted = None if request.all else [name for name in names.values() if name is not None]
        found = await self._engine.ask("abort_requests", wanted)
        aborted = dict.fromkeys(self._instance.request_id(*name) for name in found)
        return pb.AbortRequestsResponse(
            aborted_ids=aborted, unknown_ids=[given for given in names if given not in aborted]
        )

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse(freed_pages=await self._engine.ask("flush_cache"))

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        timeout = request.timeout_seconds if request.HasField("timeout_seconds") else self._instance.grace
        if not timeout >= 0:
            raise InvalidRequestError("timeout_seconds", timeout, "use seconds, 0 or more")
        await self._engine.ask("drain")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._engine.until(lambda status: not status.has_work), timeout)
        status = await self._engine.ask("status")
        return pb.DrainResponse(still_running=status["running"] + status["waiting"])

    async def StartProfile(
        self, request: pb.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> pb.StartProfileResponse:
        if request.HasField("steps") and not request.steps:
            raise InvalidRequestError("steps", request.steps, "use 1 or more, or leave it out")
        steps = request.steps if request.HasField("steps") else None
        return pb.StartProfileResponse(trace_dir=await self._engine.ask("start_profile", steps))

    async def StopProfile(
        self, request: pb.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> pb.StopProfileResponse:
        return pb.StopProfileResponse(trace_dir=await self._engine.ask("stop_profile"))

    async def GetMemorySnapshot(
        self, request: pb.GetMemorySnapshotRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetMemorySnapshotResponse:
        snapshot = await self._engine.ask("memory_snapshot")
        for page in snapshot["pages"]:
            if page["request_id"] is not None:
                page["request_id"] = self._instance.request_id(*page["request_id"])
        return pb.GetMemorySnapshotResponse(json=await asyncio.to_thread(json.dumps, snapshot))

    async def GetStepLog(
        self, request: pb.GetStepLogRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStepLogResponse:
        last = request.last if request.HasField("last") else STEP_LOG_LAST
        records = await self._engine.ask("step_log", last)
        return pb.GetStepLogResponse(json=await asyncio.to_thread(json.dumps, records))

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetMetricsResponse:
        return pb.GetMetricsResponse(json=json.dumps(await self._engine.ask("metrics")))

    async def StartTrace(
        self, request: pb.StartTraceRequest, context: grpc.aio.ServicerContext
    ) -> pb.StartTraceResponse:
        steps = request.max_steps if request.HasField("max_steps") else TRACE_STEPS
        if not 1 <= steps <= MAX_STEPS:
            raise InvalidRequestError("max_steps", steps, f"use an integer from 1 to {MAX_STEPS}")
        await self._engine.ask("start_trace", steps)
        return pb.StartTraceResponse()

    async def StopTrace(self, request: pb.StopTraceRequest, context: grpc.aio.ServicerContext) -> pb.StopTraceResponse:
        return pb.StopTraceResponse(trace=await self._engine.ask("stop_trace"))

    def _facts(self) -> EngineFacts:
        if self._engine.failure is not None:
            raise self._engine.failure
        if self._engine.facts is None:
            raise ServerUnavailableError("the server is warming up")
        return self._engine.facts
