"""From errors to gRPC statuses, in one place. The table is in docs/operations.md; a failure is never OK."""

from __future__ import annotations

import logging
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxoverlap.engine.messages import DrainingError, NotNowError
from jaxoverlap.errors import (
    DeadlineError,
    InvalidRequestError,
    JaxOverlapError,
    QueueFullError,
    UnsupportedError,
)

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 500
"""Statuses travel in HTTP/2 headers, which are small."""


class CallError(JaxOverlapError):
    """Ends a call with a status of its own."""

    code = grpc.StatusCode.INTERNAL


class UnavailableError(CallError):
    """Warming up, draining, or the engine is gone: another server, or a later time, may do."""

    code = grpc.StatusCode.UNAVAILABLE


class UnknownModelError(CallError):
    code = grpc.StatusCode.NOT_FOUND


class TooBusyError(CallError):
    """As many calls as may are open."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class SlowReaderError(CallError):
    """The caller reads more slowly than tokens come; trying again would end the same way."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class AbortedError(CallError):
    """By an operator."""

    code = grpc.StatusCode.ABORTED


class UnauthenticatedError(CallError):
    code = grpc.StatusCode.UNAUTHENTICATED


class NotAllowedError(CallError):
    code = grpc.StatusCode.PERMISSION_DENIED


RETRY_SECONDS = 1.0
_RETRYABLE = (QueueFullError, TooBusyError)
_CODES: dict[type[JaxOverlapError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    DrainingError: grpc.StatusCode.UNAVAILABLE,
    NotNowError: grpc.StatusCode.FAILED_PRECONDITION,
}


def code_of(error: BaseException) -> grpc.StatusCode:
    if isinstance(error, CallError):
        return error.code
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def status_of(error: BaseException) -> grpc.Status:
    """What the caller gets: code, a short text, and google.rpc details. Unforeseen errors keep their text to the log."""
    code = code_of(error)
    text = str(error) if isinstance(error, JaxOverlapError) else "internal error; the server's log says more"
    details: list[message.Message] = []
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_cut(text.removeprefix(f"{error.field}: "))
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, _RETRYABLE):
        delay = duration_pb2.Duration(nanos=0)
        delay.FromMilliseconds(int(RETRY_SECONDS * 1e3))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code.value[0], message=_cut(text))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return rpc_status.to_status(status)


async def abort_with(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:
    """Ends a call with an error's status."""
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort raises")


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[: _MAX_MESSAGE_CHARS - 1] + "…"
