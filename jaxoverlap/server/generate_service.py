"""`GenerateService`: checks, tokens in, pieces out. What takes time runs in threads, beside the event loop.

The way of a call: the message's fields and the prompt's ids · the engine · pieces for its reader.
Whatever ends it, leaving `_running` takes its request out of the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import numpy as np

from jaxoverlap.engine.messages import compact
from jaxoverlap.errors import DeadlineError, InvalidRequestError
from jaxoverlap.observe.logs import about
from jaxoverlap.outputs import CompletionOutput, RequestOutput
from jaxoverlap.request import RequestLimits
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.server.calls import Call
from jaxoverlap.server.engine_client import EngineClient
from jaxoverlap.server.prompt_ids import encode_prompt
from jaxoverlap.server.text_bound import TextBound
from jaxoverlap.text.stop_strings import prepare_stops
from jaxoverlap.text.tokenizer import Tokenizer
from jaxoverlap.v1 import generate_service_pb2 as pb
from jaxoverlap.v1 import generate_service_pb2_grpc
from jaxoverlap.wire import answers, requests

if TYPE_CHECKING:
    from jaxoverlap.server.tracing import Tracing

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What a front end needs of the model; known when the engine is ready.

    Attributes:
      sampling_defaults: for what a message leaves out.
    """

    name: str
    tokenizer: Tokenizer
    limits: RequestLimits
    eos_token_ids: tuple[int, ...]
    text_bound: TextBound | None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    def encode_prompt(self, given: pb.Generation | pb.TokenizeRequest) -> list[int]:
        """As `prompt_ids.encode_prompt`."""
        return encode_prompt(given, self.tokenizer, self.text_bound, self.limits.max_model_len - 1)

    def check_name(self, wanted: str) -> None:
        """Raises `InvalidRequestError` for another model's; an empty name is whatever is served."""
        if wanted and wanted != self.name:
            raise InvalidRequestError("model", wanted, f"{self.name!r} is served here")


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Bounds of single calls; where a number of tokens is None, the model's context is the bound.

    Attributes:
      max_pending: bytes that may wait for a stream's reader.
    """

    max_prompt_tokens: int | None
    max_output_tokens: int | None
    max_pending: int


class GenerateService(generate_service_pb2_grpc.GenerateServiceServicer):
    """See the module's rules.

    Args:
      name_prefix: a request's id is this and a number.
      tracing: is told of each call that has ended; None if nobody wants to know.

    Attributes:
      model: set when the engine is ready.
      streams: open ones.
    """

    def __init__(
        self,
        engine: EngineClient,
        limits: CallLimits,
        threads: Executor,
        name_prefix: str,
        tracing: Tracing | None = None,
    ) -> None:
        self.model: ServedModel | None = None
        self.streams: set[Call] = set()
        self._engine, self._limits = engine, limits
        self._threads, self._name_prefix, self._tracing = threads, name_prefix, tracing

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        async with self._running(request.generation, context, stream=False) as call:
            while not call.is_finished:
                await call.changed()
            return await self._in_thread(_response, call, request.generation)

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: grpc.aio.ServicerContext) -> None:
        async with self._running(request.generation, context, stream=True) as call:
            self.streams.add(call)
            try:
                events = StreamEvents(call, request.generation)
                while not events.have_ended:
                    await call.changed()
                    if call.started is None:
                        continue
                    if not events.have_begun:
                        is_long = call.sampling.prompt_logprobs is not None
                        event = await self._in_thread(events.begin) if is_long else events.begin()
                        with call.writing():
                            await context.write(event)
                    for event in events.take():
                        with call.writing():
                            await context.write(event)
            finally:
                self.streams.discard(call)

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        model = self._ready_model()
        model.check_name(request.model)
        ids = await self._in_thread(model.encode_prompt, request)
        return pb.TokenizeResponse(token_ids=ids, max_model_len=model.limits.max_model_len)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        model = self._ready_model()
        model.check_name(request.model)
        return pb.DetokenizeResponse(text=await self._in_thread(_decode, request, model))

    # ---------------------------------------------------------------- inside

    @asynccontextmanager
    async def _running(
        self, given: pb.Generation, context: grpc.aio.ServicerContext, *, stream: bool
    ) -> AsyncIterator[Call]:
        """A request in the engine, as long as its call lasts."""
        arrival = time.monotonic()
        model = self._ready_model()
        model.check_name(given.model)
        ids, sampling = await self._in_thread(_read, given, model, self._limits, stream)
        keys = self._engine.new_keys(sampling.num_samples)
        call = Call(
            f"{self._name_prefix}{keys[0]}",
            keys,
            ids,
            sampling,
            model.tokenizer,
            arrival=arrival,
            max_pending=self._limits.max_pending if stream else None,
        )
        time_left = context.time_remaining()
        if time_left is not None and time_left <= 0:
            raise DeadlineError("the deadline passed before the request could be queued")
        self._engine.submit(call, requests.request_options(given, timeout=time_left))
        logger.debug(
            "request %s (%r to its caller): %d prompt tokens",
            call.request_id,
            given.client_request_id,
            len(ids),
            extra=about(call.request_id, client_request_id=given.client_request_id, prompt_tokens=len(ids)),
        )
        try:
            yield call
        except asyncio.CancelledError:
            if call.error is None:
                raise
            raise call.error from None  # `Call.fail` cancelled it
        finally:
            self._engine.abandon(call)
            self._log_end(call)
            if self._tracing is not None:
                method = "GenerateStream" if stream else "Generate"
                self._tracing.record(call, method, model.name, context.invocation_metadata() or ())

    def _log_end(self, call: Call) -> None:
        num_ids, seconds = sum(sample.num_ids for sample in call.samples), time.monotonic() - call.arrival
        logger.debug(
            "request %s ended after %.3f s, %d outputs",
            call.request_id,
            seconds,
            num_ids,
            extra=about(
                call.request_id,
                output_tokens=num_ids,
                seconds=round(seconds, 6),
                finish_reasons=[sample.finish_reason for sample in call.samples],
                error=None if call.error is None else type(call.error).__name__,
            ),
        )

    def _ready_model(self) -> ServedModel:
        self._engine.check_open()
        assert self.model is not None
        return self.model

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))


def _read(
    given: pb.Generation, model: ServedModel, limits: CallLimits, stream: bool
) -> tuple[np.ndarray, SamplingParams]:
    """A message's prompt and parameters, with the server's own limits applied; checked as far as the engine's limits
    go, so that a long list takes none of the engine's time."""
    sampling = requests.sampling_params(given, model.sampling_defaults)
    if stream and sampling.num_samples > sampling.n:
        allowed = "which samples are the best is not known before the end; use n, or Generate"
        raise InvalidRequestError("best_of", sampling.best_of, allowed)
    if sampling.stop and not _sends_text(given):
        raise InvalidRequestError("stop", list(sampling.stop), "they are found in text, and returns.text is false")
    ids = model.limits.check_prompt(model.encode_prompt(given))
    if given.HasField("chat"):
        sampling = sampling.for_prompt(requests.prompt_of(given))
    prepare_stops(model.tokenizer, sampling)
    most = limits.max_prompt_tokens
    if most is not None and len(ids) > most:
        raise InvalidRequestError("prompt", f"{len(ids)} tokens", f"this server takes at most {most}")
    room = model.limits.resolve_max_tokens(len(ids), sampling.max_tokens)
    most = limits.max_output_tokens
    if most is not None and sampling.max_tokens is not None and sampling.max_tokens > most:
        raise InvalidRequestError("max_tokens", sampling.max_tokens, f"this server gives at most {most}")
    if most is not None and sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=min(most, room))
    model.limits.check_rules(sampling, model.eos_token_ids)
    return ids, compact(sampling)


