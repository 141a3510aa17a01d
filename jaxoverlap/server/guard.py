"""Around every call: who may make it, whether its message can be read, and how its failure is told."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jaxoverlap.errors import EngineError, InvalidRequestError, JaxOverlapError
from jaxoverlap.server.statuses import abort_with
from jaxoverlap.server.tokens import Gatekeeper

logger = logging.getLogger(__name__)

_GENERATE = "/jaxoverlap.v1.GenerateService/Generate"

Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


class Guard(grpc.aio.ServerInterceptor):
    """See above. Errors that nobody has foreseen go to the log with their trace, and to the caller without.

    Attributes:
      num_internal_errors: calls that ended through our own fault.
    """

    def __init__(self, gatekeeper: Gatekeeper) -> None:
        self.num_internal_errors = 0
        self._gatekeeper = gatekeeper

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return handler
        method = handler_call_details.method
        serializer = handler.response_serializer
        try:
            self._gatekeeper.check(method, handler_call_details.invocation_metadata)
        except JaxOverlapError as error:
            return _like(handler, _refusing(error), None, serializer)
        if handler.request_streaming:  # reflection, health: not ours
            return handler
        own = handler.unary_stream if handler.response_streaming else handler.unary_unary
        return _like(handler, self._guarded(method, own, handler.request_deserializer), None, serializer)

    def _guarded(self, method: str, own: Handler, read: Callable[[bytes], Any]) -> Handler:
        root = "generation." if method.startswith(_GENERATE) else ""

        async def handle(message: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                try:
                    request = read(message)
                except DecodeError:
                    raise InvalidRequestError("request", f"{len(message)} bytes", "they are not its message") from None
                return await own(request, context)
            except JaxOverlapError as error:
                self._count(method, error)
                await abort_with(context, error, root)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                self._count(method, error)
                await abort_with(context, error)

        return handle

    def _count(self, method: str, error: Exception) -> None:
        if not isinstance(error, JaxOverlapError):
            logger.error("%s failed", method, exc_info=error)
        elif not isinstance(error, EngineError):
            return
        self.num_internal_errors += 1


def _refusing(error: JaxOverlapError) -> Handler:
    async def refuse(message: Any, context: grpc.aio.ServicerContext) -> None:
        await abort_with(context, error)

    return refuse


def _like(handler: grpc.RpcMethodHandler, own: Handler, read: Any, write: Any) -> grpc.RpcMethodHandler:
    """A handler of the same kind."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(own, read, write)
