"""How a server begins and ends: its processes, its port, its calls, its exit code."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxoverlap.engine import messages
from jaxoverlap.observe import trace_file
from jaxoverlap.server.address import Address, reserved
from jaxoverlap.server.config import ServerConfig
from jaxoverlap.v1 import admin_service_pb2 as admin
from jaxoverlap.v1 import generate_service_pb2 as pb
from tests.server.processes import ROOT, SMALL, Served
from tests.server.rig import Caller, eventually, expected, generation
from tests.server.test_statuses import failure_of
from tests.server.toy import BLOCKS, BREAKS

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
GENERATE = "jaxoverlap.v1.GenerateService"
SLOW = {"TOY_STEP_SECONDS": "0.02"}


def health_of(caller: Caller, service: str = GENERATE) -> str:
    stub = health_pb2_grpc.HealthStub(caller.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def open_streams(caller: Caller, count: int, max_tokens: int) -> list:
    """Streams that have brought their first token."""
    given = [generation(f"stream {n}", stop={"max_tokens": max_tokens}) for n in range(count)]
    streams = [(one, caller.stream(one)) for one in given]
    for _, stream in streams:
        assert next(stream).HasField("started")
    return streams


def ids_of(stream) -> list[int]:
    return [i for event in stream for i in event.delta.token_ids]


def test_an_idle_server_has_its_address_alone_stops_at_once_and_leaves_nothing():
    with Served(*SMALL).wait_ready() as served:
        assert len(served.children) == 2
        given = generation()
        assert list(served.caller().answer(given).sequences[0].token_ids) == expected(given)
        with Served(*SMALL, listen=served.address) as second:
            assert second.wait() == 2
            assert f"error: cannot listen on {served.address}: Address already in use" in second.log()
        served.signal(signal.SIGHUP)  # means nothing
        assert health_of(served.callers[0]) == "SERVING"
        served.signal(signal.SIGTERM)
        served.check_exits_at_once()
        assert served.process.returncode == 0
        served.check_port_is_free()


def test_running_streams_finish_while_new_calls_are_refused():
    with Served(*SMALL, **SLOW).wait_ready() as served:
        caller = served.caller()
        streams = open_streams(caller, 4, 60)
        served.signal(signal.SIGTERM)
        eventually(lambda: health_of(caller) == "NOT_SERVING")
        assert health_of(caller, "") == "SERVING"
        error = failure_of(caller.answer, generation())
        assert error.code() == UNAVAILABLE and "about to stop" in error.details()
        for given, stream in streams:
            assert ids_of(stream) == expected(given)
        assert served.wait() == 0


def test_at_the_end_of_the_grace_time_calls_are_ended():
    with Served(*SMALL, "--grace", "0.3", **SLOW).wait_ready() as served:
        (_, stream), (_, other) = open_streams(served.caller(), 2, 900)
        served.signal(signal.SIGTERM)
        for one in (stream, other):
            error = failure_of(list, one)
            assert error.code() == UNAVAILABLE and "shutting down" in error.details()
        assert served.wait() == 0


def test_a_second_signal_ends_everything_at_once():
    with Served(*SMALL, "--grace", "600", **SLOW).wait_ready() as served:
        caller = served.caller()
        ((_, stream),) = open_streams(caller, 1, 900)
        served.signal(signal.SIGTERM)
        eventually(lambda: health_of(caller) == "NOT_SERVING")
        served.signal(signal.SIGTERM)
        served.check_exits_at_once()
        assert served.process.returncode == 0
        assert failure_of(list, stream).code() in (UNAVAILABLE, grpc.StatusCode.CANCELLED)


def test_while_it_warms_up_it_lives_but_is_not_ready_and_can_be_stopped():
    with reserved(Address("127.0.0.1")) as address:
        pass
    with Served("--model", "slow", listen=str(address)) as served:
        caller = Caller(str(address))
        served.callers.append(caller)
        assert health_pb2_grpc.HealthStub(caller.channel).Check(
            health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=20
        )
        assert health_of(caller, "") == "SERVING"
        assert health_of(caller) == "NOT_SERVING"
        for call in (
            lambda: caller.answer(generation()),
            lambda: caller.admin.GetModelInfo(admin.GetModelInfoRequest()),
            lambda: caller.generate.Tokenize(pb.TokenizeRequest(text="a")),
        ):
            error = failure_of(call)
            assert error.code() == UNAVAILABLE and "warming up" in error.details()
        served.signal(signal.SIGTERM)
        served.check_exits_at_once()
        assert served.process.returncode == 0


def test_the_engines_death_is_everybodys():
    with Served(*SMALL, **SLOW).wait_ready() as served:
        caller = served.caller()
        ((_, stream),) = open_streams(caller, 1, 900)
        unary = caller.generate.Generate.future(pb.GenerateRequest(generation=generation(stop={"max_tokens": 900})))
        time.sleep(0.05)  # whether it has arrived by then does not matter
        started = time.monotonic()
        served.engine.kill()
        assert failure_of(list, stream).code() == UNAVAILABLE
        assert unary.exception().code() == UNAVAILABLE
        assert served.wait() == 2
        assert time.monotonic() - started < 5
        assert "error: the engine has ended unexpectedly (signal SIGKILL)" in served.log()


def test_a_front_ends_death_is_the_servers():
    with Served(*SMALL, **SLOW).wait_ready() as served:
        ((_, stream),) = open_streams(served.caller(), 1, 900)
        served.frontend.kill()
        assert failure_of(list, stream).code() == UNAVAILABLE
        assert served.wait() == 2
        assert "error: the front end 0 has ended unexpectedly" in served.log()


def test_the_supervisors_death_ends_the_rest():
    with Served(*SMALL, **SLOW).wait_ready() as served:
        ((_, stream),) = open_streams(served.caller(), 1, 900)
        served.process.kill()
        assert failure_of(list, stream).code() == UNAVAILABLE
        assert served.wait() == -signal.SIGKILL
        served.check_port_is_free()


def test_an_error_in_the_step_loop_ends_the_server():
    with Served(*SMALL).wait_ready() as served:
        error = failure_of(served.caller().answer, generation(BREAKS))
        assert error.code() == UNAVAILABLE and "out of toys" in error.details()
        assert served.wait() == 2
        assert "out of toys" in served.log() and "last steps:\nturn 0 step 0 prefill" in served.log()


def test_an_engine_that_hangs_is_not_ready_until_it_goes_on():
    with Served(*SMALL, "--stall-timeout", "0.4", TOY_BLOCK_SECONDS="2.5").wait_ready() as served:
        caller = served.caller()
        given = generation(BLOCKS)
        call = caller.generate.Generate.future(pb.GenerateRequest(generation=given))
        started = time.monotonic()
        eventually(lambda: health_of(caller) == "NOT_SERVING")
        assert time.monotonic() - started < 2 and health_of(caller, "") == "NOT_SERVING"
        assert list(call.result().sequences[0].token_ids) == expected(given)
        eventually(lambda: health_of(caller) == "SERVING")


def test_several_front_ends_share_port_and_engine():
    sizes = ("--max-running", "16", "--num-pages", "600")
    with Served(*sizes, "--frontends", "2", **SLOW).wait_ready() as served:
        assert len(served.children) == 3
        callers = [served.caller() for _ in range(16)]  # a connection each, of which either front end gets some
        given = [generation(f"caller {n}", stop={"max_tokens": 300}) for n in range(16)]
        streams = [caller.stream(one) for caller, one in zip(callers, given, strict=True)]
        names = {next(stream).started.request_id.split("-")[1] for stream in streams[:4]}
        assert callers[0].admin.AbortRequests(admin.AbortRequestsRequest(all=True)).aborted_ids
        assert all(failure_of(list, stream).code() == grpc.StatusCode.ABORTED for stream in streams[:4])
        assert names <= {"0", "1"}
        drained = callers[1].admin.Drain(admin.DrainRequest())
        assert drained.still_running == 0
        for caller in callers:
            assert failure_of(caller.answer, generation()).code() == UNAVAILABLE
        assert health_of(callers[2]) == "NOT_SERVING"


def test_a_front_end_that_hangs_holds_nobody_up():
    with Served(*SMALL, "--frontends", "2").wait_ready() as served:
        callers = [served.caller() for _ in range(12)]
        given = generation("mine", stop={"max_tokens": 200})
        by_frontend = {}
        for caller in callers:
            by_frontend.setdefault(caller.answer(given).request_id.split("-")[1], caller)
        if len(by_frontend) < 2:  # the kernel has given all connections to one of them
            pytest.skip("one front end has all connections")
        processes = {" ".join(child.cmdline()).split('"index": ')[1][0]: child for child in served.children[1:]}
        processes["0"].suspend()
        hanging = by_frontend["0"].generate.Generate.future(pb.GenerateRequest(generation=given))
        for _ in range(5):
            assert list(by_frontend["1"].answer(given).sequences[0].token_ids) == expected(given)
        assert not hanging.done()
        processes["0"].resume()
        assert list(hanging.result(20).sequences[0].token_ids) == expected(given)


def test_everything_in_one_process():
    with Served(*SMALL, "--in-process").wait_ready() as served:
        assert served.children == []
        given = generation()
        assert list(served.caller().answer(given).sequences[0].token_ids) == expected(given)
        served.signal(signal.SIGINT)
        assert served.wait() == 0


def test_a_supervisor_that_is_killed_takes_along_an_engine_that_warms_up():
    with Served("--model", "slow") as served:
        start = psutil.Process(served.process.pid)
        served.children = eventually(lambda: len(there := start.children(recursive=True)) == 2 and there)
        served.process.kill()
        assert served.wait() == -signal.SIGKILL


def test_a_server_that_cannot_start_says_why_in_one_line():
    with Served("--model", "missing") as missing, Served("--model", "crashing") as crashing:
        assert missing.wait() == crashing.wait() == 2
        assert "error: missing: no such file or folder" in missing.log().splitlines()
        assert "error: RuntimeError: no driver" in crashing.log().splitlines()
    with Served("--model", "missing", "--in-process") as served:
        assert served.wait() == 2
        assert "error: missing: no such file or folder" in served.log().splitlines()


def test_with_a_log_in_json_the_fatal_error_is_json_too():
    for options in (["--model", "missing"], ["--model", "missing", "--in-process"], ["--listen", "0.0.0.0:1"]):
        with Served("--log-format", "json", *options) as served:
            assert served.wait() == 2
            lines = [json.loads(line) for line in served.log().splitlines()]
        assert lines[-1]["level"] == "error" and lines[-1]["process"] == "server"
        assert ("other machines" if "--listen" in options else "missing: no such file") in lines[-1]["message"]


def test_a_file_that_can_not_be_used_ends_a_server_before_it_loads_anything(tmp_path):
    (tmp_path / "tokens").write_text("# none\n")
    with Served("--model", "crashing", "--token-file", str(tmp_path / "tokens")) as served:
        assert served.wait() == 2
        assert served.log().splitlines() == [f"error: token_file: {tmp_path / 'tokens'}: there is no token in it"]


def test_a_file_that_a_front_end_can_not_use_any_more_is_told_to_the_supervisor(tmp_path):
    described = json.dumps(
        {
            "config": dataclasses.asdict(ServerConfig()) | {"token_file": str(tmp_path / "gone")},
            "instance": {"instance_id": "x", "started": 0.0, "grace": 1.0},
            "index": 0,
            "address": {},
            "admin_address": None,
        }
    )
    (engine, other), (supervisor, ours) = socket.socketpair(), socket.socketpair()
    arguments = f"[{described}, {engine.fileno()}, {supervisor.fileno()}]"
    command = [sys.executable, "-m", "jaxoverlap.server.frontend_process", arguments]
    run = subprocess.run(
        command, pass_fds=[engine.fileno(), supervisor.fileno()], cwd=ROOT, capture_output=True, text=True
    )
    unpacker = messages.new_unpacker()
    unpacker.feed(ours.recv(1 << 16))
    assert next(unpacker) == ["failed", f"token_file: there is no file '{tmp_path / 'gone'}'"]
    assert (run.returncode, run.stderr) == (1, "")
    for end in (engine, other, supervisor, ours):
        end.close()


def test_a_unix_socket_is_its_owners_alone_and_an_address_has_one_server(tmp_path):
    path = tmp_path / "socket"
    with Served(*SMALL, listen=f"unix:{path}").wait_ready() as served:
        given = generation()
        assert list(served.caller().answer(given).sequences[0].token_ids) == expected(given)
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        with Served(*SMALL, listen=f"unix:{path}") as second:
            assert second.wait() == 2
            assert f"error: cannot listen on unix:{path}: address already in use" in second.log()
        assert served.caller().answer(given).sequences
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
        assert not path.exists()


HANGS = ("--watchdog-seconds", "0.3", "--watchdog-exit-seconds", "1")


def test_a_hung_engine_is_not_healthy_and_then_the_server_ends():
    with Served(*SMALL, *HANGS).wait_ready() as served:
        caller = served.caller()
        assert list(caller.answer(generation()).sequences[0].token_ids) == expected(generation())
        call = caller.generate.Generate.future(pb.GenerateRequest(generation=generation(BLOCKS)))
        eventually(lambda: health_of(caller, "") == "NOT_SERVING")
        assert failure_of(call.result).code() == UNAVAILABLE
        assert served.wait() == 2
        log = served.log()
        assert "the engine hangs: a step has taken" in log and "the process ends with exit code 3" in log
        assert "pipeline: turn" in log and "last steps:\nturn 0 step 0" in log and "in launch" in log


def test_an_engine_that_goes_on_after_the_watchdogs_report_is_healthy_again():
    slow = {"TOY_BLOCK_SECONDS": "1.5"}
    with Served(*SMALL, "--watchdog-seconds", "0.3", "--watchdog-exit-seconds", "inf", **slow).wait_ready() as served:
        caller = served.caller()
        caller.answer(generation())
        call = caller.generate.Generate.future(pb.GenerateRequest(generation=generation(BLOCKS)))
        eventually(lambda: health_of(caller) == "NOT_SERVING")
        assert list(call.result().sequences[0].token_ids) == expected(generation(BLOCKS))
        eventually(lambda: health_of(caller) == "SERVING")


def test_a_server_says_where_its_trace_has_gone(tmp_path):
    path = tmp_path / "t.json"
    with Served(*SMALL, "--trace", str(path)).wait_ready() as served:
        served.caller().admin.StopTrace(admin.StopTraceRequest())
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
        assert f"no trace at {path}: an operator has stopped the recording" in served.log()
    assert not path.exists()


def test_a_server_writes_its_trace_when_it_stops(tmp_path):
    path = tmp_path / "t.json"
    with Served(*SMALL, "--trace", str(path)).wait_ready() as served:
        served.caller().answer(generation())
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
        assert f"trace written to {path}" in served.log()
    assert {"host", "device"} <= {event.get("cat") for event in trace_file.read(path)["traceEvents"]}
