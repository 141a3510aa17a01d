"""The engine's side of the socket: one message a step, and nobody who does not read holds it up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from jaxoverlap.engine import link as link_module
from jaxoverlap.engine import messages
from jaxoverlap.engine.core_process import EngineSpec, run_engine
from jaxoverlap.engine.link import Link
from jaxoverlap.errors import DeadlineError, EngineError, InvalidRequestError, QueueFullError
from jaxoverlap.outputs import TokenScore
from jaxoverlap.request import RequestLimits
from jaxoverlap.runtime.rules_seats import bias_of
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from tests.fakes import oracle, salt_of
from tests.server import toy
from tests.server.rig import PATIENCE, eventually


class Peer:
    """A front end in its simplest form."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(PATIENCE)
        self._unpacker = messages.new_unpacker()
        self._read: list[list[Any]] = []

    def send(self, *message: Any) -> None:
        self.socket.sendall(messages.pack(*message))

    def add(self, key: int, prompt: list[int], **sampling: Any) -> None:
        self.socket.sendall(self.packed(key, prompt, **sampling))

    def packed(self, key: int, prompt: list[int], **sampling: Any) -> bytes:
        params = messages.sampling_to_wire(SamplingParams(temperature=0, seed=key, **sampling))
        return messages.pack("add", key, np.array(prompt, np.int32).tobytes(), params, {}, time.monotonic())

    def next(self, kind: str) -> list[Any]:
        """The next message of a kind; others are left out."""
        end = time.monotonic() + PATIENCE
        while True:
            for index, message in enumerate(self._read):
                if message[0] == kind:
                    del self._read[: index + 1]
                    return message
            self._read.clear()
            assert time.monotonic() < end, f"no {kind} has come"
            data = self.socket.recv(1 << 16)
            assert data, "the engine is gone"
            self._unpacker.feed(data)
            self._read += self._unpacker

    def news(self) -> messages.News:
        return messages.News(*self.next("news")[1])


@pytest.fixture
def engine() -> Iterator[tuple[Peer, list[Peer]]]:
    """A supervisor, and two front ends."""
    pairs = [socket.socketpair() for _ in range(3)]
    spec = EngineSpec(builder=toy.BUILDER, config={"max_running": 8, "page_size": 4, "num_pages": 900})
    thread = threading.Thread(target=run_engine, args=(spec, pairs[0][0], [pair[0] for pair in pairs[1:]]))
    thread.start()
    supervisor, *frontends = [Peer(pair[1]) for pair in pairs]
    for peer in (supervisor, *frontends):
        assert peer.next("ready")[1]["name"] == "toy"
    yield supervisor, frontends
    toy.BUILT[-1].runner.allow(None)
    supervisor.socket.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    for peer in frontends:
        peer.socket.close()


def expected(prompt: list[int], max_tokens: int, key: int) -> list[int]:
    return oracle(prompt, max_tokens, [], salt=salt_of(key))[0]


def test_a_step_is_one_message_to_each_front_end(engine):
    _, (first, second) = engine
    device = toy.BUILT[-1].runner
    device.allow(0)
    for key in range(4):
        first.add(key, [key + 1] * 5, max_tokens=6, ignore_eos=True)
    second.add(0, [9, 9], max_tokens=6, ignore_eos=True)
    eventually(lambda: len(toy.BUILT[-1].engine.loop.scheduler.state.running) or device.is_held)
    device.allow(1)
    eventually(lambda: device.is_held)
    device.allow(None)
    ids: dict[int, list[int]] = {key: [] for key in range(4)}
    ended: set[int] = set()
    while len(ended) < 4:
        news = first.news()
        for key, token_id in zip(news.keys, news.token_ids, strict=True):
            assert key not in ended
            ids[key].append(token_id)
        ended |= {end[0] for end in news.finished}
    assert ids == {key: expected([key + 1] * 5, 6, key) for key in range(4)}
    theirs: list[int] = []
    while len(theirs) < 6:
        news = second.news()
        assert set(news.keys) <= {0}
        theirs += news.token_ids
    assert theirs == expected([9, 9], 6, 0)


