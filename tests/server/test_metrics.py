"""What Prometheus sees: everything is counted once, and nothing is left over."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from prometheus_client.core import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from jaxoverlap.errors import ConfigError
from jaxoverlap.scheduler.plan import RowStatus
from jaxoverlap.server import metrics
from jaxoverlap.server.config import ServerConfig
from jaxoverlap.server.metrics import EngineCollector, serving_metrics
from jaxoverlap.v1 import admin_service_pb2, generate_service_pb2
from tests.server.processes import SMALL, Served
from tests.server.rig import Rig, eventually, generation

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")


class Metrics:
    """Scrapes, as Prometheus would read them."""

    def __init__(self, url: str) -> None:
        self.url = url

    def read(self) -> dict[str, Any]:
        """Values by name without the prefix; where there are labels, by their values."""
        found: dict[str, Any] = {}
        with urllib.request.urlopen(self.url, timeout=20) as page:
            families = text_string_to_metric_families(page.read().decode())
        for sample in (sample for family in families for sample in family.samples):
            name = sample.name.removeprefix("jaxoverlap_")
            if sample.labels:
                found.setdefault(name, {})[*sample.labels.values(),] = sample.value
            else:
                found[name] = sample.value
        return found

    def idle(self) -> dict[str, Any]:
        """Once nothing runs; what must then be true is checked."""

        def settled() -> dict[str, Any] | None:
            values = self.read()
            ended = sum(values["request_success_total"].values())
            # Pages come back with the last step in flight, after the end of its requests.
            is_empty = [values[name] for name in GAUGES] == [0, 0, 0]
            return values if is_empty and values["request_started_total"] == ended else None

        values = eventually(settled, "the end of all that has started")
        assert values["request_generation_tokens_sum"] == values["generation_tokens_total"]
        assert values["request_generation_tokens_count"] == values["request_started_total"]
        return values


@pytest.fixture(scope="module")
def served_metrics(shared_rig: Rig) -> Iterator[Metrics]:
    collector = EngineCollector()

    async def connect() -> None:
        collector.connect(lambda: shared_rig.client.ask("metrics"))

    asyncio.run_coroutine_threadsafe(connect(), shared_rig.loop).result()
    with serving_metrics("127.0.0.1", 0, collector) as port:
        yield Metrics(f"http://127.0.0.1:{port}/metrics")


@pytest.fixture
def gained(served_metrics: Metrics, rig: Rig) -> Callable[[], dict[str, Any]]:
    """What has been counted since the test began, once nothing runs."""
    before = served_metrics.idle()

    def difference() -> dict[str, Any]:
        after = served_metrics.idle()
        reasons, old = after["request_success_total"], before["request_success_total"]
        by_reason = {reason[0]: count - old[reason] for reason, count in reasons.items() if count != old[reason]}
        numbers = {name: value - before[name] for name, value in after.items() if isinstance(value, float)}
        return numbers | {"reasons": by_reason}

    return difference


def test_the_engine_reads_exactly_what_is_described(rig, served_metrics):
    described = {*metrics.GAUGES, *metrics.COUNTERS, *metrics.BY_REASON, *metrics.BY_BOUNDARY, *metrics.HISTOGRAMS}
    read = asyncio.run_coroutine_threadsafe(rig.client.ask("metrics"), rig.loop).result()
    assert set(read) == described
    assert served_metrics.read()["engine_up"] == 1


def test_tokens_in_answers_add_up_to_the_totals(rig, served_metrics, gained):
    given = [generation("Hello" * count, stop={"max_tokens": count}) for count in (1, 2, 5, 9)]
    given.append(generation("samples", num_sequences=3))
    answers = [rig.caller.answer(one) for one in given]
    sequences = [sequence for answer in answers for sequence in answer.sequences]
    gain = gained()
    assert gain["request_started_total"] == len(sequences) == 7
    assert sum(gain["reasons"].values()) == 7 and set(gain["reasons"]) <= {"length", "eos"}
    assert gain["prompt_tokens_total"] == sum(answer.sequences[0].usage.prompt_tokens for answer in answers)
    assert gain["generation_tokens_total"] == sum(len(sequence.token_ids) for sequence in sequences)
    assert gain["inter_token_latency_seconds_count"] == gain["generation_tokens_total"] - 7
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert gain[name + "_count"] == 7
    assert gain["e2e_request_latency_seconds_sum"] >= gain["time_to_first_token_seconds_sum"] > 0
    assert gain["steps_total"] >= gain["overlapped_steps_total"] > 0
    assert gain["step_host_seconds_count"] == gain["steps_total"]
    assert gain["step_host_seconds_sum"] >= gain["exposed_host_seconds_total"] > 0
    laps = served_metrics.read()["boundary_seconds_total"]
    assert {("ingest",), ("plan",), ("launch",), ("wait",), ("commit",), ("send",)} <= laps.keys()
    assert all(laps[name] > 0 for name in (("plan",), ("launch",), ("commit",), ("send",)))
    assert gain["compiles_after_ready_total"] == gain["bad_rows_total"] == 0


def test_every_way_to_end_is_counted(rig, gained):
    text = rig.caller.answer(generation("stop me", stop={"max_tokens": 40, "ignore_eos": True})).sequences[0].text
    stopped = generation("stop me", stop={"max_tokens": 40, "ignore_eos": True, "strings": [text[2:4]]})
    rig.device.allow(10)  # so that it is stopped before it has come to its length
    assert rig.caller.answer(stopped).sequences[0].text == text[:2]
    rig.device.allow(None)
    rig.wait_idle()
    rig.hold()
    late = generate_service_pb2.GenerateRequest(
        generation=generation("late", stop={"max_tokens": 400, "ignore_eos": True})
    )
    late = rig.caller.generate.Generate.future(late, timeout=1.0)
    assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    stream = rig.caller.stream(generation("leaves", stop={"max_tokens": 400, "ignore_eos": True}))
    rig.device.allow(None)
    next(stream)
    stream.cancel()
    with pytest.raises(grpc.RpcError, match="max_tokens"):
        rig.caller.answer(generation("never gets in", stop={"max_tokens": 1, "min_tokens": 2}))
    gain = gained()
    assert gain["request_started_total"] == 4
    assert gain["reasons"].pop("stop_string") == 1 and gain["reasons"].pop("length") == 1
    assert gain["reasons"].keys() <= {"aborted", "error"}  # who notices a deadline first
    assert gain["e2e_request_latency_seconds_count"] == 2


def test_gauges_fall_to_zero_when_everything_is_aborted_at_once(rig, served_metrics, gained):
    rig.hold()
    given = generation("aborted", stop={"max_tokens": 500, "ignore_eos": True})
    streams = [rig.caller.stream(given) for _ in range(7)]
    rig.wait_queued(7)
    rig.device.allow(1)
    eventually(lambda: rig.device.is_held)
    reading = threading.Thread(target=lambda: seen.update(served_metrics.read()))
    seen: dict[str, Any] = {}
    reading.start()
    eventually(lambda: step_until_done(rig, reading))
    assert (seen["num_requests_running"], seen["num_requests_waiting"]) == (4, 3)
    assert 0 < seen["kv_cache_usage_perc"] < 1
    rig.device.allow(None)
    rig.caller.admin.AbortRequests(admin_service_pb2.AbortRequestsRequest(all=True), timeout=20)
    for stream in streams:
        with pytest.raises(grpc.RpcError, match="aborted by an operator"):
            list(stream)
    assert gained()["reasons"] == {"aborted": 7}


def step_until_done(rig: Rig, thread: threading.Thread) -> bool:
    """The engine answers between two steps."""
    rig.device.allow(1)
    thread.join(0.02)
    return not thread.is_alive()


def test_a_row_of_nans_is_counted_and_ends_its_request_alone(rig, gained, monkeypatch):
    monkeypatch.setattr(rig.device, "_run_decode", lambda row, page, ids: (-1, RowStatus.BAD_LOGITS))
    with pytest.raises(grpc.RpcError, match="NaN"):
        rig.caller.answer(generation("poison", stop={"max_tokens": 5, "ignore_eos": True}))
    monkeypatch.undo()
    gain = gained()
    assert gain["bad_rows_total"] == 1 and gain["reasons"] == {"error": 1}


def test_an_engine_that_does_not_answer_leaves_no_numbers_behind(rig, served_metrics, monkeypatch):
    monkeypatch.setattr(metrics, "_PATIENCE", 0.2)
    rig.hold()
    stream = rig.caller.stream(generation("held", stop={"max_tokens": 4}))
    eventually(lambda: rig.device.is_held)
    assert served_metrics.read() == {"engine_up": 0}
    rig.device.allow(None)
    list(stream)
    assert served_metrics.read()["engine_up"] == 1


def test_before_there_is_an_engine_it_is_not_up():
    registry = CollectorRegistry()
    registry.register(EngineCollector())
    assert [family.name for family in registry.collect()] == ["jaxoverlap_engine_up"]


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot serve metrics on 127.0.0.1:{port}"),
            serving_metrics("127.0.0.1", port, EngineCollector()),
        ):
            pass


def test_two_front_ends_have_one_page_and_logs_name_requests_without_their_prompts():
    options = ("--frontends", "2", "--metrics-port", "0", "--log-format", "json", "--log-level", "debug")
    with Served(*SMALL, *options) as server:
        server.wait_ready()
        lines = [json.loads(line) for line in server.log().splitlines()]
        url = next(line["message"].split()[-1] for line in lines if line["message"].startswith("metrics at "))
        callers = [server.caller() for _ in range(6)]
        given = generation("SECRET PROMPT", stop={"ignore_eos": True})
        answers = [caller.answer(given) for caller in callers]
        values = Metrics(url).idle()
        assert values["request_started_total"] == 6
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        written = server.log()
    lines = [json.loads(line) for line in written.splitlines()]
    ended = {line["request_id"]: line for line in lines if "output_tokens" in line}
    assert set(ended) == {answer.request_id for answer in answers}
    assert all(line["output_tokens"] == 8 and line["level"] == "debug" for line in ended.values())
    assert {line["process"] for line in lines} >= {"server"}
    assert "SECRET" not in written and answers[0].sequences[0].text not in written


def test_a_host_of_metrics_without_a_port_is_refused():
    with pytest.raises(ConfigError, match=r"metrics_host: '0.0.0.0' is not allowed without metrics_port"):
        ServerConfig(metrics_host="0.0.0.0")
