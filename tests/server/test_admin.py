"""What operators see and do."""

from __future__ import annotations

import gzip
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from jaxoverlap import __version__
from jaxoverlap.cli.main import app
from jaxoverlap.engine.load_meter import LoadMeter
from jaxoverlap.engine.profiler import DEFAULT_STEPS, Profiler
from jaxoverlap.errors import ConfigError, ConflictError
from jaxoverlap.server.config import ServerConfig
from jaxoverlap.v1 import admin_service_pb2 as pb
from jaxoverlap.v1 import generate_service_pb2 as generate
from tests.server.rig import PATIENCE, eventually, expected, generation, running
from tests.server.test_statuses import failure_of, field_of
from tests.server.toy import CONTEXT
from tests.toy_tokenizer import EOS_ID

CONFLICT = grpc.StatusCode.FAILED_PRECONDITION


def test_model_and_server_tell_what_they_are(rig):
    model = rig.caller.admin.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_name, model.architecture, model.dtype) == ("toy", "toy", "uint64")
    assert (model.vocab_size, model.max_model_len, list(model.eos_token_ids)) == (EOS_ID + 1, CONTEXT, [EOS_ID])
    assert model.has_chat_template and not model.HasField("bos_token_id")
    assert {"temperature", "seed", "stop"} <= set(model.capabilities)
    server = rig.caller.admin.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.version, server.api_version, server.instance_id) == (__version__, "v1", "toy")
    assert (server.page_size, server.num_pages, server.max_running) == (4, 600, 4)
    assert 0 < server.uptime_seconds < 600 and list(server.devices) == ["toy"] and server.schedule == "overlap"
    assert server.kv_cache_dtype == "int8"


def test_the_load_rises_and_falls(rig):
    rig.hold()
    calls = [rig.caller.stream(generation(f"call {n}", stop={"max_tokens": 40})) for n in range(6)]
    rig.wait_queued(6)
    answer = rig.caller.admin.GetLoad.future(pb.GetLoadRequest())
    rig.step_until(answer.done)
    load = answer.result()
    assert (load.running, load.queued, load.draining) == (4, 2, False)
    assert 0 < load.kv_used_fraction < 0.2
    rig.device.allow(None)
    for call in calls:
        list(call)
    rig.wait_idle()
    load = rig.caller.admin.GetLoad(pb.GetLoadRequest())
    assert (load.running, load.queued, load.kv_used_fraction) == (0, 0, 0)
    assert load.tokens_per_second > 0


def test_the_cache_is_flushed_when_nothing_runs(rig):
    given = generation("flush this prompt, please")
    rig.caller.answer(given)
    assert rig.caller.answer(given).sequences[0].usage.cached_prompt_tokens == 24
    rig.hold()
    call = rig.caller.stream(generation("running"))
    rig.wait_queued(1)
    refused = rig.caller.admin.FlushCache.future(pb.FlushCacheRequest())
    rig.step_until(refused.done)
    assert refused.exception().code() == CONFLICT and "1 requests" in refused.exception().details()
    rig.device.allow(None)
    list(call)
    rig.wait_idle()
    assert rig.caller.admin.FlushCache(pb.FlushCacheRequest()).freed_pages > 0
    assert rig.caller.admin.FlushCache(pb.FlushCacheRequest()).freed_pages == 0
    assert rig.caller.answer(given).sequences[0].usage.cached_prompt_tokens == 0


def test_the_client_command_draws_the_memory_while_a_request_runs(rig):
    rig.hold()
    call = rig.caller.stream(generation("who has which page", stop={"max_tokens": 900}))
    [request] = rig.wait_queued(1)
    rig.step_until(lambda: len(request.output_ids) == 2)
    with ThreadPoolExecutor(1) as thread:
        drawing = thread.submit(CliRunner().invoke, app, ["client", "snapshot", "--svg", "--target", rig.target])
        rig.step_until(lambda: drawing.done() or time.sleep(0.02))
    drawn = drawing.result()
    assert drawn.exit_code == 0 and drawn.stdout.startswith("<svg") and "toy-0-" in drawn.stdout
    rig.device.allow(None)
    list(call)


def test_the_memory_snapshot_names_requests_as_callers_know_them(rig):
    rig.hold()
    call = rig.caller.stream(generation("who has which page", stop={"max_tokens": 20}))
    rig.wait_queued(1)
    request = rig.requests()[0]
    rig.step_until(lambda: len(request.output_ids) == 2)
    answer = rig.caller.admin.GetMemorySnapshot.future(pb.GetMemorySnapshotRequest())
    rig.step_until(answer.done)
    snapshot = json.loads(answer.result().json)
    rig.device.allow(None)
    started = next(call).started
    owners = {page["request_id"] for page in snapshot["pages"] if page["owner"] == "row"}
    assert owners == {started.request_id}
    assert len(snapshot["pages"]) == 600 and snapshot["own"] > 0
    list(call)


