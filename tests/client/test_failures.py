"""Statuses become exceptions; tries are repeated where nobody can tell, and nowhere else."""

from __future__ import annotations

import socket
import time

import pytest

from jaxoverlap import (
    AbortedError,
    AccessDeniedError,
    ConflictError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestOptions,
    SamplingParams,
    ServerUnavailableError,
    UnsupportedError,
)
from jaxoverlap.client import calls
from jaxoverlap.client.calls import FIRST_PAUSE, LONGEST_PAUSE
from tests.client.fake_server import AfterFirst, FakeServer

UNAVAILABLE = ServerUnavailableError("warming up")
FULL = QueueFullError("32 requests wait", 1.5)


def ways(client):
    """A request by each of its methods."""
    return [
        lambda: client.generate("abc"),
        lambda: client.generate(["abc"]),
        lambda: client.chat([{"role": "user", "content": "abc"}]),
        lambda: list(client.stream("abc")),
        lambda: [raised(result) for _, result in client.generate_each([("abc", SamplingParams())])],
    ]


def raised(result):
    if isinstance(result, Exception):
        raise result
    return result


@pytest.mark.parametrize("seconds", [1e9, 1e10, 1e18, 1e300])
def test_an_enormous_timeout_is_no_deadline_that_has_passed(connect, server, seconds):
    assert connect(server.target, timeout=seconds).load()
    client = connect(server.target)
    assert client.generate("abc", options=RequestOptions(timeout=seconds))[0].text == "<abc>"
    assert all(call.seconds_left is None or call.seconds_left > 1e7 for call in server.calls)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("top_p", 3, "use a number in (0, 1]"),
        InvalidRequestError("model", "gpt", "served is toy"),
        UnsupportedError("no best_of in streams"),
        QueueFullError("too many streams"),
        DeadlineError("late"),
        AbortedError("by an operator"),
        AccessDeniedError("another token is needed"),
        EngineError("not a number in the logits"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_raised_as_what_they_are_and_at_once(client, server, error):
    script = client.script_time()
    for way in ways(client):
        server.faults.append(error)
        with pytest.raises(type(error)) as caught:
            way()
        in_list = str(error).replace("top_p", "prompts[0].top_p")
        assert str(caught.value) in (str(error), in_list)
    assert len(server.calls) == 5 and script.pauses == []


@pytest.mark.parametrize("error", [AbortedError("by an operator"), EngineError("broken"), UNAVAILABLE, FULL])
def test_a_stream_that_has_begun_is_never_begun_again(client, server, error):
    script = client.script_time()
    server.faults.append(AfterFirst(error))
    stream = client.stream("abc")
    assert next(stream).text == "<"
    with pytest.raises(type(error), match=str(error)):
        list(stream)
    assert len(server.calls) == 1 and script.pauses == []


def test_too_slow_a_reader_is_told_from_a_full_service(client, server):
    server.faults.append(AfterFirst(QueueFullError("nobody read for 60 s")))
    stream = client.stream("abc")
    next(stream)
    with pytest.raises(AbortedError, match="nobody read"):
        list(stream)


def test_pauses_double_and_then_it_is_given_up(client, server):
    script = client.script_time()
    server.faults.extend([UNAVAILABLE] * 5)
    server.admin_faults.extend([UNAVAILABLE] * 5)
    for work in (lambda: list(client.stream("abc")), client.load):
        script.pauses.clear()
        with pytest.raises(ServerUnavailableError, match="warming up"):
            work()
        assert script.pauses == [FIRST_PAUSE * 2**i for i in range(4)]
    assert len(server.calls) == len(server.admin_calls) == 5


def test_prompts_are_given_up_as_well(connect, server, monkeypatch):
    monkeypatch.setattr(calls, "FIRST_PAUSE", 0.001)
    client = connect(server.target, max_retries=2)
    for way in ways(client):
        server.calls.clear()
        server.faults.extend([UNAVAILABLE] * 3)
        with pytest.raises(ServerUnavailableError, match="warming up"):
            way()
        assert len(server.calls) == 3 and not server.faults


def test_prompts_rest_while_others_go_on(client, server):
    server.faults.append(UNAVAILABLE)
    begun = time.monotonic()
    results = list(client.generate_each([("a", SamplingParams()), ("b", SamplingParams()), ("c", SamplingParams())]))
    assert time.monotonic() - begun >= FIRST_PAUSE / 2
    assert sorted((index, output.text) for index, output in results) == [(0, "<a>"), (1, "<b>"), (2, "<c>")]
    assert len(server.calls) == 4
    assert server.calls[-1].generation.text == server.calls[0].generation.text == "abc"[results[-1][0]]


def test_chance_makes_pauses_shorter_by_up_to_a_half(client, server):
    script = client.script_time(chance=1.0)
    server.faults.extend([UNAVAILABLE] * 2)
    assert list(client.stream("abc"))[-1].output.text == "<abc>"
    assert script.pauses == [FIRST_PAUSE / 2, FIRST_PAUSE]


def test_pauses_have_an_end(connect, server):
    client = connect(server.target, max_retries=9)
    script = client.script_time()
    server.faults.extend([UNAVAILABLE] * 9)
    assert list(client.stream("abc"))[-1].output.text == "<abc>"
    assert script.pauses[-1] == LONGEST_PAUSE and max(script.pauses) == LONGEST_PAUSE


def test_a_full_service_says_when_to_come_back(client, server):
    script = client.script_time()
    server.faults.extend([FULL, FULL])
    assert list(client.stream("abc"))[-1].output.text == "<abc>"
    assert script.pauses == [1.5 + FIRST_PAUSE, 1.5 + 2 * FIRST_PAUSE]


def test_no_retries_if_none_are_wanted(connect, server):
    client = connect(server.target, max_retries=0)
    for error in (UNAVAILABLE, FULL):
        server.faults.append(error)
        with pytest.raises(type(error)):
            client.generate("abc")
    assert len(server.calls) == 2


def test_lists_wait_for_a_full_service_and_single_prompts_do_not(connect, server):
    client = connect(server.target, max_retries=1)
    soon = QueueFullError("full", 0.001)
    server.faults.extend([soon] * 2)
    with pytest.raises(QueueFullError):
        client.generate("abc")
    server.faults.extend([soon] * 5)
    assert [output.text for output in client.generate(["a", "b"])] == ["<a>", "<b>"]
    server.faults.extend([soon] * 3)
    [(_, output)] = client.generate_each([("abc", SamplingParams())])
    assert output.text == "<abc>"


def test_no_pause_outlasts_the_deadline(connect, server):
    client = connect(server.target, max_retries=99)
    script = client.script_time()
    server.faults.extend([UNAVAILABLE] * 20)
    with pytest.raises(ServerUnavailableError):
        list(client.stream("abc", None, RequestOptions(timeout=20.0)))
    assert script.pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], "the next would end after 21.2 s"
    left = [20.0 - sum(script.pauses[:tries]) for tries in range(8)]
    # gRPC rounds what is above 10 s up to whole seconds.
    assert all(-1.1 < told - call.seconds_left < 3.0 for told, call in zip(left, server.calls, strict=True))


