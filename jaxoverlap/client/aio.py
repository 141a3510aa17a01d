"""`AsyncClient`: the service from a program that runs on asyncio.

What is cancelled, by a task's end or by leaving an iterator, cancels its calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio
import numpy as np

from jaxoverlap.client import methods
from jaxoverlap.client.calls import Ask, ClientBase, Tries, num_tokens, placed
from jaxoverlap.client.config import DEFAULT_TARGET
from jaxoverlap.client.methods import READINESS, Stubs, Unary
from jaxoverlap.client.replies import AbortedIds, Health, Load, ModelInfo, ServerInfo
from jaxoverlap.errors import AbortedError, EngineError, JaxOverlapError, ServiceError
from jaxoverlap.outputs import RequestOutput, StreamDelta
from jaxoverlap.prompts import ChatPrompt, Prompt, chat_prompts
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.snapshot import MemorySnapshot
from jaxoverlap.v1 import generate_service_pb2

T = TypeVar("T")
_NOTHING_NOW_SECONDS = 0.01


class AsyncClient(ClientBase):
    """A service that `jaxoverlap serve` runs. Arguments, methods and errors are those of `Client`.

    It belongs to the event loop in which it is first used; in another one its methods raise EngineError. Use it as an
    asynchronous context manager, or `close` it.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, progress: bool | None = None, **config: Any) -> None:
        super().__init__(target, progress, config)
        self._credentials = self.config.credentials()
        self._sleep = asyncio.sleep
        self._channel: grpc.aio.Channel | None = None

    # ---------------------------------------------------------------- requests

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        client_request_id: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """As `Client.generate`."""
        asks = self._asks(prompts, sampling_params, options, client_request_id)
        outputs: dict[int, RequestOutput] = {}
        results = self._many(
            enumerate(asks),
            size=self.config.concurrency,
            total=len(asks),
            progress=self._progress if progress is None else progress,
            patient=len(asks) > 1,
        )
        async with aclosing(results):
            async for index, result in results:
                if isinstance(result, JaxOverlapError):
                    raise placed(result, index, prompts)
                outputs[index] = result
        return [outputs[index] for index in range(len(asks))]

    async def generate_each(
        self,
        inputs: Iterable[tuple[Prompt, SamplingParams] | tuple[Prompt, SamplingParams, RequestOptions] | None],
        *,
        window: int | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput | JaxOverlapError], None]:
        """As `Client.generate_each`."""
        results = self._many(self._each(inputs), size=self._window(window), total=None, progress=self._progress)
        async with aclosing(results):
            async for index, result in results:
                if isinstance(result, ServiceError):
                    raise result
                yield index, result

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        client_request_id: str = "",
    ) -> AsyncGenerator[StreamDelta, None]:
        """As `Client.stream`. An iterator that is left early and kept is to be closed, with `contextlib.aclosing`."""
        return self._stream(self._ask(prompt, sampling_params, options, client_request_id))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        client_request_id: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """As `Client.chat`."""
        prompts = chat_prompts(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return await self.generate(
            prompts, sampling_params, options, client_request_id=client_request_id, progress=progress
        )

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, Any]] | ChatPrompt, *, add_special_tokens: bool = True
    ) -> list[int]:
        """As `Client.tokenize`."""
        return await self._unary(methods.tokenize(prompt, add_special_tokens, self.config.model))

    async def detokenize(self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """As `Client.detokenize`."""
        return await self._unary(methods.detokenize(token_ids, skip_special_tokens, self.config.model))

    # ---------------------------------------------------------------- the service itself

    async def health(self) -> Health:
        """As `Client.health`."""
        return Health(live=await self._unary(methods.health("")), ready=await self._unary(methods.health(READINESS)))

    async def model_info(self) -> ModelInfo:
        """As `Client.model_info`."""
        return await self._unary(methods.model_info())

    async def server_info(self) -> ServerInfo:
        """As `Client.server_info`."""
        return await self._unary(methods.server_info())

    async def load(self) -> Load:
        """As `Client.load`."""
        return await self._unary(methods.load())

    async def abort(self, request_ids: str | Sequence[str] = (), *, all_requests: bool = False) -> AbortedIds:
        """As `Client.abort`."""
        return await self._unary(methods.abort(request_ids, all_requests))

    async def flush_cache(self) -> int:
        """As `Client.flush_cache`."""
        return await self._unary(methods.flush_cache())

    async def drain(self, timeout: float | None = None) -> int:
        """As `Client.drain`."""
        return await self._unary(methods.drain(timeout))

    async def memory_snapshot(self) -> MemorySnapshot:
        """As `Client.memory_snapshot`."""
        return await self._unary(methods.memory_snapshot())

    async def start_profile(self, steps: int | None = None) -> str:
        """As `Client.start_profile`."""
        return await self._unary(methods.start_profile(steps))

    async def stop_profile(self) -> str:
        """As `Client.stop_profile`."""
        return await self._unary(methods.stop_profile())

    async def step_log(self, last: int | None = None) -> list[dict[str, Any]]:
        """The last steps of the engine, the oldest first: so many of the newest, 100 if it is not said."""
        return await self._unary(methods.step_log(last))

    async def metrics(self) -> dict[str, Any]:
        """What the engine has counted since its start; names are those of the Prometheus metrics."""
        return await self._unary(methods.metrics())

    async def start_trace(self, max_steps: int | None = None) -> None:
        """Begins to record a timeline, of which the last `max_steps` steps are kept, 2000 if it is not said.

        Raises:
          ConflictError: one is recorded already.
        """
        await self._unary(methods.start_trace(max_steps))

    async def stop_trace(self) -> dict[str, Any]:
        """Ends the recording; returns it in Chrome's trace event format, for JSON.

        Raises:
          ConflictError: none is recorded.
        """
        return await self._unary(methods.stop_trace())

    async def close(self) -> None:
        """As `Client.close`."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # ---------------------------------------------------------------- inside

    @property
    def _stubs(self) -> Stubs:
        loop = asyncio.get_running_loop()
        if self._channel is None:  # it takes the event loop that runs now
            self._loop = loop
            target, options = self.config.target, self.config.channel_options()
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(target, options)
            else:
                self._channel = grpc.aio.secure_channel(target, self._credentials, options)
            self._channel_stubs = Stubs(self._channel)
        elif self._loop is not loop:
            raise EngineError(
                "this client belongs to the event loop in which it was first used, and that is not the one that runs: "
                "open one in each, as in each call of asyncio.run"
            )
        return self._channel_stubs

    async def _unary(self, unary: Unary[T]) -> T:
        return await self._finish(unary, self._tries(self.config.timeout, retried=unary.retried))

    async def _finish(self, unary: Unary[T], tries: Tries) -> T:
        while True:
            call = self._begin(unary.stub(self._stubs), unary.request, tries)
            try:
                return unary.read(await call)
            except grpc.aio.AioRpcError as failure:
                error = self._error_of(failure)
            except asyncio.CancelledError:
                self._check_closed()
                raise
            finally:
                call.cancel()
            await self._rest(tries.pause_after(error), error)

    async def _stream(self, ask: Ask) -> AsyncGenerator[StreamDelta, None]:
        request = generate_service_pb2.GenerateStreamRequest(generation=ask.message)
        reader, tries, received = ask.stream_reader(), self._tries(ask.timeout), False
        while True:
            call = self._begin(self._stubs.generate.GenerateStream, request, tries)
            error: JaxOverlapError | None = None
            try:
                async for event in call:
                    received = True
                    piece = reader.take(event)
                    if piece is not None:
                        yield piece
            except grpc.aio.AioRpcError as failure:
                error = self._error_of(failure, received=received)
            except asyncio.CancelledError:
                self._check_closed()
                raise
            finally:
                call.cancel()
            if error is None:
                yield reader.finish()
                return
            await self._rest(tries.pause_after(error, received=received), error)

    def _check_closed(self) -> None:
        """After a cancellation: raises AbortedError if it was `close` that cancelled the call, and nobody the task."""
        task = asyncio.current_task()
        if self._closed and (task is None or not task.cancelling()):
            raise AbortedError("Channel closed!") from None

    async def _rest(self, pause: float | None, error: JaxOverlapError) -> None:
        """Waits for the next try; raises the error where there is none."""
        if pause is None:
            raise error
        await self._sleep(pause)

    async def _result(self, ask: Ask, patient: bool) -> RequestOutput | JaxOverlapError:
        try:
            return await self._finish(ask.unary(), self._tries(ask.timeout, patient=patient))
        except JaxOverlapError as error:
            return error

    async def _many(
        self,
        asks: Iterator[tuple[int, Ask | JaxOverlapError] | None],
        *,
        size: int,
        total: int | None,
        progress: bool | None,
        patient: bool = True,
    ) -> AsyncGenerator[tuple[int, RequestOutput | JaxOverlapError], None]:
        """Keeps up to `size` asks under way, and yields what becomes of each."""
        from jaxoverlap import display  # it brings rich, which the other methods do without

        running: dict[asyncio.Task[RequestOutput | JaxOverlapError], int] = {}
        exhausted = False
        with display.generation_bar(total, shown=display.is_wanted(progress)) as bar:
            try:
                while True:
                    while not exhausted and len(running) < size:
                        try:
                            drawn = next(asks)
                        except StopIteration:
                            exhausted = True
                            break
                        if drawn is None:
                            break
                        index, ask = drawn
                        if isinstance(ask, JaxOverlapError):
                            yield index, ask
                        else:
                            running[asyncio.create_task(self._result(ask, patient))] = index
                    if running:
                        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                        for task in done:
                            index, result = running.pop(task), task.result()
                            bar.update(finished=1, new_tokens=num_tokens(result))
                            if total is None:
                                bar.hide()  # the caller may print what it gets
                            yield index, result
                    elif exhausted:
                        return
                    else:
                        await asyncio.sleep(_NOTHING_NOW_SECONDS)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
