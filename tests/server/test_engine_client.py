"""A front end's end of the socket to the engine, without either: what it waits for, and whom it blames."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from jaxoverlap.engine import messages
from jaxoverlap.engine.messages import EngineFacts
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.server.calls import Call
from jaxoverlap.server.engine_client import EngineClient
from jaxoverlap.server.statuses import SlowReaderError
from tests.server import toy


class Engine:
    """What a front end says to it is forgotten."""

    def __init__(self) -> None:
        self.client = EngineClient(None, self, self._be_glad)  # type: ignore[arg-type]
        self.client.facts = object()  # type: ignore[assignment]

    async def _be_glad(self, facts: EngineFacts) -> None: ...

    def write(self, data: bytes) -> None: ...

    def call(self, sampling: SamplingParams, max_pending: int) -> Call:
        keys = self.client.new_keys(sampling.num_samples)
        prompt = np.array([5, 6], np.int32)
        call = Call("r", keys, prompt, sampling, toy.TOKENIZER, arrival=time.monotonic(), max_pending=max_pending)
        self.client.submit(call, RequestOptions())
        return call

    async def tell(self, call: Call, tokens: int, *, first: bool = False) -> None:
        news: Any = messages.News()
        for sample in call.samples:
            if first:
                news.started.append([sample.key, 0, 1, 0.0, 0.0, []])
            news.keys += [sample.key] * tokens
            news.token_ids += [5] * tokens
            news.scores += [[sample.key, [5, -1.0, 1, [[i, -1.0] for i in range(20)]]]] * tokens
        unpacker = messages.new_unpacker()
        unpacker.feed(messages.pack("news", news.to_wire()))
        for message in unpacker:
            await self.client._take(message)


def test_a_reader_is_not_blamed_for_what_comes_at_once():
    async def main() -> None:
        engine = Engine()
        call = engine.call(SamplingParams(n=8, logprobs=20), max_pending=1 << 14)
        await engine.tell(call, 1, first=True)
        for sample in call.samples:
            sample.pending.take()
        with call.writing():
            await engine.tell(call, 36)
            call.judge_reader(60.0)
        assert call.pending_bytes > 1 << 14 and call.error is None
        call.judge_reader(60.0)  # the message has arrived meanwhile
        with call.writing():
            call.judge_reader(60.0)  # and this is another one
        await call.changed()

    asyncio.run(main())


def test_a_reader_who_does_not_take_a_message_while_too_much_waits_is_let_go():
    async def main() -> None:
        engine = Engine()
        call = engine.call(SamplingParams(), max_pending=100)
        await engine.tell(call, 1000, first=True)
        with suppress(asyncio.CancelledError), call.writing():
            call.judge_reader(60.0)
            assert call.error is None
            call.judge_reader(60.0)
            await asyncio.sleep(10.0)
        with pytest.raises(SlowReaderError, match="behind"):
            await call.changed()

    asyncio.run(main())


@pytest.mark.parametrize("sends", ["a question", "a request"])
def test_an_engine_that_had_nothing_to_say_was_not_silent(monkeypatch, sends):
    async def main() -> None:
        now = 0.0
        monkeypatch.setattr("jaxoverlap.server.engine_client.time.monotonic", lambda: now)
        engine = Engine()
        now = 100.0
        assert engine.client.seconds_silent() == 0.0
        if sends == "a question":
            asking = asyncio.create_task(engine.client.ask("status"))
            await asyncio.sleep(0)
        else:
            engine.call(SamplingParams(), max_pending=100)
        assert engine.client.seconds_silent() == 0.0
        now = 107.0
        assert engine.client.seconds_silent() == 7.0
        if sends == "a question":
            asking.cancel()

    asyncio.run(main())
