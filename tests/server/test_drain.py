"""A server that is about to stop: callers go elsewhere, what runs goes on, and nothing idle holds it up."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxoverlap import Client, SamplingParams
from jaxoverlap.v1 import admin_service_pb2 as admin
from jaxoverlap.v1 import generate_service_pb2 as pb
from tests.server.rig import Caller, Rig, eventually, expected, generation, running
from tests.server.test_statuses import failure_of

SERVICE = "/jaxoverlap.v1.GenerateService/"
SHORT = SamplingParams(max_tokens=2)


class Balancer:
    """Carries each new connection to whom `target` names at that moment."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                host, port = self.target.rsplit(":", 1)
                server = socket.create_connection((host, int(port)))
                self._ends += [caller, server]
                for ends in ((caller, server), (server, caller)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def two_servers() -> Iterator[tuple[Rig, Rig, Balancer]]:
    """And a balancer that sends callers to the first of them."""
    with running() as first, running() as second, closing(Balancer(first.target)) as balancer:
        yield first, second, balancer


def test_callers_of_a_server_that_drains_get_to_another_one():
    with two_servers() as (first, second, balancer), Client(balancer.address, progress=False) as client:
        client.generate("Hello", SHORT)
        balancer.target = second.target
        first.caller.admin.Drain(admin.DrainRequest(timeout_seconds=5))
        for _ in range(3):
            client.generate("Hello", SHORT)


def test_callers_get_there_though_the_balancer_learns_of_it_late():
    with two_servers() as (first, second, balancer), Client(balancer.address, max_retries=12) as client:
        client.generate("Hello", SHORT)
        first.caller.admin.Drain(admin.DrainRequest(timeout_seconds=5))
        change = threading.Timer(1.0, setattr, (balancer, "target", second.target))
        change.start()
        client.generate("Hello", SHORT)
        change.join()


def test_streams_go_on_while_a_server_drains_and_it_can_still_be_asked():
    with running() as rig:
        given = generation("a long one", stop={"max_tokens": 400})
        rig.hold()
        stream = rig.caller.stream(given)
        rig.wait_queued(1)
        drain = rig.caller.admin.Drain.future(admin.DrainRequest(timeout_seconds=20))
        rig.step_until(lambda: len(rig.frontend._servers) == 2)
        late = Caller(rig.target)
        for caller in (late, rig.caller):
            # At the very moment that a connection ends it may be CANCELLED.
            eventually(lambda: failure_of(caller.answer, generation()).code() == grpc.StatusCode.UNAVAILABLE)  # noqa: B023
            health = health_pb2_grpc.HealthStub(caller.channel)
            assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        rig.device.allow(None)
        assert late.admin.GetLoad(admin.GetLoadRequest()).draining
        assert [i for event in stream for i in event.delta.token_ids] == expected(given)
        assert drain.result().still_running == 0
        late.close()


def watches(channel: grpc.Channel) -> grpc.Call:
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert next(call).status == health_pb2.HealthCheckResponse.SERVING
    return call


def reflects(channel: grpc.Channel) -> grpc.Call:
    asked = threading.Event()

    def questions() -> Iterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        asked.wait(20.0)

    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(questions())
    next(call)
    call.add_callback(asked.set)
    return call


def says_nothing(channel: grpc.Channel) -> grpc.Call:
    ended = threading.Event()
    call = channel.stream_unary(SERVICE + "Generate").future(iter(lambda: ended.wait(20.0) and None, None))
    call.add_callback(ended.set)
    return call


@pytest.mark.parametrize("opens", [watches, reflects, says_nothing])
def test_what_is_idle_does_not_hold_up_a_server_that_stops(opens):
    with running() as rig:
        call = opens(rig.caller.channel)
        eventually(lambda: rig.frontend._guards[0]._idle)
        begun = time.monotonic()
        rig.drain_and_stop(20.0)
        rig._loop_thread.join(20.0)
        assert rig.exit_code == 0 and time.monotonic() - begun < 5.0
        error = call.exception() if opens is says_nothing else failure_of(list, call)
        assert error.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Tokenize"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_method_takes_one_message(rig, method, count):
    message = pb.GenerateRequest(generation=generation()).SerializeToString()
    call = rig.caller.channel.stream_stream(SERVICE + method)(iter([message] * count), timeout=20)
    error = failure_of(list, call)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "this method takes one" in error.details()


def test_a_call_without_its_message_has_a_place():
    with running(max_streams=1) as rig:
        call = says_nothing(rig.caller.channel)
        eventually(lambda: rig.frontend._places.num_open == 1)
        assert "max_streams" in failure_of(rig.caller.answer, generation()).details()
        call.cancel()
        eventually(lambda: rig.frontend._places.num_open == 0)
        rig.check_probe()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_beyond_the_limit_is_a_line_in_the_log(caplog, stream):
    with running(max_message_mib=30 / 2**20) as rig, caplog.at_level(logging.WARNING):
        given = pb.Generation(text="a", stop={"max_tokens": 2})
        error = failure_of(list, rig.caller.stream(given)) if stream else failure_of(rig.caller.answer, given)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "Sent message larger than max" in error.details()
    assert all(record.exc_info is None for record in caplog.records)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