def test_a_drain_waits_for_what_runs_and_lets_nothing_in():
    with running() as rig:
        rig.hold()
        given = generation("running", stop={"max_tokens": 30})
        call = rig.caller.stream(given)
        rig.wait_queued(1)
        impatient = rig.caller.admin.Drain.future(pb.DrainRequest(timeout_seconds=0.01))
        rig.step_until(impatient.done)
        assert impatient.result().still_running == 1
        error = failure_of(rig.caller.answer, generation())
        assert error.code() == grpc.StatusCode.UNAVAILABLE and "about to stop" in error.details()
        health = health_pb2_grpc.HealthStub(rig.caller.channel)
        service = health_pb2.HealthCheckRequest(service="jaxoverlap.v1.GenerateService")
        eventually(lambda: health.Check(service).status == health_pb2.HealthCheckResponse.NOT_SERVING)
        patient = rig.caller.admin.Drain.future(pb.DrainRequest(timeout_seconds=PATIENCE))
        rig.device.allow(None)
        assert [i for event in call for i in event.delta.token_ids] == expected(given)
        assert patient.result().still_running == 0
        assert field_of(failure_of(rig.caller.admin.Drain, pb.DrainRequest(timeout_seconds=-1))) == "timeout_seconds"


def test_a_front_end_that_is_told_to_stop_first_hears_what_the_engine_has_said():
    with running() as rig:
        rig.hold()
        given = generation("until the last word", stop={"max_tokens": 30})
        call = rig.caller.stream(given)
        rig.wait_queued(1)
        rig.drain_and_stop(PATIENCE)
        eventually(lambda: rig.frontend._stop_seconds is not None)
        rig.device.allow(None)
        assert [i for event in call for i in event.delta.token_ids] == expected(given)
        eventually(lambda: rig.exit_code is not None)
        assert rig.exit_code == 0


def test_profiles_need_a_folder(rig):
    for call, request in (
        (rig.caller.admin.StartProfile, pb.StartProfileRequest()),
        (rig.caller.admin.StopProfile, pb.StopProfileRequest()),
    ):
        assert failure_of(call, request).code() == CONFLICT
    assert field_of(failure_of(rig.caller.admin.StartProfile, pb.StartProfileRequest(steps=0))) == "steps"


def test_a_profile_ends_after_its_steps(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: calls.append(folder))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    profiler = Profiler(str(tmp_path))
    for steps, taken in ((3, 3), (None, DEFAULT_STEPS)):
        assert profiler.start(steps) == str(tmp_path)
        with pytest.raises(ConflictError, match="running already"):
            profiler.start(1)
        for _ in range(taken - 1):
            profiler.count_step()
        assert calls == [str(tmp_path)]
        profiler.count_step()
        assert calls == [str(tmp_path), "stop"]
        calls.clear()
    profiler.start(5)
    assert profiler.stop() == str(tmp_path)
    with pytest.raises(ConflictError, match="no profile"):
        profiler.stop()


def test_a_profile_that_can_not_be_written_is_a_conflict_and_the_engine_goes_on(monkeypatch, tmp_path):
    disk = {"is full": True}

    def stop_trace() -> None:
        if disk["is full"]:
            raise RuntimeError("no space left on device")

    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: None)
    monkeypatch.setattr("jax.profiler.stop_trace", stop_trace)
    with running(profile_dir=str(tmp_path / "profiles")) as rig:
        admin = rig.caller.admin
        admin.StartProfile(pb.StartProfileRequest(steps=3))
        rig.check_probe()  # of more steps
        error = failure_of(admin.StartProfile, pb.StartProfileRequest())
        assert error.code() == CONFLICT and "still to be stopped" in error.details()
        error = failure_of(admin.StopProfile, pb.StopProfileRequest())
        assert error.code() == CONFLICT and "no space left" in error.details()
        disk["is full"] = False
        assert admin.StopProfile(pb.StopProfileRequest()).trace_dir == str(tmp_path / "profiles")
        assert failure_of(admin.StopProfile, pb.StopProfileRequest()).code() == CONFLICT
        rig.check_probe()


