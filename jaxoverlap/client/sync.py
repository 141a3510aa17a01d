"""`Client`: the service from a program that waits for its answers.

Calls are grpc's futures: no thread of ours runs, and whoever leaves, by an error, by Ctrl-C or by dropping an iterator,
cancels what he has started on the way out. A KeyboardInterrupt within grpc, or what the program's handler of another
signal raises, could leave its locks taken, and no call of this client would come back any more; so it cancels the call
that is waited for, and is raised behind it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import grpc
import numpy as np

from jaxoverlap.client import methods
from jaxoverlap.client.calls import Ask, ClientBase, Tries, num_tokens, placed
from jaxoverlap.client.config import DEFAULT_TARGET
from jaxoverlap.client.methods import READINESS, Stubs, Unary
from jaxoverlap.client.replies import AbortedIds, Health, Load, ModelInfo, ServerInfo
from jaxoverlap.client.window import FAILURES, Window
from jaxoverlap.errors import JaxOverlapError, ServiceError
from jaxoverlap.interrupt import interrupt_deferred
from jaxoverlap.outputs import RequestOutput, StreamDelta
from jaxoverlap.prompts import ChatPrompt, Prompt, chat_prompts
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.snapshot import MemorySnapshot
from jaxoverlap.v1 import generate_service_pb2

T = TypeVar("T")
_NOTHING_NOW_SECONDS = 0.01


class Client(ClientBase):
    """A service that `jaxoverlap serve` runs.

    Args:
      target: "host:port", "unix:path", or another name that gRPC resolves.
      progress: `generate` shows its progress on standard error; None shows it on a terminal only.
      **config: other fields of `ClientConfig`: TLS, token, timeout, max_retries, concurrency …

    Raises:
      ConfigError: settings that can't be. Whether the service is there is found with the first call.

    Any method may raise, besides what it says itself:
      ServerUnavailableError: nobody answers, or the service is starting, draining or dead, and stayed so.
      AccessDeniedError: the service wants a token, or another one.
      DeadlineError: the call's timeout has passed.
      EngineError: the service failed.

    Use it as a context manager, or `close` it. Threads may share one.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, progress: bool | None = None, **config: Any) -> None:
        super().__init__(target, progress, config)
        self._sleep = time.sleep
        credentials, options = self.config.credentials(), self.config.channel_options()
        if credentials is None:
            self._channel = grpc.insecure_channel(self.config.target, options)
        else:
            self._channel = grpc.secure_channel(self.config.target, credentials, options)
        self._stubs = Stubs(self._channel)

    # ---------------------------------------------------------------- requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        client_request_id: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Decodes prompts, up to `concurrency` at once, and returns their outputs in the order of the prompts.

        A list waits for a service that is full; a single prompt is tried `max_retries` times.

        Args:
          prompts: one prompt or a list of them.
          sampling_params: for all, or one for each; None leaves it to the server.
          options: priority, timeout and cache salt, for all, or one for each. The timeout becomes the call's deadline.
          client_request_id: for the service's logs.
          progress: overrides the constructor's.

        Raises:
          JaxOverlapError: the first that any of them brings; the others are cancelled. An InvalidRequestError of what
            can be checked here comes before anything is sent.
          KeyboardInterrupt: Ctrl-C; all are cancelled.
        """
        asks = self._asks(prompts, sampling_params, options, client_request_id)
        outputs: dict[int, RequestOutput] = {}
        results = self._many(
            enumerate(asks),
            size=self.config.concurrency,
            total=len(asks),
            progress=self._progress if progress is None else progress,
            patient=len(asks) > 1,
        )
        with closing(results):
            for index, result in results:
                if isinstance(result, JaxOverlapError):
                    raise placed(result, index, prompts)
                outputs[index] = result
        return [outputs[index] for index in range(len(asks))]

    def generate_each(
        self,
        inputs: Iterable[tuple[Prompt, SamplingParams] | tuple[Prompt, SamplingParams, RequestOptions] | None],
        *,
        window: int | None = None,
    ) -> Iterator[tuple[int, RequestOutput | JaxOverlapError]]:
        """Decodes any number of prompts with bounded memory: inputs are drawn as room appears, and outputs come as
        they finish, with the input's index. An input that can't be served yields its error and disturbs nothing. A
        service that is full is waited for.

        Args:
          inputs: prompt and parameters, and options if need be; drawn lazily. A None, which has no index, means
            "nothing now": what is under way goes on, and after the next answer the inputs are asked again.
          window: inputs under way at once; None is `concurrency`.

        Raises:
          ServiceError: the service can't be used, so that the other inputs would fare no better.
        """

        results = self._many(self._each(inputs), size=self._window(window), total=None, progress=self._progress)
        with closing(results):
            for index, result in results:
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
    ) -> Iterator[StreamDelta]:
        """Decodes one prompt and yields pieces as they come; the last one brings the whole.

        The call begins with the first piece that is drawn. Leaving the iterator early cancels it.

        Raises, when called:
          InvalidRequestError: something that no service could take.
        """
        return self._stream(self._ask(prompt, sampling_params, options, client_request_id))

    def chat(
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
        """As `generate`, for the messages of a chat or of several, put through the model's template.

        Args:
          messages: of one chat, or a list of chats.
          tools, documents, add_generation_prompt, continue_final_message, chat_template_kwargs: see `ChatPrompt`, which
            `generate` and `stream` take as well.
        """
        prompts = chat_prompts(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, options, client_request_id=client_request_id, progress=progress)

    def tokenize(
        self, prompt: str | Sequence[Mapping[str, Any]] | ChatPrompt, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The ids of a text, or of chat messages through the model's template."""
        return self._unary(methods.tokenize(prompt, add_special_tokens, self.config.model))

    def detokenize(self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """The text of some ids."""
        return self._unary(methods.detokenize(token_ids, skip_special_tokens, self.config.model))

    # ---------------------------------------------------------------- the service itself

    def health(self) -> Health:
        """Whether it lives, and whether it takes requests; asked once, without retries."""
        return Health(live=self._unary(methods.health("")), ready=self._unary(methods.health(READINESS)))

    def model_info(self) -> ModelInfo:
        """The model that is served."""
        return self._unary(methods.model_info())

    def server_info(self) -> ServerInfo:
        """Its version, its limits, its devices."""
        return self._unary(methods.server_info())

    def load(self) -> Load:
        """What it is doing now."""
        return self._unary(methods.load())

    def abort(self, request_ids: str | Sequence[str] = (), *, all_requests: bool = False) -> AbortedIds:
        """Ends requests, whoever waits for them; they get an AbortedError."""
        return self._unary(methods.abort(request_ids, all_requests))

    def flush_cache(self) -> int:
        """Forgets all cached prefixes; returns the number of pages.

        Raises:
          ConflictError: requests are running.
        """
        return self._unary(methods.flush_cache())

    def drain(self, timeout: float | None = None) -> int:
        """Lets it refuse new requests, and waits for the running ones.

        Args:
          timeout: seconds to wait; None is the service's own.

        Returns the number of those that still run.
        """
        return self._unary(methods.drain(timeout))

    def memory_snapshot(self) -> MemorySnapshot:
        """Who has which KV page now; `to_dict` is for JSON, `to_svg` a picture."""
        return self._unary(methods.memory_snapshot())

    def start_profile(self, steps: int | None = None) -> str:
        """Begins a trace, which ends by itself after so many steps; returns its folder on the service's machine."""
        return self._unary(methods.start_profile(steps))

    def stop_profile(self) -> str:
        """Ends the trace; returns its folder."""
        return self._unary(methods.stop_profile())

    def step_log(self, last: int | None = None) -> list[dict[str, Any]]:
        """The last steps of the engine, the oldest first: so many of the newest, 100 if it is not said."""
        return self._unary(methods.step_log(last))

    def metrics(self) -> dict[str, Any]:
        """What the engine has counted since its start; names are those of the Prometheus metrics."""
        return self._unary(methods.metrics())

    def start_trace(self, max_steps: int | None = None) -> None:
        """Begins to record a timeline, of which the last `max_steps` steps are kept, 2000 if it is not said.

        Raises:
          ConflictError: one is recorded already.
        """
        self._unary(methods.start_trace(max_steps))

    def stop_trace(self) -> dict[str, Any]:
        """Ends the recording; returns it in Chrome's trace event format, for JSON.

        Raises:
          ConflictError: none is recorded.
        """
        return self._unary(methods.stop_trace())

    def close(self) -> None:
        """Cancels what runs and lets go of the connection. Calling it twice is fine."""
        self._closed = True
        with interrupt_deferred():
            self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---------------------------------------------------------------- inside

    def _unary(self, unary: Unary[T]) -> T:
        return self._finish(unary, self._tries(self.config.timeout, retried=unary.retried))

    def _finish(self, unary: Unary[T], tries: Tries) -> T:
        while True:
            with self._call(unary.stub(self._stubs).future, unary.request, tries) as call:
                try:
                    with interrupt_deferred(wake=call.cancel):
                        reply = call.result()
                    return unary.read(reply)
                except FAILURES:
                    error = self._error_of(call)
            self._rest(tries.pause_after(error), error)

    def _stream(self, ask: Ask) -> Iterator[StreamDelta]:
        request = generate_service_pb2.GenerateStreamRequest(generation=ask.message)
        reader, tries, received = ask.stream_reader(), self._tries(ask.timeout), False
        while True:
            error: JaxOverlapError | None = None
            with self._call(self._stubs.generate.GenerateStream, request, tries) as call:
                try:
                    while (event := self._next(call)) is not None:
                        received = True
                        piece = reader.take(event)
                        if piece is not None:
                            yield piece
                except FAILURES:
                    error = self._error_of(call, received=received)
            if error is None:
                yield reader.finish()
                return
            self._rest(tries.pause_after(error, received=received), error)

    @contextmanager
    def _call(self, method: Any, request: Any, tries: Tries) -> Iterator[Any]:
        """A try, cancelled at the end if it still runs."""
        call = None
        try:
            with interrupt_deferred():
                call = self._begin(method, request, tries)
            yield call
        finally:
            if call is not None:
                with interrupt_deferred():
                    call.cancel()

    @staticmethod
    def _next(call: Any) -> Any:
        """A stream's next event, or None behind the last."""
        with interrupt_deferred(wake=call.cancel):
            return next(call, None)

    def _rest(self, pause: float | None, error: JaxOverlapError) -> None:
        """Waits for the next try; raises the error where there is none."""
        if pause is None:
            raise error
        self._sleep(pause)

    def _many(
        self,
        asks: Iterator[tuple[int, Ask | JaxOverlapError] | None],
        *,
        size: int,
        total: int | None,
        progress: bool | None,
        patient: bool = True,
    ) -> Generator[tuple[int, RequestOutput | JaxOverlapError], None, None]:
        """Keeps up to `size` asks under way, and yields what becomes of each."""
        from jaxoverlap import display  # it brings rich, which the other methods do without

        def begin(unary: Unary[RequestOutput], tries: Tries) -> Any:
            return self._begin(unary.stub(self._stubs).future, unary.request, tries)

        window = Window(begin, self._error_of, self._clock.now)
        exhausted = False
        with display.generation_bar(total, shown=display.is_wanted(progress)) as bar, closing(window):
            while True:
                while not exhausted and len(window) < size:
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
                        window.add(index, ask.unary(), self._tries(ask.timeout, patient=patient))
                if len(window):
                    index, result = window.take()
                    bar.update(finished=1, new_tokens=num_tokens(result))
                    if total is None:
                        bar.hide()  # the caller may print what it gets
                    yield index, result
                elif exhausted:
                    return
                else:
                    self._sleep(_NOTHING_NOW_SECONDS)