def test_news_that_nobody_reads_are_joined_and_hold_nobody_up(engine):
    _, (deaf, reader) = engine
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    prompt = [3, 1, 4]
    for key in range(100):
        deaf.add(key, prompt, max_tokens=100, ignore_eos=True)
    reader.add(7, prompt, max_tokens=5, ignore_eos=True)
    got: list[int] = []
    while len(got) < 5:
        got += reader.news().token_ids
    assert got == expected(prompt, 5, 7)
    eventually(lambda: not toy.BUILT[-1].engine.has_work, "the end of what nobody reads")
    ids: dict[int, list[int]] = {}
    num_messages, ended = 0, 0
    while ended < 100:
        news = deaf.news()
        num_messages += 1
        ended += len(news.finished)
        for key, token_id in zip(news.keys, news.token_ids, strict=True):
            ids.setdefault(key, []).append(token_id)
    assert all(ids[key] == expected(prompt, 100, key) for key in (0, 1, 99))
    assert {len(tokens) for tokens in ids.values()} == {100}
    assert num_messages < 1000  # of some 1,250 steps


def test_a_front_end_that_does_not_read_for_ever_is_given_up(monkeypatch):
    monkeypatch.setattr(link_module, "MAX_UNSENT", 1000)
    ours, theirs = socket.socketpair()
    link = Link(0, ours)
    while link.is_open:
        link.post("status", "x" * 500)
        link.flush()
    assert not link.has_unsent
    link.close()
    theirs.close()


def test_messages_leave_in_the_order_in_which_they_were_said():
    ours, theirs = socket.socketpair()
    link, peer = Link(0, ours), Peer(theirs)
    link.news.keys.append(1)
    link.news.token_ids.append(2)
    link.post("status", {})
    link.news.keys.append(3)
    link.news.token_ids.append(4)
    link.flush()
    unpacker = messages.new_unpacker()
    unpacker.feed(peer.socket.recv(1 << 16))
    assert [message[0] for message in unpacker] == ["news", "status", "news"]
    link.close()
    theirs.close()


def test_a_front_end_may_go_while_another_thread_sends_to_it():
    """The answer to an operator's question is sent from aside."""
    is_sending, may_end = threading.Event(), threading.Event()

    class Socket:
        def setblocking(self, flag: bool) -> None: ...

        def send(self, data: bytearray) -> int:
            with memoryview(data):  # as the real one holds it
                is_sending.set()
                assert may_end.wait(PATIENCE)
            raise BrokenPipeError

        def recv(self, size: int) -> bytes:
            return b""

    link = Link(0, Socket())  # type: ignore[arg-type]
    sender = threading.Thread(target=link.post_from_aside, args=("answer", "x"))
    sender.start()
    assert is_sending.wait(PATIENCE)
    threading.Timer(0.05, may_end.set).start()
    assert link.receive() == []
    sender.join()
    assert not link.is_open and not link.has_unsent


def test_a_front_end_that_goes_takes_its_requests_along(engine):
    _, (first, second) = engine
    scheduler = toy.BUILT[-1].engine.loop.scheduler
    toy.BUILT[-1].runner.allow(0)
    first.add(1, [1, 2, 3], max_tokens=900)
    second.add(1, [1, 2, 3], max_tokens=4, ignore_eos=True)
    first.socket.close()
    toy.BUILT[-1].runner.allow(None)
    got: list[int] = []
    while len(got) < 4:
        got += second.news().token_ids
    eventually(lambda: not scheduler.has_unfinished)
    assert got == expected([1, 2, 3], 4, 1)


def test_a_flood_of_requests_does_not_hold_up_what_runs(engine, monkeypatch):
    """Only so many commands are done between two steps."""
    _, (first, second) = engine
    device = toy.BUILT[-1].runner
    device.allow(0)
    first.add(0, [5], max_tokens=50, ignore_eos=True)
    eventually(lambda: device.is_held)
    second.socket.sendall(b"".join(second.packed(key, [key % 90], max_tokens=1) for key in range(1, 1000)))
    scheduler = toy.BUILT[-1].engine.loop.scheduler
    device.allow(1)
    eventually(lambda: device.is_held)
    assert scheduler.num_waiting + scheduler.num_running <= 1 + 2 * 64
    device.allow(None)
    ended = 0
    while ended < 999:
        ended += len(second.news().finished)