def test_a_profile_that_can_not_be_started_is_a_conflict(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConflictError, match="can't be started"):
        Profiler(str(tmp_path / "file")).start(1)
    profiler = Profiler(str(tmp_path))
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: 1 / 0)
    with pytest.raises(ConflictError, match="can't be started"):
        profiler.start(1)
    with pytest.raises(ConflictError, match="no profile"):
        profiler.stop()


def test_a_folder_for_profiles_that_can_not_be_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"profile_dir: .*file is not a folder"):
        ServerConfig(profile_dir=str(tmp_path / "file" / "profiles"))
    assert ServerConfig(profile_dir=str(tmp_path / "new" / "profiles"))


def test_an_id_that_is_named_twice_or_otherwise_is_of_one_request(rig):
    rig.hold()
    call = rig.caller.stream(generation("abort me", stop={"max_tokens": 500}))
    rig.wait_queued(1)
    [name] = [call.request_id for call in rig.client.calls()]
    others = [name.replace("-0-", "-00-"), f"{name[: name.rindex('-')]}-0{name.rpartition('-')[2]}", "toy-0-٣"]
    answer = rig.caller.admin.AbortRequests.future(pb.AbortRequestsRequest(request_ids=[name, *others, name]))
    rig.step_until(answer.done)
    assert (list(answer.result().aborted_ids), list(answer.result().unknown_ids)) == ([name], others)
    assert failure_of(list, call).code() == grpc.StatusCode.ABORTED


def test_a_request_at_the_door_is_aborted_once(rig, monkeypatch):
    class Slow:
        def submit(self, sampling):
            return Future()

    monkeypatch.setattr(rig.engine, "constraints", Slow())
    call = rig.caller.stream(generation("compile", constraint={"any_json": True}, num_sequences=3))
    [name] = [call.request_id for call in eventually(rig.client.calls)]
    assert rig.caller.admin.GetLoad(pb.GetLoadRequest()).queued == 3, "sequences, as of those that wait for a row"
    answer = rig.caller.admin.AbortRequests(pb.AbortRequestsRequest(request_ids=[name, name]), timeout=PATIENCE)
    assert list(answer.aborted_ids) == [name]
    assert failure_of(list, call).code() == grpc.StatusCode.ABORTED


def test_all_samples_of_a_call_have_the_id_that_its_caller_knows(rig):
    rig.hold()
    given = generation("three", num_sequences=3, stop={"max_tokens": 200})
    call = rig.caller.generate.Generate.future(generate.GenerateRequest(generation=given))
    eventually(lambda: len(rig.requests()) == 3 or rig.device.is_held)
    [name] = [call.request_id for call in rig.client.calls()]
    rig.step_until(lambda: all(len(request.output_ids) > 0 for request in rig.requests()))
    snapshot = rig.caller.admin.GetMemorySnapshot.future(pb.GetMemorySnapshotRequest())
    rig.step_until(snapshot.done)
    pages = json.loads(snapshot.result().json)["pages"]
    assert {page["request_id"] for page in pages if page["owner"] == "row"} == {name}
    first = rig.requests()[0]
    [known] = rig.client.calls()
    rig.loop.call_soon_threadsafe(rig.client._send, "stop", known.samples[0].key)  # its text has come to a stop string
    rig.step_until(lambda: first.finish_reason is not None)
    answer = rig.caller.admin.AbortRequests.future(pb.AbortRequestsRequest(request_ids=[name]))
    rig.step_until(answer.done)
    assert list(answer.result().aborted_ids) == [name]
    assert call.exception().code() == grpc.StatusCode.ABORTED


@pytest.mark.parametrize("question", ["memory_snapshot", "step_log"])
def test_long_answers_are_made_while_the_engine_goes_on(rig, monkeypatch, question):
    """Of 50,000 pages, or of 1,000 steps with 256 rows, they take most of a second."""
    may_end, begun = threading.Event(), threading.Event()

    def described(*_):
        begun.set()
        assert may_end.wait(PATIENCE)
        return {"pages": []}

    monkeypatch.setattr("jaxoverlap.scheduler.snapshot.MemorySnapshot.to_dict", described)
    monkeypatch.setattr("jaxoverlap.observe.step_log.StepRecord.to_dict", described)
    rig.check_probe()
    if question == "memory_snapshot":
        answer = rig.caller.admin.GetMemorySnapshot.future(pb.GetMemorySnapshotRequest())
    else:
        answer = rig.caller.admin.GetStepLog.future(pb.GetStepLogRequest(last=1))
    assert begun.wait(PATIENCE)
    rig.check_probe()
    assert not answer.done()
    may_end.set()
    assert "pages" in answer.result().json


