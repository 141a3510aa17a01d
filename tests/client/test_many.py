"""Many prompts at once: no more than allowed, in bounded memory, and nothing left running."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import closing

import pytest

from jaxoverlap import (
    AsyncClient,
    Client,
    DeadlineError,
    InvalidRequestError,
    SamplingParams,
    ServerUnavailableError,
)
from tests.client.fake_server import MAX_MODEL_LEN

ANY = SamplingParams()


def all_cancelled(server, count):
    server.wait_for_calls(count)
    return all(call.is_cancelled() for call in server.calls)


def test_no_more_calls_than_allowed(connect, server):
    client, server.seconds = connect(server.target, concurrency=3), 0.02
    assert len(client.generate(["abc"] * 40)) == 40
    assert server.most_open == 3
    assert len(list(client.generate_each([("abc", ANY)] * 40, window=5))) == 40
    assert server.most_open == 5


def test_inputs_are_drawn_as_room_appears(client):
    drawn = 0

    def inputs():
        nonlocal drawn
        for number in range(50):
            drawn += 1
            yield f"p{number}", ANY

    done = {}
    for index, output in client.generate_each(inputs(), window=4):
        done[index] = output.text
        assert drawn <= len(done) + 4
    assert done == {number: f"<p{number}>" for number in range(50)}


def test_answers_come_as_they_finish(client, server):
    server.hold()
    results = client.generate_each(iter([("slow", ANY), ("x" * MAX_MODEL_LEN, ANY), ("slow too", ANY)]))
    index, error = next(results)
    assert index == 1 and isinstance(error, InvalidRequestError) and error.field == "prompt"
    server.release()
    assert sorted((index, output.text) for index, output in results) == [(0, "<slow>"), (2, "<slow too>")]


def test_inputs_that_can_not_be_sent_yield_their_error(client, server):
    inputs = [("a", ANY), (None, ANY), ("\ud800", ANY), ("b", ANY)]
    results = dict(client.generate_each(inputs))
    assert {index: getattr(result, "text", None) for index, result in results.items()} == {
        0: "<a>",
        1: None,
        2: None,
        3: "<b>",
    }
    assert isinstance(results[1], InvalidRequestError) and len(server.calls) == 2


def test_nothing_now_lets_what_is_under_way_go_on(client):
    """An input that waits for an answer to an earlier one."""
    done = []

    def inputs():
        yield None
        yield "a", ANY
        while not done:
            yield None
        yield "b", ANY

    for index, output in client.generate_each(inputs()):
        done.append((index, output.text))
    assert done == [(0, "<a>"), (1, "<b>")]


def test_a_service_that_is_gone_ends_the_whole(connect, server):
    client = connect(server.target, max_retries=0)
    server.faults.append(ServerUnavailableError("draining"))
    with pytest.raises(ServerUnavailableError, match="draining"):
        list(client.generate_each([("a", ANY)] * 3, window=1))
    assert len(server.calls) == 1


def test_the_first_error_of_a_list_cancels_the_others(client, server):
    server.hold()
    server.late_with = 4
    with pytest.raises(DeadlineError):
        client.generate(["a", "b", "late", "c"])
    assert len(server.calls) == 4
    assert all(call.is_cancelled() for call in server.calls if call.generation.text != "late")


def test_leaving_a_stream_cancels_its_call(client, server):
    server.hold()
    stream = client.stream("abc")
    next(stream)
    stream.close()
    assert all_cancelled(server, 1)


def test_dropping_a_stream_cancels_its_call(server):
    server.hold()
    with Client(server.target) as client:
        for _ in client.stream("abc"):
            break
        assert all_cancelled(server, 1)


def test_dropping_an_asynchronous_stream_cancels_its_call(server):
    server.hold()

    async def main():
        async with AsyncClient(server.target) as client:
            async for _ in client.stream("abc"):
                break
            assert await asyncio.to_thread(all_cancelled, server, 1)

    asyncio.run(main())


def test_leaving_generate_each_cancels_what_is_under_way(client, server):
    server.hold()
    server.late_with = 6
    results = client.generate_each([("late", ANY)] + [("abc", ANY)] * 5)
    index, error = next(results)
    assert index == 0 and isinstance(error, DeadlineError)
    results.close()
    assert len(server.calls) == 6
    assert all(call.is_cancelled() for call in server.calls if call.generation.text != "late")


def test_a_stream_that_was_read_to_its_end_is_not_cancelled(client, server):
    list(client.stream("abc"))
    client.generate(["a", "b"])
    assert not any(call.cancelled.wait(0.1) for call in server.calls)


@pytest.mark.parametrize("work", ["generate", "generate list", "stream", "chat"])
def test_ctrl_c_leaves_nothing_running(server, work):
    server.hold()
    count = 5 if work == "generate list" else 1

    def interrupt():
        server.wait_for_calls(count)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with Client(server.target, progress=False) as client:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            {
                "generate": lambda: client.generate("abc"),
                "generate list": lambda: client.generate(["abc"] * 5),
                "stream": lambda: list(client.stream("abc")),
                "chat": lambda: client.chat([{"role": "user", "content": "abc"}]),
            }[work]()
        thread.join()
        assert all_cancelled(server, count)
        server.release()
        assert client.generate("x")[0].text == "<x>", "the client can be used again"


@pytest.mark.parametrize("work", ["generate", "stream", "generate_each"])
def test_a_task_that_is_cancelled_cancels_its_calls(server, work):
    server.hold()

    async def begin(client):
        if work == "generate":
            await client.generate(["abc"] * 3)
        elif work == "stream":
            async for _ in client.stream("abc"):
                pass
        else:
            async for _ in client.generate_each([("abc", ANY)] * 3):
                pass

    async def main():
        async with AsyncClient(server.target, progress=False) as client:
            task = asyncio.create_task(begin(client))
            await asyncio.to_thread(server.wait_for_calls, 1 if work == "stream" else 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(all_cancelled, server, 1)

    asyncio.run(main())


def test_closing_the_client_ends_its_streams(server):
    server.hold()
    client = Client(server.target, progress=False)
    stream = client.stream("abc")
    next(stream)
    client.close()
    with closing(stream), pytest.raises(Exception, match="closed"):
        list(stream)
    assert all_cancelled(server, 1)