def _sends_text(given: pb.Generation) -> bool:
    return given.returns.text if given.returns.HasField("text") else True


def _sends_ids(given: pb.Generation) -> bool:
    return given.returns.token_ids or not _sends_text(given)


def _decode(request: pb.DetokenizeRequest, model: ServedModel) -> str:
    ids = list(request.token_ids)
    for index, token_id in enumerate(ids):
        if token_id >= model.limits.vocab_size:
            allowed = f"token ids go from 0 to {model.limits.vocab_size - 1}"
            raise InvalidRequestError(f"token_ids[{index}]", token_id, allowed)
    skips = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    return model.tokenizer.decode(ids, skip_special_tokens=skips)


def _response(call: Call, given: pb.Generation) -> pb.GenerateResponse:
    samples = call.samples
    assert call.started is not None
    completions = [sample.completion(sample.pending.take()) for sample in samples]
    if call.sampling.is_ranked:
        completions = sorted(completions, key=lambda one: -(one.cumulative_logprob or 0.0))[: call.sampling.n]
    output = RequestOutput(
        prompt="",
        prompt_token_ids=[],
        prompt_tokens=len(call.prompt_ids),
        outputs=completions,
        seed=call.started.seed,
        cached_tokens=call.started.cached_tokens,
        prompt_logprobs=call.prompt_logprobs(),
        request_id=call.request_id,
    )
    response = answers.response(output)
    for sequence in response.sequences:
        if not _sends_text(given):
            sequence.ClearField("text")
        if not _sends_ids(given):
            sequence.ClearField("token_ids")
    return response


class StreamEvents:
    """What of a call its reader has not been told yet.

    Attributes:
      have_begun, have_ended: the first event was taken; all is told.
    """

    def __init__(self, call: Call, given: pb.Generation) -> None:
        self.have_begun = self.have_ended = False
        self._call = call
        self._sends_text, self._sends_ids = _sends_text(given), _sends_ids(given)
        self._unfinished = list(call.samples)

    def begin(self) -> pb.GenerateStreamResponse:
        """The first event, of a call that has started. With log-probabilities of the prompt: not for an event loop."""
        call = self._call
        assert call.started is not None
        self.have_begun = True
        return answers.started(
            request_id=call.request_id,
            prompt_tokens=len(call.prompt_ids),
            cached_tokens=call.started.cached_tokens,
            seed=call.started.seed,
            prompt_logprobs=call.prompt_logprobs(),
        )

    def take(self) -> Iterator[pb.GenerateStreamResponse]:
        """What is new since, of a call that has begun."""
        for sample in list(self._unfinished):
            piece = sample.pending.take()
            text, ids = piece.text if self._sends_text else "", piece.token_ids if self._sends_ids else ()
            if text or ids or piece.logprobs:
                yield answers.delta(sample.index, text, ids, piece.logprobs)
            # While the delta was on its way more may have come: then the end waits for the next round.
            if sample.finish_reason is not None and not sample.pending.num_bytes:
                self._unfinished.remove(sample)
                yield self._finished(sample.completion(None), sample.num_ids)
        self.have_ended = not self._unfinished

    def _finished(self, completion: CompletionOutput, num_ids: int) -> pb.GenerateStreamResponse:
        assert self._call.started is not None
        event = answers.finished(
            completion, prompt_tokens=len(self._call.prompt_ids), cached_tokens=self._call.started.cached_tokens
        )
        event.finished.usage.completion_tokens = num_ids
        return event
