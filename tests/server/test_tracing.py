"""Spans, as a collector receives them."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from jaxoverlap.errors import ConfigError
from jaxoverlap.server import config as config_module
from jaxoverlap.server.config import ServerConfig
from tests.server.processes import ROOT
from tests.server.rig import eventually, generation, running

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LONG = {"max_tokens": 500, "ignore_eos": True}


class Collector:
    """Takes spans over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        taken = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                taken._take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def _take(self, body: bytes) -> None:
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {a.value.string_value for a in of_resource.resource.attributes if a.key == "service.name"}
            self.spans += [span for of_scope in of_resource.scope_spans for span in of_scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    thread.join()
    collector.server.server_close()


def values(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {attribute.key: plain(attribute.value) for attribute in span.attributes}


def test_a_request_is_a_span_below_its_callers_with_its_moments_and_numbers(collector):
    with running(otlp_traces_endpoint=collector.url) as rig:
        metadata = [("traceparent", f"00-{TRACE}-{PARENT}-01")]
        given = generation("SECRET PROMPT", stop={"ignore_eos": True})
        answer = rig.caller.answer(given, metadata=metadata)
        list(rig.caller.stream(generation("another")))
    first, second = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert collector.services == {"jaxoverlap"}
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert (first.name, second.name) == ("Generate", "GenerateStream")
    assert second.trace_id != first.trace_id and not second.parent_span_id
    found = values(first)
    assert found["gen_ai.response.id"] == answer.request_id and found["gen_ai.request.model"] == "toy"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (13, 8)
    assert found["gen_ai.response.finish_reasons"] == ["length"] and "error.type" not in found
    assert [event.name for event in first.events] == ["queued", "admitted", "first token"]
    moments = [event.time_unix_nano for event in first.events]
    moments = [first.start_time_unix_nano, *moments, first.end_time_unix_nano]
    assert moments == sorted(moments) and moments[-1] - moments[0] < 20e9
    assert "SECRET" not in str(first) and answer.sequences[0].text not in str(first)


def test_spans_of_requests_that_failed_say_so(collector):
    with running(otlp_traces_endpoint=collector.url) as rig:
        left = rig.caller.stream(generation("left", stop=LONG))
        next(left)
        left.cancel()
        rig.wait_idle()
        rig.hold()
        late = rig.caller.stream(generation("late", stop=LONG), timeout=1.0)
        with pytest.raises(grpc.RpcError):
            list(late)
        rig.wait_idle()
    left, late = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert left.status.code == late.status.code == 2  # ERROR
    assert values(left)["error.type"] == "cancelled" and values(left)["gen_ai.usage.output_tokens"] > 0
    assert values(late)["error.type"] in ("cancelled", "DeadlineError")  # who notices first
    assert [event.name for event in left.events] == ["queued", "admitted", "first token"]
    # Its deadline may be noticed after the device was let go again, and then it has a token.
    assert [event.name for event in late.events] in (["queued"], ["queued", "admitted", "first token"])
    assert values(left)["gen_ai.response.finish_reasons"] == []


def test_a_collector_that_is_away_disturbs_nobody():
    with running(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as rig:
        rig.check_probe()
        eventually(lambda: not rig.client.calls())


def test_without_the_package_the_option_is_refused(monkeypatch):
    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxoverlap\[otel\]'"):
        ServerConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(ConfigError, match="use a URL"):
        ServerConfig(otlp_traces_endpoint="localhost:4318")


def test_without_the_option_nothing_of_it_is_imported():
    code = (
        "import jaxoverlap.server.frontend_process, jaxoverlap.server.serve, sys; print('opentelemetry' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "False"
