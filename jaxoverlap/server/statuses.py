"""How a call ends that does not end well. The codes and details are `jaxoverlap.wire.statuses`'s, the table is in
docs/operations.md; a failure is never OK."""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from jaxoverlap.errors import EngineError, JaxOverlapError, QueueFullError
from jaxoverlap.wire import statuses

RETRY_SECONDS = 1.0


class SlowReaderError(QueueFullError):
    """The caller reads more slowly than tokens come. It says no time after which to try again: it would be the same."""


class TooManyStreamsError(QueueFullError):
    """As many calls are open as may be."""

    def __init__(self, message: str) -> None:
        super().__init__(message, RETRY_SECONDS)


class MessageTooLargeError(QueueFullError):
    """A message of an answer is beyond the limit; the words are those of gRPC."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(f"Sent message larger than max ({size} vs. {most})")


class UnauthenticatedError(JaxOverlapError):
    """No token, or one that nobody has."""


def status_of(error: BaseException, root: str = "") -> grpc.Status:
    """What a caller is told: a code, a short text, details. What nobody has foreseen keeps its text for the log.

    `root` is where in the call's message its `Generation` is.
    """
    if isinstance(error, UnauthenticatedError):
        return rpc_status.to_status(status_pb2.Status(code=code_pb2.UNAUTHENTICATED, message=str(error)))
    if not isinstance(error, JaxOverlapError):
        error = EngineError("internal error; the server's log says more")
    if type(error) is QueueFullError and error.retry_after is None:
        error = QueueFullError(str(error), RETRY_SECONDS)
    message = statuses.status(error, root=root)
    message.message = " ".join(message.message.split())
    return rpc_status.to_status(message)


async def abort_with(context: grpc.aio.ServicerContext, error: BaseException, root: str = "") -> NoReturn:
    """Ends a call with an error's status."""
    status = status_of(error, root)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort raises")
