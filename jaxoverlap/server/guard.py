"""Around every call: who may make it, whether it has a place, its one message, and how its failure is told.

To gRPC all methods take a stream of messages. If it knew of one that takes a single message, it would wait for that
without asking anybody: the call would be open without a place, and nothing could end it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jaxoverlap.errors import EngineError, InvalidRequestError, JaxOverlapError, ServerUnavailableError
from jaxoverlap.server.admission import Admission
from jaxoverlap.server.statuses import MessageTooLargeError, abort_with
from jaxoverlap.server.tokens import Gatekeeper

logger = logging.getLogger(__name__)

_SERVICE = "/jaxoverlap.v1.GenerateService/"
_GENERATE = _SERVICE + "Generate"
_WATCH = "/grpc.health.v1.Health/Watch"

Handler = Callable[[AsyncIterator[Any], grpc.aio.ServicerContext], Awaitable[Any]]


class Guard(grpc.aio.ServerInterceptor):
    """See above. Errors that nobody has foreseen go to the log with their trace, and to the caller without.

    Args:
      places: for calls of `GenerateService`.
      max_message_bytes: of one message of an answer.

    Attributes:
      num_internal_errors: calls that ended through our own fault.
    """

    def __init__(self, gatekeeper: Gatekeeper, places: Admission, max_message_bytes: int) -> None:
        self.num_internal_errors = 0
        self._gatekeeper, self._places, self._max_message_bytes = gatekeeper, places, max_message_bytes
        self._idle: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return handler
        method = handler_call_details.method
        try:
            self._gatekeeper.check(method, handler_call_details.invocation_metadata)
        except JaxOverlapError as error:
            return grpc.stream_stream_rpc_method_handler(_refusing(error))
        if handler.request_streaming:  # reflection
            work, read = self._relayed(handler.stream_stream), handler.request_deserializer
            return grpc.stream_stream_rpc_method_handler(self._guarded(method, work), read, handler.response_serializer)
        if handler.response_streaming:
            work = self._guarded(method, self._with_message(method, handler.unary_stream, handler.request_deserializer))
            return grpc.stream_stream_rpc_method_handler(work, None, self._bounded(handler.response_serializer))
        own, write = handler.unary_unary, self._bounded(handler.response_serializer)

        async def answered(request: Any, context: grpc.aio.ServicerContext) -> bytes:
            return write(await own(request, context))

        work = self._guarded(method, self._with_message(method, answered, handler.request_deserializer))
        return grpc.stream_unary_rpc_method_handler(work)

    def end_idle(self) -> None:
        """Ends what nobody waits for when the server stops, now and from now on: watches of health, reflection, and
        calls whose message has not come."""
        self._is_closing = True
        for task in self._idle:
            task.cancel()

    # ---------------------------------------------------------------- inside

    def _guarded(self, method: str, work: Handler) -> Handler:
        root = "generation." if method.startswith(_GENERATE) else ""

        async def handle(messages: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            try:
                with self._place(method, context):
                    return await work(messages, context)
            except JaxOverlapError as error:
                self._count(method, error)
                await abort_with(context, error, root)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                self._count(method, error)
                await abort_with(context, error)

        return handle

    def _with_message(self, method: str, own: Callable[..., Awaitable[Any]], read: Callable[[bytes], Any]) -> Handler:
        async def work(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            with self._nobody_waits():
                message = await _only(messages)
            try:
                request = read(message)
            except DecodeError:
                raise InvalidRequestError("request", f"{len(message)} bytes", "they are not its message") from None
            with self._nobody_waits() if method == _WATCH else nullcontext():
                return await own(request, context)

        return work

    def _relayed(self, own: Callable[..., AsyncIterator[Any]]) -> Handler:
        async def work(messages: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
            with self._nobody_waits():
                async for answer in own(messages, context):
                    await context.write(answer)

        return work

    def _place(self, method: str, context: grpc.aio.ServicerContext) -> AbstractContextManager[None]:
        return self._places.place(context.peer()) if method.startswith(_SERVICE) else nullcontext()

    @contextmanager
    def _nobody_waits(self) -> Iterator[None]:
        """A block that `end_idle` ends.

        Raises:
          ServerUnavailableError: it has.
        """
        error = ServerUnavailableError("the server is shutting down")
        if self._is_closing:
            raise error
        task = asyncio.current_task()
        assert task is not None
        self._idle.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_closing:
                raise
            raise error from None
        finally:
            self._idle.discard(task)

    def _bounded(self, write: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        """gRPC would refuse what is too large as well, with a trace in the log."""

        def bounded(message: Any) -> bytes:
            data = write(message)
            if len(data) > self._max_message_bytes:
                raise MessageTooLargeError(len(data), self._max_message_bytes)
            return data

        return bounded

    def _count(self, method: str, error: Exception) -> None:
        if isinstance(error, MessageTooLargeError):
            logger.warning("%s: %s", method, error)
        if not isinstance(error, JaxOverlapError):
            logger.error("%s failed", method, exc_info=error)
        elif not isinstance(error, EngineError):
            return
        self.num_internal_errors += 1


async def _only(messages: AsyncIterator[bytes]) -> bytes:
    """The message of a call that has one."""
    found = None
    async for message in messages:
        if found is not None:
            raise InvalidRequestError("request", "several messages", "this method takes one")
        found = message
    if found is None:
        raise InvalidRequestError("request", "no message", "this method takes one")
    return found


def _refusing(error: JaxOverlapError) -> Handler:
    async def refuse(messages: Any, context: grpc.aio.ServicerContext) -> None:
        await abort_with(context, error)

    return refuse