def test_tokens_per_second_are_those_of_the_last_seconds():
    now = 0.0
    meter = LoadMeter(lambda: now)
    for _ in range(100):
        now += 0.1
        meter.add(20)
    assert meter.tokens_per_second() == pytest.approx(200, rel=0.1)
    now += 5
    assert meter.tokens_per_second() == pytest.approx(100, rel=0.15)
    now += 100
    assert meter.tokens_per_second() == 0
    assert (meter.num_steps, meter.num_tokens) == (100, 2000)


def test_an_idle_server_sleeps(rig):
    """The engine's thread is in `select`, the front end looks up a few times a second; both are in this process."""
    rig.wait_idle()
    steps = rig.client.status.num_steps
    before, started = time.process_time(), time.monotonic()
    time.sleep(1.0)
    assert time.process_time() - before < 0.05 * (time.monotonic() - started)
    assert rig.client.status.num_steps == steps


def test_the_step_log_tells_of_the_last_steps(rig):
    rig.caller.answer(generation("log me", stop={"max_tokens": 6, "ignore_eos": True}))
    rig.wait_idle()
    records = json.loads(rig.caller.admin.GetStepLog(pb.GetStepLogRequest(last=3)).json)
    assert len(records) == 3 and records[-1]["kind"] == "decode" and records[-1]["state"] == "committed"
    assert list(records[-1]["finished"].values()) == ["length"]
    assert len(json.loads(rig.caller.admin.GetStepLog(pb.GetStepLogRequest()).json)) <= 100


def test_a_trace_is_recorded_on_a_running_server(rig):
    admin = rig.caller.admin
    assert failure_of(admin.StopTrace, pb.StopTraceRequest()).code() == CONFLICT
    assert field_of(failure_of(admin.StartTrace, pb.StartTraceRequest(max_steps=0))) == "max_steps"
    admin.StartTrace(pb.StartTraceRequest(max_steps=50))
    assert failure_of(admin.StartTrace, pb.StartTraceRequest()).code() == CONFLICT
    rig.caller.answer(generation("trace me", stop={"max_tokens": 9, "ignore_eos": True}))
    rig.wait_idle()
    trace = json.loads(gzip.decompress(admin.StopTrace(pb.StopTraceRequest()).trace))
    assert trace["otherData"]["steps"] == 9 and trace["otherData"]["model"] == "toy"
    names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "host"}
    assert {"ingest", "plan", "launch", "wait", "commit", "send"} <= names
    assert rig.engine.loop.timeline is None


def test_what_is_counted_can_be_asked_for(rig):
    counted = json.loads(rig.caller.admin.GetMetrics(pb.GetMetricsRequest()).json)
    assert counted["steps"] >= 0 and set(counted["boundary_seconds"]) >= {"plan", "send"}


def test_a_trace_larger_than_a_socket_takes_comes_home_from_an_idle_engine(rig, monkeypatch):
    monkeypatch.setattr("jaxoverlap.observe.trace_file.packed", lambda timeline, about: bytes(3 << 20))
    rig.caller.admin.StartTrace(pb.StartTraceRequest())
    assert rig.caller.admin.StopTrace(pb.StopTraceRequest(), timeout=PATIENCE).trace == bytes(3 << 20)


def test_a_trace_that_can_not_be_made_is_an_error_and_the_engine_goes_on(rig, monkeypatch):
    monkeypatch.setattr("jaxoverlap.observe.trace_file.packed", lambda timeline, about: 1 / 0)
    rig.caller.admin.StartTrace(pb.StartTraceRequest())
    assert failure_of(rig.caller.admin.StopTrace, pb.StopTraceRequest()).code() == grpc.StatusCode.INTERNAL
    rig.check_probe()


def test_health_lists_its_services(rig):
    health = health_pb2_grpc.HealthStub(rig.caller.channel)
    found = {name: one.status for name, one in health.List(health_pb2.HealthListRequest()).statuses.items()}
    services = ("", "jaxoverlap.v1.GenerateService", "jaxoverlap.v1.AdminService")
    assert found == dict.fromkeys(services, health_pb2.HealthCheckResponse.SERVING)


def test_more_ids_than_an_engine_should_look_up_between_two_steps_are_refused(rig):
    ids = [f"x{number}" for number in range(10_001)]
    error = failure_of(rig.caller.admin.AbortRequests, pb.AbortRequestsRequest(request_ids=ids))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and field_of(error) == "request_ids"
    assert "10000 at most" in error.details()
    assert rig.caller.admin.AbortRequests(pb.AbortRequestsRequest(request_ids=ids[1:])).unknown_ids == ids[1:]
