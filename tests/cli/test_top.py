"""The live view, from scripted readings."""

from __future__ import annotations

import copy
import io

import pytest
from rich.console import Console

from jaxoverlap.cli.top import screen
from jaxoverlap.observe.step_times import HOST_LAPS, LAPS
from tests.client.fake_server import FakeServer

HISTOGRAM = {"bounds": [0.01, 0.1], "counts": [0, 0, 0], "sum": 0.0}
BEFORE = {
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0.0,
    "request_success": {"length": 1, "error": 0},
    "prompt_tokens": 0,
    "generation_tokens": 100,
    "prefix_cache_queries": 0,
    "prefix_cache_hits": 0,
    "num_preemptions": 0,
    "steps": 10,
    "overlapped_steps": 5,
    "exposed_host_seconds": 0.5,
    "time_to_first_token_seconds": HISTOGRAM,
    "inter_token_latency_seconds": HISTOGRAM,
    "step_host_seconds": HISTOGRAM,
    "boundary_seconds": dict.fromkeys(LAPS, 0.0),
    "boundary_exposed_seconds": dict.fromkeys(HOST_LAPS, 0.0),
}


@pytest.fixture
def after() -> dict:
    after = copy.deepcopy(BEFORE)
    after |= {"generation_tokens": 500, "steps": 60, "overlapped_steps": 50, "exposed_host_seconds": 0.505}
    after |= {"num_requests_running": 3, "num_requests_waiting": 7, "kv_cache_usage_perc": 0.25}
    after["inter_token_latency_seconds"] = {"bounds": [0.01, 0.1], "counts": [100, 100, 100], "sum": 1.0}
    after["step_host_seconds"] = {"bounds": [0.01, 0.1], "counts": [50, 50, 50], "sum": 0.05}
    after["boundary_seconds"] |= {"plan": 0.03, "wait": 0.45, "commit": 0.02}
    after["boundary_exposed_seconds"] |= {"plan": 0.005}
    return after


def shown(work) -> dict[str, str]:
    """Lines by their first word or words."""
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(work)
    lines = [line.strip() for line in console.export_text().splitlines() if line.strip()]
    return {line.split("  ")[0]: " ".join(line.split()) for line in lines}


def test_rates_latencies_and_exposed_time_are_of_the_interval(after):
    lines = shown(screen("toy at somewhere", 8, BEFORE, after, 2.0))
    assert lines["tokens/s"] == "tokens/s 200.0 prompt tokens/s 0.0"
    assert lines["running"] == "running 3 of 8 waiting 7"
    assert lines["KV pages used"] == "KV pages used 25% prefix cache hits –"
    assert lines["between tokens ms, p50 / p99"] == "between tokens ms, p50 / p99 5 / 9.9 failed 0"
    assert lines["overlapped steps"] == "overlapped steps 90.0% host ms a step 1"
    assert lines["exposed share of host time"] == "exposed share of host time 10.0% exposed ms a step 0.1"
    assert lines["plan"].startswith("plan 600 6.0% 100 rows and pages")
    assert lines["wait"].startswith("wait 9000 90.0% the device")
    assert "mask" not in lines


def test_an_idle_server_has_nothing_to_divide_by():
    lines = shown(screen("toy", 8, BEFORE, BEFORE, 1.0))
    assert lines["overlapped steps"] == "overlapped steps – host ms a step –"


def test_one_look(cli, after):
    server = FakeServer()
    server.metrics = iter([BEFORE, after])
    result = cli("top", "--once", "--interval", 0.1, "--target", server.target)
    assert result.exit_code == 0 and "fake at" in result.stdout and "tokens/s" in result.stdout
    server.stop()


def test_a_server_that_has_started_anew_is_shown_since_then(after):
    new = copy.deepcopy(BEFORE) | {"generation_tokens": 50, "steps": 5, "overlapped_steps": 4}
    new["inter_token_latency_seconds"] = {"bounds": [0.01, 0.1], "counts": [40, 50, 50], "sum": 0.6}
    lines = shown(screen("toy", 8, after, new, 2.0))
    assert lines["tokens/s"] == "tokens/s 25.0 prompt tokens/s 0.0"
    assert lines["overlapped steps"].startswith("overlapped steps 80.0%")
