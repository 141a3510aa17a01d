"""Nobody can take more than is there: open calls, sizes, and what waits for a reader who does not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from jaxoverlap.v1 import generate_service_pb2 as pb
from jaxoverlap.v1 import generate_service_pb2_grpc
from tests.server.rig import Caller, Rig, eventually, expected, generation, running
from tests.server.test_statuses import details_of, failure_of, field_of

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def test_calls_are_bounded_in_all_and_by_connection():
    with running(max_streams=3, max_streams_per_connection=2) as rig:
        rig.hold()
        other = Caller(rig.target)
        given = [generation(f"call {n}") for n in range(3)]
        calls = [rig.caller.stream(one) for one in given[:2]]
        eventually(lambda: len(rig.client.calls()) == 2)
        third = rig.caller.generate.Tokenize.future(pb.TokenizeRequest(text="a"))
        assert "max_streams_per_connection" in third.exception().details()
        assert details_of(third.exception(), error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
        calls.append(other.stream(given[2]))
        eventually(lambda: len(rig.client.calls()) == 3)
        error = failure_of(Caller(rig.target).answer, generation())
        assert error.code() == EXHAUSTED and "max_streams:" in error.details()
        rig.device.allow(None)
        for call in calls:
            assert sum(len(event.delta.token_ids) for event in call) == 8
        other.close()
        rig.wait_idle()
        rig.check_probe()


def test_prompts_and_outputs_have_the_servers_own_bounds():
    with running(max_prompt_tokens=10, max_output_tokens=5) as rig:
        assert (
            field_of(failure_of(rig.caller.answer, generation("x" * 11, stop={"max_tokens": 2}))) == "generation.prompt"
        )
        assert field_of(failure_of(rig.caller.answer, generation("x" * 10))) == "generation.stop.max_tokens"
        given = generation("x" * 10)
        given.stop.ClearField("max_tokens")
        assert len(rig.caller.answer(given).sequences[0].token_ids) == 5


def test_messages_beyond_the_bound_are_refused():
    with running(max_message_mib=0.01) as rig:
        assert failure_of(rig.caller.answer, generation("x" * 20_000)).code() == EXHAUSTED
        rig.caller.answer(generation("small"))


def test_a_large_prompt_is_refused_without_a_stir(rig):
    """Two million ids, eight megabytes: more than gRPC's own default lets through."""
    error = failure_of(rig.caller.answer, generation([5] * 2_000_000))
    assert field_of(error) == "generation.prompt" and "2000000 tokens" in error.details()


# ---------------------------------------------------------------- readers who do not read

SAMPLES = 32
ROOM = {"max_running": SAMPLES + 4, "num_pages": 9000}
LONG = generation("go on", num_sequences=SAMPLES, stop={"max_tokens": 500})


@pytest.fixture
def stalled_call() -> Iterator[Callable[[Rig], Any]]:
    """Opens a stream from which nothing is taken until somebody draws from it. gRPC itself then lets some hundred
    kilobytes through; a window of its usual size would let megabytes."""
    channels = []

    def start(rig: Rig) -> Any:
        channel = grpc.insecure_channel(
            rig.target, options=[("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        )
        channels.append(channel)
        stub = generate_service_pb2_grpc.GenerateServiceStub(channel)
        return stub.GenerateStream(pb.GenerateStreamRequest(generation=LONG))

    yield start
    for channel in channels:
        channel.close()


def ids_by_sample(events: Any) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in range(SAMPLES)]
    for event in events:
        ids[event.delta.index] += event.delta.token_ids
    return ids


def test_what_a_reader_has_not_taken_is_joined(stalled_call):
    with running(ROOM) as rig:
        whole = rig.caller.answer(LONG)
        call = stalled_call(rig)
        eventually(lambda: rig.frontend._generate.streams, "the stream")
        eventually(lambda: not rig.client.calls(), "the engine's end")
        assert any(stream.writing_since for stream in rig.frontend._generate.streams)  # it waits for its reader
        events = list(call)
        assert ids_by_sample(events) == [list(sequence.token_ids) for sequence in whole.sequences]
        assert len(events) < SAMPLES * 500 / 2


def test_a_reader_that_falls_too_far_behind_is_let_go_and_others_notice_nothing(stalled_call):
    with running(ROOM, max_backlog_kib=16) as rig:
        call = stalled_call(rig)
        eventually(lambda: rig.client.calls(), "the stream")
        given = [generation(f"other {n}", stop={"max_tokens": 200}) for n in range(3)]
        for one in given:
            assert list(rig.caller.answer(one).sequences[0].token_ids) == expected(one)
        eventually(lambda: not rig.client.calls(), "the end of the stalled call")
        rig.wait_idle()
        error = failure_of(list, call)
        assert error.code() == EXHAUSTED and "behind" in error.details()
        assert details_of(error, error_details_pb2.RetryInfo) is None
        eventually(lambda: not rig.frontend._generate.streams, "the handler's end")
        rig.check_probe()


def test_a_reader_that_takes_nothing_for_long_is_let_go(stalled_call):
    with running(ROOM, reader_timeout=0.5) as rig:
        call = stalled_call(rig)
        eventually(lambda: rig.frontend._generate.streams, "the stream")
        eventually(lambda: not rig.client.calls(), "the engine's end")
        eventually(lambda: call.done() or not any(s.writing_since for s in rig.frontend._generate.streams), "the end")
        error = failure_of(list, call)
        assert error.code() == EXHAUSTED and "took nothing" in error.details()
        rig.wait_idle()


@pytest.mark.parametrize(
    ("sampling", "stop", "field"),
    [
        ({"logit_bias": dict.fromkeys(range(90, 1000), 1.0)}, {}, "sampling.logit_bias"),
        ({"banned_token_ids": range(90, 1000)}, {}, "sampling.banned_token_ids"),
        ({"allowed_token_ids": range(90, 1000)}, {}, "sampling.allowed_token_ids"),
        ({"banned_token_ids": range(97)}, {}, "sampling.allowed_token_ids"),
        ({}, {"token_ids": range(20)}, "stop.token_ids"),
        ({}, {"token_ids": [97]}, "stop.token_ids"),
    ],
)
def test_lists_are_refused_before_they_take_the_engines_time(rig, monkeypatch, sampling, stop, field):
    submitted: list[Any] = []
    monkeypatch.setattr(rig.client, "submit", lambda call, options: submitted.append(call))
    error = failure_of(rig.caller.answer, generation("abc", sampling=sampling, stop=stop))
    assert field_of(error).startswith(f"generation.{field}") and not submitted