class BrokenConstraints:
    """Compiles nothing, and says so as no compiler should: with whatever error there is."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def submit(self, sampling: SamplingParams) -> Future[Any]:
        broken: Future[Any] = Future()
        broken.set_exception(self._error)
        return broken

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("raised", "told"),
    [(RecursionError("too deep"), EngineError), (InvalidRequestError("stop", 1, "use 2"), InvalidRequestError)],
)
def test_whatever_a_constraint_raises_ends_its_request_alone(engine, raised: Exception, told: type[Exception]):
    _, (first, second) = engine
    built, device = toy.BUILT[-1].engine, toy.BUILT[-1].runner
    built.constraints = BrokenConstraints(raised)
    device.allow(0)
    second.add(0, [9, 9], max_tokens=6, ignore_eos=True)
    eventually(lambda: device.is_held)
    first.add(4, [1], structured_output=StructuredOutput(any_json=True))
    device.allow(None)
    _, key, error = first.next("refused")
    assert key == 4 and type(messages.error_from_wire(error)) is told
    ids: list[int] = []
    while len(ids) < 6:
        ids += second.news().token_ids
    assert ids == expected([9, 9], 6, 0)


def test_a_request_that_no_front_end_of_ours_sends_is_refused_alone(engine):
    _, (first, _) = engine
    first.send("add", 1, [1], {"top_p": "much"}, {"wishes": 3}, 0.0)
    _, key, error = first.next("refused")
    assert key == 1 and type(messages.error_from_wire(error)) is EngineError
    first.add(2, [3], max_tokens=1, ignore_eos=True)
    assert first.news().token_ids == expected([3], 1, 2)


def test_a_question_that_breaks_is_answered_and_the_engine_goes_on(engine, monkeypatch):
    supervisor, (first, _) = engine
    monkeypatch.setattr(toy.BUILT[-1].engine.loop.scheduler, "memory_snapshot", lambda: 1 / 0)
    supervisor.send("ask", 5, "memory_snapshot", [])
    _, question, value, error = supervisor.next("answer")
    assert (question, value) == (5, None) and type(messages.error_from_wire(error)) is EngineError
    supervisor.send("ask", 6, "what is this", [])
    assert supervisor.next("answer")[3][0] == "EngineError"
    first.add(2, [3], max_tokens=1, ignore_eos=True)
    assert first.news().token_ids == expected([3], 1, 2)


def test_a_value_too_deep_to_be_shown_crosses_the_socket():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    error = messages.error_to_wire(InvalidRequestError("stop", deep, "use text"))
    assert "deeply nested" in str(messages.error_from_wire(error))
    while deep:  # taken apart here, for Python would do it by recursion
        deep = deep[0]


def test_refusals_and_errors_cross_the_socket_whole(engine):
    _, (first, _) = engine
    first.send("add", 1, b"", {}, {}, 0.0)
    _, key, error = first.next("refused")
    assert key == 1 and isinstance(messages.error_from_wire(error), InvalidRequestError)
    for error in (
        InvalidRequestError("top_p", 7.5, "use less"),
        InvalidRequestError("stop", ["a", "b"], "use fewer"),
        InvalidRequestError("stop", "\ud800", "use text, not \ud800"),
        QueueFullError("later"),
        DeadlineError("too late"),
    ):
        unpacker = messages.new_unpacker()
        unpacker.feed(messages.pack(messages.error_to_wire(error)))
        ((described,),) = unpacker
        again = messages.error_from_wire(described)
        assert type(again) is type(error)
        assert isinstance(error, InvalidRequestError) or str(again) == str(error)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(n=2, best_of=4, temperature=0.5, top_k=3, seed=2**64 - 1, stop=["x"], stop_token_ids=[1, 2]),
        SamplingParams(logit_bias={5: -3.0}, allowed_token_ids=[5, 6], logprobs=0, min_tokens=2, max_tokens=9),
        SamplingParams(structured_output=StructuredOutput(json_schema={"type": "object"})),
        SamplingParams(structured_output=StructuredOutput(choices=["a", "b"])),
    ],
)
def test_parameters_cross_the_socket_whole(sampling):
    unpacker = messages.new_unpacker()
    unpacker.feed(messages.pack(messages.sampling_to_wire(sampling)))
    ((values,),) = unpacker
    assert messages.sampling_from_wire(values) == sampling == messages.compact(sampling)


@pytest.mark.parametrize("field", ["logit_bias", "banned_token_ids", "allowed_token_ids"])
def test_lists_as_long_as_a_vocabulary_take_little_of_the_engine_s_time(field):
    ids = range(150_000)
    sampling = SamplingParams(**{field: dict.fromkeys(ids, 1.0) if field == "logit_bias" else ids})
    packed = messages.pack(messages.sampling_to_wire(sampling))
    limits, taken = RequestLimits(vocab_size=200_000, max_model_len=4096, page_size=16, num_pages=1000), []
    for _ in range(3):
        begun = time.thread_time()
        unpacker = messages.new_unpacker()
        unpacker.feed(packed)
        ((values,),) = unpacker
        arrived = messages.sampling_from_wire(values)
        limits.check_rules(arrived, ())
        bias_of(arrived, limits.vocab_size)
        taken.append(time.thread_time() - begun)
    assert min(taken) < 0.1, "it was half a second with a check of each entry; it is some 10 ms"


def test_scores_arrive_with_their_tokens(engine):
    """The engine's requests may carry scores; whatever is new of them goes along."""
    _, (first, _) = engine
    scheduler = toy.BUILT[-1].engine.loop.scheduler
    commit = scheduler.commit

    def scoring_commit(plan: Any, result: Any) -> Any:
        output = commit(plan, result)
        for request, token_id in zip(output.requests, output.token_ids, strict=True):
            request.scores.append(TokenScore(token_id, -0.5, 1, ((token_id, -0.5),)))
        return output

    scheduler.commit = scoring_commit
    first.add(3, [1, 2], max_tokens=10, ignore_eos=True)
    ids: list[int] = []
    scores: list[Any] = []
    while len(ids) < 10:
        news = first.news()
        ids += news.token_ids
        scores += [score for _, score in news.scores]
    assert [score[0] for score in scores] == ids
    assert scores[0] == [ids[0], -0.5, 1, [[ids[0], -0.5]]]


