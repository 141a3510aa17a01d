"""The service's plain methods: what is sent, and what is made of the reply."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxoverlap.checks import check_int, check_real
from jaxoverlap.client.replies import AbortedIds, Load, ModelInfo, ServerInfo
from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.prompts import Prompt
from jaxoverlap.scheduler.snapshot import MemorySnapshot
from jaxoverlap.v1 import admin_service_pb2, admin_service_pb2_grpc, generate_service_pb2, generate_service_pb2_grpc
from jaxoverlap.wire.requests import check_token_ids, set_prompt

T = TypeVar("T")
READINESS = "jaxoverlap.v1.GenerateService"
"""What grpc.health.v1 is asked about; "" is liveness."""


class Stubs:
    """Those of all services on one channel, of grpc or grpc.aio."""

    def __init__(self, channel: Any) -> None:
        self.generate = generate_service_pb2_grpc.GenerateServiceStub(channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)


@dataclass(frozen=True)
class Unary(Generic[T]):
    """One call of a method.

    Attributes:
      stub: finds the method.
      read: makes the result of the reply.
      retried: it may run twice without harm.
    """

    stub: Callable[[Stubs], Any]
    request: Any
    read: Callable[[Any], T]
    retried: bool = True


def tokenize(prompt: Prompt, add_special_tokens: bool, model: str) -> Unary[list[int]]:
    # Left out it is true; chats have no such thing, and a service refuses what it would ignore.
    request = generate_service_pb2.TokenizeRequest(
        model=model, add_special_tokens=None if add_special_tokens else False
    )
    set_prompt(request, prompt)
    return Unary(lambda stubs: stubs.generate.Tokenize, request, lambda reply: list(reply.token_ids))


def detokenize(token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool, model: str) -> Unary[str]:
    request = generate_service_pb2.DetokenizeRequest(
        model=model, token_ids=check_token_ids("token_ids", token_ids), skip_special_tokens=skip_special_tokens
    )
    return Unary(lambda stubs: stubs.generate.Detokenize, request, lambda reply: reply.text)


def model_info() -> Unary[ModelInfo]:
    return Unary(lambda stubs: stubs.admin.GetModelInfo, admin_service_pb2.GetModelInfoRequest(), ModelInfo.of)


def server_info() -> Unary[ServerInfo]:
    return Unary(lambda stubs: stubs.admin.GetServerInfo, admin_service_pb2.GetServerInfoRequest(), ServerInfo.of)


def load() -> Unary[Load]:
    return Unary(lambda stubs: stubs.admin.GetLoad, admin_service_pb2.GetLoadRequest(), Load.of)


def abort(request_ids: str | Sequence[str], all_requests: bool) -> Unary[AbortedIds]:
    ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
    if all_requests == bool(ids):
        raise InvalidRequestError("request_ids", ids, "name some, or set all_requests")
    request = admin_service_pb2.AbortRequestsRequest(request_ids=ids, all=all_requests)
    return Unary(lambda stubs: stubs.admin.AbortRequests, request, AbortedIds.of)


def flush_cache() -> Unary[int]:
    request = admin_service_pb2.FlushCacheRequest()
    return Unary(lambda stubs: stubs.admin.FlushCache, request, lambda reply: reply.freed_pages)


def drain(timeout: float | None) -> Unary[int]:
    if timeout is not None:
        check_real("timeout", timeout, 0.0, math.inf, "seconds, 0 or more")
    request = admin_service_pb2.DrainRequest(timeout_seconds=timeout)
    return Unary(lambda stubs: stubs.admin.Drain, request, lambda reply: reply.still_running, retried=False)


def start_profile(steps: int | None) -> Unary[str]:
    request = admin_service_pb2.StartProfileRequest(steps=_count("steps", steps))
    return Unary(lambda stubs: stubs.admin.StartProfile, request, lambda reply: reply.trace_dir, retried=False)


def stop_profile() -> Unary[str]:
    request = admin_service_pb2.StopProfileRequest()
    return Unary(lambda stubs: stubs.admin.StopProfile, request, lambda reply: reply.trace_dir, retried=False)


def step_log(last: int | None) -> Unary[list[dict[str, Any]]]:
    request = admin_service_pb2.GetStepLogRequest(last=_count("last", last))
    return Unary(lambda stubs: stubs.admin.GetStepLog, request, lambda reply: json.loads(reply.json))


def metrics() -> Unary[dict[str, Any]]:
    request = admin_service_pb2.GetMetricsRequest()
    return Unary(lambda stubs: stubs.admin.GetMetrics, request, lambda reply: json.loads(reply.json))


def start_trace(max_steps: int | None) -> Unary[None]:
    request = admin_service_pb2.StartTraceRequest(max_steps=_count("max_steps", max_steps))
    return Unary(lambda stubs: stubs.admin.StartTrace, request, lambda reply: None, retried=False)


def stop_trace() -> Unary[dict[str, Any]]:
    request = admin_service_pb2.StopTraceRequest()
    return Unary(
        lambda stubs: stubs.admin.StopTrace,
        request,
        lambda reply: json.loads(gzip.decompress(reply.trace)),
        retried=False,
    )


def memory_snapshot() -> Unary[MemorySnapshot]:
    request = admin_service_pb2.GetMemorySnapshotRequest()
    return Unary(
        lambda stubs: stubs.admin.GetMemorySnapshot,
        request,
        lambda reply: MemorySnapshot.from_dict(json.loads(reply.json)),
    )


def _count(name: str, value: int | None) -> int | None:
    """As a message holds it; None is left to the service. Raises InvalidRequestError."""
    if value is not None:
        check_int(name, value, 0, 2**32 - 1, "an integer from 0 to 2**32 - 1")
    return value


def health(service: str) -> Unary[bool]:
    serving = health_pb2.HealthCheckResponse.SERVING
    request = health_pb2.HealthCheckRequest(service=service)
    return Unary(lambda stubs: stubs.health.Check, request, lambda reply: reply.status == serving, retried=False)