def test_the_timeout_is_the_deadline(connect, server):
    server.hold()
    for client, options in (
        (connect(server.target), RequestOptions(timeout=0.2)),
        (connect(server.target, timeout=0.2), None),
        (connect(server.target, timeout=60.0), RequestOptions(timeout=0.2)),
    ):
        for work in (client.generate, client.stream):
            begun = time.monotonic()
            with pytest.raises(DeadlineError):
                list(work("abc", None, options))
            assert 0.15 < time.monotonic() - begun < 30.0
    assert all(call.seconds_left < 0.3 for call in server.calls)  # none, where the server's thread was late


def test_one_that_is_late_does_not_end_the_others_of_generate_each(client, server):
    server.hold()
    inputs = [("a", SamplingParams(), RequestOptions(timeout=0.2)), ("b", SamplingParams())]
    results = client.generate_each(inputs)
    index, error = next(results)
    assert index == 0 and isinstance(error, DeadlineError)
    server.release()
    [(index, output)] = results
    assert index == 1 and output.text == "<b>"


def test_nobody_there(connect):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = connect(f"127.0.0.1:{taken.getsockname()[1]}")
        script = client.script_time()
        for work in (client.load, lambda: list(client.stream("abc"))):
            with pytest.raises(ServerUnavailableError):
                work()
        assert len(script.pauses) == 8
        with pytest.raises(ServerUnavailableError):
            client.health()
        assert len(script.pauses) == 8, "health is asked once"


def test_a_service_that_comes_back_is_found_again(connect):
    server = FakeServer()
    client = connect(server.target, max_retries=9)
    assert client.generate("a")[0].text == "<a>"
    server.stop()
    with pytest.raises(ServerUnavailableError):
        connect(server.target, max_retries=0).generate("a")
    again = FakeServer(f"127.0.0.1:{server.port}")
    assert client.generate("b")[0].text == "<b>"
    again.stop()


def test_a_service_that_dies_ends_its_streams(client, server):
    server.hold()
    script = client.script_time()
    stream = client.stream("abc")
    next(stream)
    server.stop()
    with pytest.raises((ServerUnavailableError, AbortedError)):
        list(stream)
    assert script.pauses == []


def test_messages_that_are_too_large_are_not_sent_again(connect, server):
    script = (client := connect(server.target, max_message_mib=0.5)).script_time()
    with pytest.raises(InvalidRequestError, match=r"^message: .*524288 bytes.*larger than max"):
        client.generate("x" * 600_000)
    with pytest.raises(InvalidRequestError, match=r"^message: .*larger than max"):
        connect(server.target).generate("x" * 2_000_000)  # the server takes 1 MiB
    assert script.pauses == [] and server.calls == []


@pytest.mark.parametrize(
    "error", [ConflictError("2 requests run"), UnsupportedError("no profiler"), AccessDeniedError("no")]
)
def test_admin_calls_raise_as_well(client, server, error):
    for work in (client.flush_cache, client.load, client.start_profile):
        server.admin_faults.append(error)
        with pytest.raises(type(error), match=str(error)):
            work()


def test_admin_calls_that_may_not_run_twice_are_tried_once(client, server):
    script = client.script_time()
    server.admin_faults.append(UNAVAILABLE)
    assert client.load().running == 2
    assert len(script.pauses) == 1
    for work in (client.drain, client.start_profile, client.stop_profile):
        server.admin_faults.append(UNAVAILABLE)
        with pytest.raises(ServerUnavailableError):
            work()
    assert len(script.pauses) == 1