def test_the_status_tells_when_work_begins_and_ends(engine):
    supervisor, (first, _) = engine
    first.add(1, [1], max_tokens=3, ignore_eos=True)
    begin = messages.EngineStatus(**supervisor.next("status")[1])
    assert begin.has_work
    while True:
        status = messages.EngineStatus(**supervisor.next("status")[1])
        if not status.has_work:
            break
    assert (status.running, status.waiting, status.kv_used) == (0, 0, 0.0)


def test_a_front_end_that_goes_leaves_nothing_in_the_metrics(engine):
    supervisor, (first, second) = engine
    for key in range(12):
        first.add(key, [key + 1] * 5, max_tokens=800, ignore_eos=True)
    second.add(0, [9, 9], max_tokens=6, ignore_eos=True)
    assert first.news().keys
    first.socket.close()

    def metrics() -> dict[str, Any]:
        supervisor.send("ask", 1, "metrics", [])
        return supervisor.next("answer")[2]

    read = eventually(lambda: (now := metrics())["request_success"]["length"] == 1 and now, "the other's end")
    assert (read["num_requests_running"], read["num_requests_waiting"], read["kv_cache_usage_perc"]) == (0, 0, 0)
    # Of the twelve it may have read some before it noticed; each one that began has ended.
    assert read["request_started"] == 1 + read["request_success"]["aborted"] > 1
