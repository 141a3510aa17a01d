"""A front end's end of the socket to the engine: calls go in, tokens come out.

`run` reads until the engine ends; then every call fails, and so does whatever is tried afterwards. All of it happens
on the event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxoverlap.engine import messages
from jaxoverlap.engine.messages import EngineFacts, EngineStatus
from jaxoverlap.errors import AbortedError, EngineError, JaxOverlapError, ServerUnavailableError
from jaxoverlap.observe.logs import about
from jaxoverlap.outputs import FinishReason, TokenScore
from jaxoverlap.request import RequestOptions
from jaxoverlap.server.calls import Call, Sample

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_WARMING_UP = "the server is warming up"


class EngineClient:
    """See the module's rules.

    Args:
      on_ready: awaited with the engine's facts before calls are taken.

    Attributes:
      facts: None until the engine is ready.
      status: as the engine told it last.
      is_stalled: its watchdog says that a step takes far too long.
      failure: why nothing is taken any more; None if all is well.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_ready: Callable[[EngineFacts], Awaitable[None]],
    ) -> None:
        self.facts: EngineFacts | None = None
        self.status = EngineStatus()
        self.is_stalled = False
        self.failure: JaxOverlapError | None = None
        self._reader, self._writer, self._on_ready = reader, writer, on_ready
        self._samples: dict[int, tuple[Call, Sample]] = {}
        self._next_key = 0
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._question_ids = itertools.count()
        self._heard = time.monotonic()
        self._status_changed = asyncio.Condition()

    # ---------------------------------------------------------------- calls

    @property
    def num_calls(self) -> int:
        return len({id(call) for call, _ in self._samples.values()})

    def calls(self) -> list[Call]:
        """Those that wait for the engine."""
        return list({id(call): call for call, _ in self._samples.values()}.values())

    def new_keys(self, count: int) -> range:
        """Names for so many sequences."""
        first = self._next_key
        self._next_key += count
        return range(first, self._next_key)

    def check_open(self) -> None:
        """Raises `ServerUnavailableError` unless calls are taken."""
        if self.failure is not None:
            raise self.failure
        if self.facts is None:
            raise ServerUnavailableError(_WARMING_UP)
        if self.status.draining:
            raise ServerUnavailableError("the server is about to stop and takes no more requests")

    def submit(self, call: Call, options: RequestOptions) -> None:
        """Hands a call to the engine; it is fed from now on, until it is finished or `abandon`ed."""
        self.check_open()
        self._expect()
        call.queued_time = time.monotonic()
        self._samples |= {sample.key: (call, sample) for sample in call.samples}
        prompt, sampling = call.prompt_ids.tobytes(), messages.sampling_to_wire(call.sampling)
        self._send("add", call.samples[0].key, prompt, sampling, vars(options), call.arrival)

    def abandon(self, call: Call) -> None:
        """Nothing of a call is wanted any more; what the engine still does for it ends."""
        unfinished = [sample.key for sample in call.samples if sample.key in self._samples]
        if unfinished:
            self._send("abort", unfinished)
        for key in unfinished:
            del self._samples[key]

    async def ask(self, name: str, *arguments: Any) -> Any:
        """The engine's answer to an operator's question.

        Raises:
          JaxOverlapError: it refuses, or is not there.
        """
        if self.failure is not None:
            raise self.failure
        if self.facts is None:
            raise ServerUnavailableError(_WARMING_UP)
        self._expect()
        question = next(self._question_ids)
        answer = self._questions[question] = asyncio.get_running_loop().create_future()
        self._send("ask", question, name, list(arguments))
        try:
            return await answer
        finally:
            del self._questions[question]

    async def until(self, condition: Callable[[EngineStatus], bool]) -> None:
        """Returns when the engine's status fulfils a condition, or the engine is gone."""
        async with self._status_changed:
            await self._status_changed.wait_for(lambda: self.failure is not None or condition(self.status))

    async def next_change(self) -> None:
        """Returns when the engine's status, or that it is ready or gone, has changed."""
        async with self._status_changed:
            await self._status_changed.wait()

    @property
    def _is_expected(self) -> bool:
        """Something must be heard of the engine, or it hangs."""
        return bool(self._samples or self.status.has_work or self._questions)

    def _expect(self) -> None:
        """Something is about to be sent to which the engine will say something."""
        if not self._is_expected:
            self._heard = time.monotonic()  # it had no reason to say anything until now

    def seconds_silent(self) -> float:
        """How long nothing has been heard of the engine though it has work; 0 if it has none."""
        return time.monotonic() - self._heard if self._is_expected and self.facts is not None else 0.0

    def fail_all(self, error: JaxOverlapError) -> None:
        for call in self.calls():
            call.fail(error)
            self.abandon(call)

    # ---------------------------------------------------------------- the engine's side

    async def run(self) -> None:
        """Reads what the engine says until it ends; `failure` then tells why."""
        unpacker = messages.new_unpacker()
        try:
            while data := await self._reader.read(_READ_BYTES):
                self._heard = time.monotonic()
                unpacker.feed(data)
                for message in unpacker:
                    await self._take(message)
        except ConnectionError as error:
            logger.debug("the socket to the engine: %s", error)
        finally:
            await self._lose("the engine is gone")

    async def _take(self, message: list[Any]) -> None:
        self.is_stalled = False
        match message:
            case ["news", news]:
                self._take_news(messages.News(*news))
            case ["refused", key, error]:
                call, _ = self._samples.get(key, (None, None))
                if call is not None:
                    for sample in call.samples:
                        del self._samples[sample.key]
                    call.fail(messages.error_from_wire(error))
            case ["status", status]:
                self.status = EngineStatus(**status)
                await self._tell_status()
            case ["answer", question, value, error]:
                answer = self._questions.get(question)
                if answer is not None and not answer.done():
                    if error is None:
                        answer.set_result(value)
                    else:
                        answer.set_exception(messages.error_from_wire(error))
            case ["ready", facts]:
                facts = EngineFacts(**facts)
                await self._on_ready(facts)
                self.facts = facts
                await self._tell_status()
            case ["stalled", seconds]:
                logger.error("the engine hangs: a step has taken %.1f s", seconds)
                self.is_stalled = True
                await self._tell_status()
            case ["failed", text]:
                await self._lose(text)
            case _:
                raise EngineError(f"the engine sent {message[:1]}, which is no message of this build")

    def _take_news(self, news: messages.News) -> None:
        woken: set[Call] = set()
        started = {key: start for key, *start in news.started}
        for key, count in news.preempted:
            if key in self._samples:
                self._samples[key][1].num_preemptions = count
        ids: dict[int, list[int]] = {}
        for key, token_id in zip(news.keys, news.token_ids, strict=True):
            ids.setdefault(key, []).append(token_id)
        scores: dict[int, list[TokenScore]] = {}
        for key, score in news.scores:
            scores.setdefault(key, []).append(messages.score_from_wire(score))
        ended = {key: end for key, *end in news.finished}
        for key in ids.keys() | ended.keys():
            if key not in self._samples:
                continue
            call, sample = self._samples[key]
            try:
                if key in started:
                    self._start(call, sample, *started[key])
                self._feed(call, sample, ids.get(key, []), scores.get(key, []), ended.get(key))
            except Exception:
                text = "request %s: its output could not be put together"
                logger.exception(text, call.request_id, extra=about(call.request_id))
                call.fail(EngineError("internal error; the server's log says more"))
                self.abandon(call)
            woken.add(call)
        for call in woken:
            call.wake()

    def _start(
        self,
        call: Call,
        sample: Sample,
        cached_tokens: int,
        seed: int,
        admit_time: float | None,
        first_token_time: float | None,
        prompt_scores: Sequence[Any],
    ) -> None:
        sample.start(admit_time, first_token_time)
        if sample.index == 0:  # which computes the prompt, for the others too
            call.start(cached_tokens, seed, prompt_scores)

    def _feed(
        self, call: Call, sample: Sample, ids: Sequence[int], scores: Sequence[TokenScore], end: list[Any] | None
    ) -> None:
        if end is None:
            sample.add(ids, scores)
            if sample.finish_reason is not None:  # by a stop string, of which the engine knows nothing
                del self._samples[sample.key]
                self._send("stop", sample.key)
            return
        reason, matched_token_id, error, finish_time = end
        del self._samples[sample.key]
        if error is not None:
            call.fail(messages.error_from_wire(error))
        elif reason == FinishReason.ABORTED:
            call.fail(AbortedError(messages.ABORTED))
        else:
            sample.finish(ids, scores, FinishReason(reason), matched_token_id, finish_time)
        if call.error is not None:
            self.abandon(call)

    async def _tell_status(self) -> None:
        async with self._status_changed:
            self._status_changed.notify_all()

    async def _lose(self, why: str) -> None:
        if self.failure is None:
            self.failure = ServerUnavailableError(f"the engine is not running: {why}")
        for call in self.calls():
            call.fail(self.failure)
        self._samples.clear()
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(self.failure)
        await self._tell_status()

    def _send(self, *message: Any) -> None:
        if self.failure is None:
            self._writer.write(messages.pack(*message))
